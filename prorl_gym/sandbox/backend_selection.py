"""Chooses the backend: the configured one, or the best one that really starts a sandbox here."""

import logging

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.images.protocol import ImageResolver
from prorl_gym.sandbox.images.store import ImageStore
from prorl_gym.sandbox.protocol import HOST_IMAGE, ProbeResult, SandboxBackend
from prorl_gym.sandbox.service.host_facts import find_apptainer
from prorl_gym.sandbox.service.local_backend import LocalBackend
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.warm_pool import with_warm_pool
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

log = logging.getLogger(__name__)


async def open_backend(config: SandboxConfig, images: ImageResolver | None = None) -> SandboxBackend:
    """Return a backend that has just started a sandbox here, behind a warm pool if one is configured.

    Logs which backend it is and why.

    Args:
        config: the configuration of sandboxes.
        images: resolves names of images; the configured store by default, and without one ``host`` and directories.

    Raises:
        SandboxError: ``SANDBOX_UNAVAILABLE``, with cause and fix of the first backend that was tried.
    """
    if config.backend == "local":
        log.warning("sandboxes: local. NOTHING is isolated: what the model writes runs as this user")
        return LocalBackend(allow_unsafe_local=config.allow_unsafe_local)
    refused: list[ProbeResult] = []
    for name, reason in backend_candidates(config):
        if name == "apptainer-plain" and any(probe.misconfigured for probe in refused):
            break  # a wrong image must be fixed; a weaker backend is no remedy
        backend = _create_backend(name, config, images)
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


def _create_backend(name: BackendName, config: SandboxConfig, images: ImageResolver | None) -> NamespaceBackend:
    if images is not None or config.images is None:
        return NamespaceBackend(name, config, images)
    store = ImageStore(config.images.model_copy(update={"uid": config.uid}))
    return NamespaceBackend(name, config, store, on_close=store.close)


def backend_candidates(config: SandboxConfig) -> list[tuple[BackendName, str]]:
    """Return the backends to try, best first, each with the reason for the log.

    ``apptainer-plain`` promises less and comes last.
    """
    if config.backend not in ("auto", "local"):
        return [(config.backend, "as configured")]
    candidates: list[tuple[BackendName, str]] = [("userns", "the default, which needs nothing but the kernel")]
    if find_apptainer(config):
        if config.image != HOST_IMAGE:
            candidates.insert(0, ("apptainer", "since it is installed and sandbox.image is set"))
        reason = "since this user may not create user namespaces, but Apptainer works"
        candidates.append(("apptainer-plain", reason))
    return candidates
