"""What is known about the end of a sandbox: by a signal from outside, with its spawner, or without any reason."""

import asyncio
import os
import signal
import socket

import pytest
from sandbox_support import pids_of

from prorl_gym.errors import Evidence, SandboxError
from prorl_gym.sandbox.guest import guest_messages
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.guest_channel import GuestChannel
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.service.spawner_client import SandboxExit

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

UNEXPLAINED, OUTSIDE = Evidence.SANDBOX_LOST_UNEXPLAINED, Evidence.SANDBOX_KILLED_OUTSIDE


@pytest.mark.parametrize("which", [0, -1])
async def test_sigkill_of_what_holds_a_sandbox_comes_from_outside(backend: NamespaceBackend, which: int) -> None:
    box = await backend.start_sandbox(SandboxSpec())
    os.kill(pids_of(backend, box)[which], signal.SIGKILL)
    with pytest.raises(SandboxError):
        while True:
            await box.exec(["true"], timeout=10)
    assert await box.loss_evidence() is OUTSIDE
    await box.close()
    assert await box.loss_evidence() is OUTSIDE


async def test_a_dead_spawner_takes_the_blame(own_backend: NamespaceBackend) -> None:
    box = await own_backend.start_sandbox(SandboxSpec())
    os.kill(await own_backend.spawner_pid(), signal.SIGKILL)
    with pytest.raises(SandboxError):
        await box.exec(["sleep", "50"], timeout=60)
    assert await box.loss_evidence() is OUTSIDE


async def test_a_sandbox_that_lives_or_was_closed_is_not_lost(backend: NamespaceBackend) -> None:
    box = await backend.start_sandbox(SandboxSpec())
    assert await box.loss_evidence() is None
    await box.close()
    assert await box.loss_evidence() is None


@pytest.mark.parametrize(
    ("end", "evidence"),
    [
        (SandboxExit(-9), OUTSIDE),
        (SandboxExit(137), OUTSIDE),
        (SandboxExit(-9, oom_kills=1), Evidence.LIMIT_BREACHED),
        (SandboxExit(0), UNEXPLAINED),
        (SandboxExit(1), UNEXPLAINED),
        (SandboxExit(-11), UNEXPLAINED),
        (SandboxExit(1, oom_kills=1), UNEXPLAINED),
        (None, OUTSIDE),
    ],
)
async def test_what_an_end_shows(end: SandboxExit | None, evidence: Evidence) -> None:
    box, theirs, ended = scripted()
    ended.set_result(end)
    theirs.close()
    assert await box.loss_evidence() is evidence


async def test_nonsense_on_the_channel_explains_nothing() -> None:
    box, theirs, _ = scripted()
    guest_messages.send_packet(theirs, guest_messages.encode_packet({"type": "nonsense"}))
    assert await box.loss_evidence() is UNEXPLAINED
    theirs.close()


def scripted() -> "tuple[RunningSandbox, socket.socket, asyncio.Future[SandboxExit | None]]":
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ended: asyncio.Future[SandboxExit | None] = asyncio.get_running_loop().create_future()

    async def release() -> None:
        return

    return RunningSandbox("scripted", SandboxSpec(), GuestChannel(ours), release, ended), theirs, ended
