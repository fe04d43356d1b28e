"""NeMo Gym's provider contract, which comes without type stubs: the only module of this package that imports it."""

from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxPtyError,
    SandboxPtySpec,
    SandboxResources,
    SandboxStatus,
)
from nemo_gym.sandbox.providers.base import SandboxSpec as GymSpec

__all__ = [
    "GymSpec",
    "SandboxCreateError",
    "SandboxExecResult",
    "SandboxHandle",
    "SandboxPtyError",
    "SandboxPtySpec",
    "SandboxResources",
    "SandboxStatus",
]
