"""Finding the programs that some backends use: Apptainer or SingularityCE, and bubblewrap."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.launch import BackendName


@dataclass(frozen=True, slots=True)
class _Runtime:
    name: str
    programs: tuple[str, ...]
    """Names in PATH, best first."""
    setting: str
    package: str


_APPTAINER = _Runtime("Apptainer", ("apptainer", "singularity"), "apptainer", "apptainer or singularity-ce")
_BWRAP = _Runtime("bubblewrap", ("bwrap",), "bwrap", "bubblewrap")
_USED: dict[BackendName, _Runtime] = {"apptainer": _APPTAINER, "apptainer-plain": _APPTAINER, "bwrap": _BWRAP}


def look_for_runtime(backend: BackendName, config: SandboxConfig) -> str | None:
    """Return the path of a backend's program, or ``None``. SingularityCE's name serves where Apptainer's is missing."""
    runtime = _USED[backend]
    wanted: Path | None = getattr(config, runtime.setting)
    found = str(wanted) if wanted else next(filter(None, map(shutil.which, runtime.programs)), None)
    return found if found and os.access(found, os.X_OK) else None


def find_runtime(backend: BackendName, config: SandboxConfig) -> str:
    """Return the path of a backend's program.

    Raises:
        SandboxError: ``SANDBOX_UNAVAILABLE``: it is not installed.
    """
    found = look_for_runtime(backend, config)
    if found is not None:
        return found
    runtime = _USED[backend]
    wanted: Path | None = getattr(config, runtime.setting)
    raise SandboxError(
        FailureKind.SANDBOX_UNAVAILABLE,
        f"{runtime.name} is not installed." if wanted is None else f"sandbox.{runtime.setting}: no program {wanted}.",
        f"Install {runtime.package}, or choose the backend 'userns', which needs none.",
    )
