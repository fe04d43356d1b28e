"""Chooses the backend: the configured one, or the best one that really starts a sandbox here."""

import logging

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.images.store import ImageStore
from prorl_gym.sandbox.protocol import HOST_IMAGE, ProbeResult, SandboxBackend
from prorl_gym.sandbox.service.host_facts import find_apptainer
from prorl_gym.sandbox.service.local_backend import LocalBackend
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.warm_pool import with_warm_pool
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

log = logging.getLogger(__name__)


async def open_backend(config: SandboxConfig) -> SandboxBackend:
    """Return a backend that has just started a sandbox here, behind a warm pool if one is configured; logs the choice.

    The configured store resolves names of images; without one there are ``host`` and directories. Raises
    ``SandboxError`` (SANDBOX_UNAVAILABLE) with cause and fix of the first backend that was tried.
    """
    if config.backend == "local":
        log.warning("sandboxes: local. NOTHING is isolated: what the model writes runs as this user")
        return LocalBackend(allow_unsafe_local=config.allow_unsafe_local)
    refused: list[ProbeResult] = []
    for name, reason in backend_candidates(config):
        if name == "apptainer-plain" and any(probe.misconfigured for probe in refused):
            break  # a wrong image must be fixed; a weaker backend is no remedy
        if config.images is None:
            backend = NamespaceBackend(name, config)
        else:
            store = ImageStore(config.images.model_copy(update={"uid": config.uid}))
            backend = NamespaceBackend(name, config, store, on_close=store.close)
        probe = await backend.probe()
        if probe.ok:
            log.info("sandboxes: %s, %s (%s)", name, reason, probe.detail)
            return with_warm_pool(backend, config)
        await backend.close()
        log.warning("sandboxes: %s does not work here: %s", name, probe.detail)
        refused.append(probe)
    first = next((probe for probe in refused if probe.misconfigured), refused[0])
    where = "as configured" if first.misconfigured else "here"
    raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"no sandbox backend works {where}: {first.detail}", first.fix)


def backend_candidates(config: SandboxConfig) -> list[tuple[BackendName, str]]:
    """Return the backends to try, best first (``apptainer-plain`` promises less), each with the reason for the log."""
    if config.backend not in ("auto", "local"):
        return [(config.backend, "as configured")]
    candidates: list[tuple[BackendName, str]] = [("userns", "the default, which needs nothing but the kernel")]
    if find_apptainer(config):
        if config.image != HOST_IMAGE:
            candidates.insert(0, ("apptainer", "since it is installed and sandbox.image is set"))
        reason = "since this user may not create user namespaces, but Apptainer works"
        candidates.append(("apptainer-plain", reason))
    return candidates
