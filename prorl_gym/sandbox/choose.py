"""Which backend to use: the one that was asked for, or the best one that really works here."""

import logging
from pathlib import Path

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.backend import NamespaceBackend, find_apptainer
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.launch import BackendName
from prorl_gym.sandbox.local import LocalBackend
from prorl_gym.sandbox.protocol import HOST_USR, Probe, SandboxBackend

log = logging.getLogger(__name__)


async def open_backend(config: SandboxConfig) -> SandboxBackend:
    """Return a backend that has started a sandbox here a moment ago. The log says which and why.

    Raises:
        SandboxError: ``SANDBOX_UNAVAILABLE``, with cause and fix of the first that was tried.
    """
    if config.backend == "local":
        log.warning("sandboxes: local. NOTHING is isolated: what the model writes runs as this user")
        return LocalBackend(allow_unsafe_local=config.allow_unsafe_local)
    refused: list[Probe] = []
    for name, reason in candidates(config):
        backend = NamespaceBackend(name, config)
        probe = await backend.probe()
        if probe.ok:
            log.info("sandboxes: %s, %s (%s)", name, reason, probe.detail)
            return backend
        await backend.close()
        log.warning("sandboxes: %s does not work here: %s", name, probe.detail)
        refused.append(probe)
    first = refused[0]
    raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"no sandbox backend works here: {first.detail}", first.fix)


def candidates(config: SandboxConfig) -> list[tuple[BackendName, str]]:
    """Return the backends to try, best first, each with the reason for the log."""
    if config.backend == "userns":
        return [("userns", "as configured")]
    if config.backend == "apptainer":
        return [("apptainer", "as configured")]
    userns: tuple[BackendName, str] = ("userns", "the default, which needs nothing but the kernel")
    if config.image != HOST_USR and Path(config.image).is_dir() and find_apptainer():
        return [("apptainer", "since it is installed and sandbox.image is set"), userns]
    return [userns]
