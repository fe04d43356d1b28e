"""The request by which the service has the spawner start a sandbox. Packets are those of ``guest_messages``."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
        """Return the fields of the packet."""
        return {
            "id": self.id,
            "backend": self.backend,
            "spec": _spec_to_json(self.spec),
            "program": self.runtime_path,
            "lower": self.lower_dirs,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LaunchRequest":
        """Read the fields of the packet."""
        return cls(data["id"], data["backend"], _spec_from_json(data["spec"]), data["program"], tuple(data["lower"]))


def _spec_to_json(spec: SandboxSpec) -> dict[str, Any]:
    return {
        "image": spec.image,
        "workdir": spec.workdir,
        "env": dict(spec.env),
        "mounts": [[mount.source, mount.target] for mount in spec.mounts],
        "limits": asdict(spec.limits),
        "network": spec.network,
    }


def _spec_from_json(data: Mapping[str, Any]) -> SandboxSpec:
    return SandboxSpec(
        image=data["image"],
        workdir=data["workdir"],
        env=data["env"],
        mounts=tuple(Mount(source, target) for source, target in data["mounts"]),
        limits=SandboxLimits(**data["limits"]),
        network=data["network"],
    )
