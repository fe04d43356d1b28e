"""The process of the service has threads, so it must never fork: its sandboxes come from a process without any."""

import os
from pathlib import Path

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName


def fork_once() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


async def test_the_process_of_the_service_never_forks(backend_name: BackendName, own_scratch: Path) -> None:
    forks: list[int] = []
    os.register_at_fork(before=lambda: forks.append(os.getpid()))
    fork_once()
    assert len(forks) == 1, "a fork would be seen"
    backend = NamespaceBackend(backend_name, SandboxConfig(scratch=own_scratch))
    try:
        box = await backend.start_sandbox(SandboxSpec())
        assert (await box.exec(["echo", "here"], timeout=20)).stdout == b"here\n"
        await box.close()
    finally:
        await backend.close()
    assert len(forks) == 1
