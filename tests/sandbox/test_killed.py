"""SIGKILL at any moment leaves no process, no mount and no directory."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from sandbox_support import children_of, wait_until_dead

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.spawner.scratch import Reaped

SERVICE = str(Path(__file__).with_name("busy_service.py"))
SECONDS = 5.0
COUNT = 3


class Running:
    """A busy service with handles on every process below it."""

    def __init__(self, process: "subprocess.Popen[bytes]", facts: dict[str, object]) -> None:
        self.process = process
        self.spawner = int(str(facts["spawner"]))
        self.handles: list[int] = []
        for pid in children_of(process.pid)[1:]:
            with suppress(ProcessLookupError):  # some are very short-lived
                self.handles.append(os.pidfd_open(pid))

    def kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def survivors(self) -> int:
        return wait_until_dead(self.handles, SECONDS)


@contextmanager
def busy_service(backend_name: str, scratch: Path) -> Iterator[Running]:
    command = [sys.executable, SERVICE, backend_name, str(COUNT), str(scratch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        running = Running(process, json.loads(process.stdout.readline()))
        try:
            yield running
        finally:
            process.kill()
            for handle in running.handles:
                os.close(handle)


def mounted(scratch: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(scratch) in line]


async def reap_with_a_new_service(scratch: Path) -> Reaped:
    backend = NamespaceBackend("userns", SandboxConfig(scratch=scratch, uid=os.stat(scratch).st_uid or 61099))
    try:
        return await backend.reap()
    finally:
        await backend.close()


@pytest.mark.default
async def test_killed_service_leaves_nothing(backend_name: str, own_scratch: Path) -> None:
    with busy_service(backend_name, own_scratch) as running:
        assert len(running.handles) > 6 * COUNT
        assert len(os.listdir(own_scratch)) == COUNT
        running.kill(running.process.pid)
        assert running.survivors() == 0
    assert os.listdir(own_scratch) == []
    assert mounted(own_scratch) == []


async def test_killed_spawner_takes_its_sandboxes_along(backend_name: str, own_scratch: Path) -> None:
    with busy_service(backend_name, own_scratch) as running:
        running.kill(running.spawner)
        assert running.survivors() == 0
        assert running.process.poll() is None  # the service lives on
    assert mounted(own_scratch) == []
    await reap_with_a_new_service(own_scratch)
    assert os.listdir(own_scratch) == []


async def test_service_and_spawner_killed_at_once(backend_name: str, own_scratch: Path) -> None:
    with busy_service(backend_name, own_scratch) as running:
        os.kill(running.spawner, signal.SIGSTOP)  # it cannot clean up: only the kernel can
        running.kill(running.process.pid, running.spawner)
        assert running.survivors() == 0
    assert len(os.listdir(own_scratch)) == COUNT
    await reap_with_a_new_service(own_scratch)
    assert os.listdir(own_scratch) == []
