"""What is known about the end of a sandbox: by a signal from outside, with its spawner, or without any reason."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest
from sandbox_support import children_of, kernel_has_user_namespaces

from prorl_gym.errors import Evidence, SandboxError
from prorl_gym.sandbox.backend import NamespaceBackend
from prorl_gym.sandbox.box import Box
from prorl_gym.sandbox.channel import Channel
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.guest import wire
from prorl_gym.sandbox.launch import BackendName
from prorl_gym.sandbox.loss import End, HostMemory
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.scratch import read_state

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

UNEXPLAINED, OUTSIDE = Evidence.SANDBOX_LOST_UNEXPLAINED, Evidence.SANDBOX_KILLED_OUTSIDE
BACKENDS = [
    "userns",
    pytest.param("apptainer", marks=[pytest.mark.apptainer, pytest.mark.second_backend]),
    pytest.param("bwrap", marks=pytest.mark.bwrap),
]


@pytest.fixture(scope="module", params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> BackendName:
    if not kernel_has_user_namespaces():
        pytest.skip("this kernel refuses user namespaces to ordinary users")
    return request.param


def processes_of(backend: NamespaceBackend, box: Box) -> list[int]:
    """The processes that hold a sandbox, the outermost first; payloads have not begun."""
    state = read_state(backend.scratch / box.id, "")
    assert state is not None and state.init is not None
    return children_of(state.init.pid)


@pytest.mark.parametrize("which", [0, -1])
async def test_sigkill_of_what_holds_a_sandbox_comes_from_outside(backend: NamespaceBackend, which: int) -> None:
    box = await backend.start(SandboxSpec())
    os.kill(processes_of(backend, box)[which], signal.SIGKILL)
    with pytest.raises(SandboxError):
        while True:
            await box.exec(["true"], timeout=10)
    assert await box.loss() is OUTSIDE
    await box.close()
    assert await box.loss() is OUTSIDE


async def test_a_dead_spawner_takes_the_blame(backend_name: BackendName, own_scratch: Path) -> None:
    backend = NamespaceBackend(backend_name, SandboxConfig(scratch=own_scratch))
    try:
        box = await backend.start(SandboxSpec())
        os.kill(await backend.spawner_pid(), signal.SIGKILL)
        with pytest.raises(SandboxError):
            await box.exec(["sleep", "50"], timeout=60)
        assert await box.loss() is OUTSIDE
    finally:
        await backend.close()


async def test_a_sandbox_that_lives_or_was_closed_is_not_lost(backend: NamespaceBackend) -> None:
    box = await backend.start(SandboxSpec())
    assert await box.loss() is None
    await box.close()
    assert await box.loss() is None


@pytest.mark.parametrize(
    ("end", "evidence"),
    [
        (End(-9), OUTSIDE),
        (End(137), OUTSIDE),
        (End(-9, memory_kills=1), Evidence.LIMIT_BREACHED),
        (End(0), UNEXPLAINED),
        (End(1), UNEXPLAINED),
        (End(-11), UNEXPLAINED),
        (End(1, memory_kills=1), UNEXPLAINED),
        (None, OUTSIDE),
    ],
)
async def test_what_an_end_shows(end: End | None, evidence: Evidence) -> None:
    box, theirs, ended = scripted()
    ended.set_result(end)
    theirs.close()
    assert await box.loss() is evidence


async def test_nonsense_on_the_channel_explains_nothing() -> None:
    box, theirs, _ = scripted()
    wire.send(theirs, wire.encode({"type": "nonsense"}))
    assert await box.loss() is UNEXPLAINED
    theirs.close()


def scripted() -> "tuple[Box, socket.socket, asyncio.Future[End | None]]":
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ended: asyncio.Future[End | None] = asyncio.get_running_loop().create_future()

    async def release() -> None:
        return

    return Box("scripted", SandboxSpec(), Channel.attach(ours), release, ended), theirs, ended


@pytest.mark.parametrize(
    ("now", "short"), [(HostMemory(7, 0.0), False), (HostMemory(8, 0.0), True), (HostMemory(7, 50.0), True)]
)
async def test_when_a_host_was_short_of_memory(now: HostMemory, short: bool) -> None:
    assert now.was_short_since(HostMemory(7, 0.0)) is short
    assert HostMemory.now().kills >= 0
