"""The request by which the service has the spawner start a sandbox. Packets are those of ``guest_messages``."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from prorl_gym.sandbox.protocol import Mount, SandboxLimits, SandboxSpec

BackendName = Literal["userns", "apptainer", "apptainer-plain"]


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """One sandbox to start."""

    id: str
    backend: BackendName
    spec: SandboxSpec
    runtime_path: str = ""
    """Path of Apptainer, for backends that use it."""
    lower_dirs: tuple[str, ...] = ()
    """Directories of the image, topmost first; none for the host's ``/usr``. ``apptainer-plain`` also takes one SIF."""

    def to_json(self) -> dict[str, Any]:
        spec = replace(self.spec, env=dict(self.spec.env), egress=(), python_tool=None)  # the service's own
        return asdict(replace(self, spec=spec))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LaunchRequest":
        fields: dict[str, Any] = {**data["spec"], "egress": ()}
        fields["mounts"] = tuple(Mount(**mount) for mount in fields["mounts"])
        fields["limits"] = SandboxLimits(**fields["limits"])
        return cls(data["id"], data["backend"], SandboxSpec(**fields), data["runtime_path"], tuple(data["lower_dirs"]))
