"""A sandbox that dies under a call is a lost sandbox, whichever call sees it first: never a bad image or a bad agent.

The guest is scripted: it starts what it is asked for and dies, or kills, at one seam. The last test does it for real.
"""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from errno import EAGAIN, EINVAL, ENOENT, ENOMEM
from functools import partial
from random import Random
from typing import Any

import pytest

from prorl_gym.agents.tools import BashTool, PythonTool
from prorl_gym.errors import Cause, FailureKind, SandboxError
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.guest import guest_messages
from prorl_gym.sandbox.protocol import Sandbox, SandboxSpec
from prorl_gym.sandbox.service.guest_channel import GuestChannel, GuestTimeouts
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName


class Guest:
    """The other end of a channel. ``act`` decides what happens to each program that is started."""

    def __init__(self, control: socket.socket, act: Callable[["Guest", int], None]) -> None:
        self._control = control
        self._act = act
        self._spare: list[int] = []
        self.started = 0
        self.kills = True
        asyncio.get_running_loop().add_reader(control.fileno(), self._serve)

    def tell(self, descriptors: list[int] | None = None, **message: Any) -> None:
        guest_messages.send_packet(self._control, guest_messages.encode_packet(message), descriptors or ())

    def die(self) -> None:
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()

    def end(self, number: int, status: int, **seen: bool) -> None:
        self.tell(type="exit", pid=number, status=status, **seen)

    def stop_reading_commands(self) -> None:
        """Close what the bash that was started last reads, as the kernel does before it reports bash's end."""
        os.close(self._spare.pop(-2))

    def greet(self) -> None:
        """Let the python worker that was started last take cells, as ``guest/cell_worker.py`` does."""
        os.write(self._conversation, json.dumps({"ready": "console"}).encode() + b"\n")

    def close(self) -> None:
        self.die()
        for descriptor in self._spare:
            os.close(descriptor)

    def _serve(self) -> None:
        received = guest_messages.receive_packet(self._control)
        if received is None:
            return self.die()
        request, _ = received
        if request["op"] in ("spawn", "shell"):
            self.started += 1
            self._start(request)
            self._act(self, self.started)
        else:
            self.tell(type="reply", id=request["id"], gone=self.kills)
            if request["op"] == "kill_tree" and self.kills:
                self.end(request["pid"], -signal.SIGKILL)

    def _start(self, request: dict[str, Any]) -> None:
        if request["op"] == "shell":
            master, terminal = os.openpty()
            text = os.memfd_create("command")
            nonces, reports = os.pipe(), os.pipe()
            given = [master, nonces[1], reports[0], text]
            self._spare += [terminal, nonces[0], reports[1]]
        elif request["channel"]:
            output = os.pipe()
            ours, theirs = socket.socketpair()
            self._conversation = theirs.detach()
            given = [output[0], ours.detach()]
            self._spare += [output[1], self._conversation]
        else:
            pipes = [os.pipe() for _ in range(3)]
            given = [pipes[0][1], pipes[1][0], pipes[2][0]]
            self._spare += [pipes[0][0], pipes[1][1], pipes[2][1]]
        self.tell(given, type="reply", id=request["id"], pid=self.started)
        for descriptor in given:
            os.close(descriptor)


@pytest.fixture
async def box_of() -> AsyncIterator[Callable[..., RunningSandbox]]:
    guests: list[Guest] = []

    def make(
        act: Callable[[Guest, int], None],
        timeouts: GuestTimeouts | None = None,
        count_oom_kills: Callable[[], Awaitable[int]] | None = None,
        *,
        is_silent: bool = False,
    ) -> RunningSandbox:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        guests.append(Guest(theirs, act))
        if is_silent:
            theirs.shutdown(socket.SHUT_WR)  # the service sees the same when the guest's end is closed
        channel = GuestChannel.attach(ours, timeouts)
        channel.count_oom_kills = count_oom_kills
        return RunningSandbox("scripted", SandboxSpec(image="some-image"), channel, _nothing)

    yield make
    for guest in guests:
        guest.close()


async def _nothing() -> None:
    return


async def _shell(box: RunningSandbox) -> None:
    await (await box.shell()).run_command("true", timeout=5)


async def _python(box: RunningSandbox) -> None:
    await (await box.python()).run_cell("1", timeout=5)


async def _exec(box: RunningSandbox) -> None:
    await box.exec(["true"], timeout=5)


def tool_of(make: type[BashTool] | type[PythonTool]) -> Callable[[RunningSandbox], Awaitable[None]]:
    async def act(box: RunningSandbox) -> None:
        async def source() -> Sandbox:
            return box

        await make(source, 5.0)({"command": "true", "code": "1"})

    return act


CALLS = [_shell, _python, _exec, tool_of(BashTool), tool_of(PythonTool)]


def dies(guest: Guest, number: int) -> None:
    guest.die()


def dies_after_its_child(guest: Guest, number: int) -> None:
    """The kernel takes the processes of a namespace in any order: the guest may still report the end of a child."""
    guest.end(number, -signal.SIGKILL)
    guest.die()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("act", [dies, dies_after_its_child])
async def test_a_sandbox_that_dies_under_a_call_is_lost(
    box_of: Callable[..., RunningSandbox],
    call: Callable[[RunningSandbox], Awaitable[None]],
    act: Callable[[Guest, int], None],
) -> None:
    with pytest.raises(SandboxError) as caught:
        await call(box_of(act))
    assert caught.value.kind is FailureKind.SANDBOX_LOST, caught.value


@pytest.mark.parametrize("call", CALLS)
async def test_a_sandbox_that_dies_before_a_later_call_is_lost(
    box_of: Callable[..., RunningSandbox], call: Callable[[RunningSandbox], Awaitable[None]]
) -> None:
    box = box_of(lambda guest, number: None, is_silent=True)
    with pytest.raises(SandboxError) as caught:
        await call(box)
    assert caught.value.kind is FailureKind.SANDBOX_LOST, caught.value


@pytest.mark.parametrize("call", [_shell, tool_of(BashTool)])
async def test_the_end_of_a_killed_shell_is_reported_after_its_descriptors_are_closed(
    box_of: Callable[..., RunningSandbox], call: Callable[[RunningSandbox], Awaitable[None]]
) -> None:
    def act(guest: Guest, number: int) -> None:
        guest.stop_reading_commands()
        report = partial(guest.end, number, -signal.SIGKILL, struck=False, sent=False)
        asyncio.get_running_loop().call_later(0.1, report)

    with pytest.raises(SandboxError) as caught:
        await call(box_of(act))
    assert caught.value.cause is Cause.INFRASTRUCTURE, caught.value


async def test_python_that_was_killed_while_it_started_is_started_again(box_of: Callable[..., RunningSandbox]) -> None:
    def act(guest: Guest, number: int) -> None:
        guest.end(number, -signal.SIGKILL) if number == 1 else guest.greet()

    assert (await box_of(act).python()).cell_runner == "console"


async def test_python_that_is_killed_at_each_start_is_not_the_images_fault(
    box_of: Callable[..., RunningSandbox],
) -> None:
    with pytest.raises(SandboxError) as caught:
        await box_of(lambda guest, number: guest.end(number, -signal.SIGKILL)).python()
    assert caught.value.cause is Cause.INFRASTRUCTURE, caught.value


async def test_python_that_is_killed_at_each_later_start_is_the_agents_doing(
    box_of: Callable[..., RunningSandbox],
) -> None:
    def act(guest: Guest, number: int) -> None:
        if number == 1:
            guest.greet()
        guest.end(number, -signal.SIGKILL)

    box = box_of(act)
    await box.python()
    with pytest.raises(SandboxError) as caught:
        await box.python()
    assert caught.value.kind is FailureKind.SANDBOX_BROKEN_BY_AGENT, caught.value


async def test_python_that_ends_by_itself_is_the_images_fault(box_of: Callable[..., RunningSandbox]) -> None:
    with pytest.raises(SandboxError) as caught:
        await box_of(lambda guest, number: guest.end(number, 1)).python()
    assert caught.value.kind is FailureKind.IMAGE_BROKEN, caught.value


@pytest.mark.parametrize("was_started", [False, True])
async def test_a_slow_start_of_python_is_neither_the_images_nor_the_agents_fault(
    box_of: Callable[..., RunningSandbox], was_started: bool
) -> None:
    def act(guest: Guest, number: int) -> None:
        if was_started and number == 1:
            guest.greet()
            guest.end(number, 0)

    box = box_of(act, GuestTimeouts(python_start=0.3))
    if was_started:
        await box.python()
    with pytest.raises(SandboxError) as caught:
        await box.python()
    assert caught.value.kind is FailureKind.SANDBOX_UNAVAILABLE, caught.value


@pytest.mark.parametrize(("breach", "kind"), [(None, "sandbox_unavailable"), ("processes", "sandbox_broken_by_agent")])
async def test_a_tree_that_does_not_die_is_the_agents_doing_only_at_its_limit_of_processes(
    box_of: Callable[..., RunningSandbox], breach: str | None, kind: str
) -> None:
    def act(guest: Guest, number: int) -> None:
        guest.greet()
        guest.kills = False
        if breach is not None:
            guest.tell(type="breach", pid=number, breach=breach)

    box = box_of(act, GuestTimeouts(kill=0.05, python_interrupt=0.05))

    async def source() -> Sandbox:
        return box

    with pytest.raises(SandboxError) as caught:
        await PythonTool(source, 0.05)({"code": "while True: pass"})
    assert caught.value.kind == kind, caught.value


async def use_a_guest_that_refuses(op: str, answer: dict[str, Any], tool: Any) -> FailureKind:
    """Use a tool in a sandbox whose guest answers one operation with an error; return the kind of the failure."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def refuse() -> None:
        received = guest_messages.receive_packet(theirs)
        if received is None:
            asyncio.get_running_loop().remove_reader(theirs.fileno())
            return
        error = answer if received[0]["op"] == op else {}
        guest_messages.send_packet(
            theirs, guest_messages.encode_packet({"type": "reply", "id": received[0]["id"], **error}), ()
        )

    asyncio.get_running_loop().add_reader(theirs.fileno(), refuse)
    box = RunningSandbox("scripted", SandboxSpec(), GuestChannel.attach(ours), _nothing)
    with pytest.raises(SandboxError) as caught:
        await tool_of(tool)(box)
    await box.close()
    asyncio.get_running_loop().remove_reader(theirs.fileno())
    theirs.close()
    return caught.value.kind


@pytest.mark.parametrize(("errno", "kind"), [(ENOMEM, "sandbox_lost"), (EAGAIN, "sandbox_broken_by_agent")])
async def test_a_guest_that_cannot_fork_is_short_of_the_hosts_memory_or_at_the_payloads_limit(
    errno: int, kind: str
) -> None:
    answer = {"errno": errno, "text": os.strerror(errno)}
    assert await use_a_guest_that_refuses("shell", answer, BashTool) == kind


@pytest.mark.parametrize("op", ["spawn", "shell"])
@pytest.mark.parametrize(("errno", "kind"), [(EINVAL, "sandbox_broken_by_agent"), (ENOMEM, "sandbox_unavailable")])
async def test_a_child_that_cannot_become_what_it_should_is_the_agents_doing_in_a_living_sandbox(
    op: str, errno: int, kind: str
) -> None:
    """Whatever changed it between fork and exec; the kernel's want of memory is the host's."""
    answer = {"errno": errno, "stage": "confine"}
    assert await use_a_guest_that_refuses(op, answer, BashTool if op == "shell" else PythonTool) == kind


@pytest.mark.parametrize(("kills", "breach"), [(1, "memory_sandbox"), (0, None)])
async def test_a_kill_at_the_limit_of_the_cgroup_is_one_for_memory(
    box_of: Callable[..., RunningSandbox], kills: int, breach: str | None
) -> None:
    def act(guest: Guest, number: int) -> None:
        guest.tell(type="exit", pid=number, status=-signal.SIGKILL, struck=False, sent=False)

    async def count() -> int:
        return kills

    box = box_of(act, count_oom_kills=count)
    result = await box.exec(["true"], timeout=5)
    assert (result.breach, result.sigkill_evidence is None) == (breach, breach is not None)


async def test_a_bash_that_is_gone_from_a_lost_sandbox_is_not_missed(box_of: Callable[..., RunningSandbox]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    box = RunningSandbox("scripted", SandboxSpec(image="some-image"), GuestChannel.attach(ours), _nothing)
    opening = asyncio.ensure_future(box.shell())
    received = await asyncio.to_thread(guest_messages.receive_packet, theirs)
    assert received is not None
    guest_messages.send_packet(
        theirs,
        guest_messages.encode_packet({"type": "reply", "id": received[0]["id"], "errno": ENOENT, "stage": "exec"}),
        (),
    )
    theirs.close()
    with pytest.raises(SandboxError) as caught:
        await opening
    assert caught.value.cause is Cause.INFRASTRUCTURE, caught.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "removed", "other"), [(PythonTool, "/usr/bin/python3*", BashTool), (BashTool, "/bin/bash", PythonTool)]
)
async def test_a_tool_that_the_agent_removed_by_another_one_is_its_own_doing(
    own_scratch: Any, make: type[BashTool] | type[PythonTool], removed: str, other: type[BashTool] | type[PythonTool]
) -> None:
    backend = NamespaceBackend("userns", SandboxConfig(scratch=own_scratch))
    leases = SandboxLeases(backend)

    async def source() -> Sandbox:
        return await leases.get_agent_sandbox(SandboxSpec())

    try:
        remove = f"rm -f {removed}"
        await other(source, 20.0)({"command": remove, "code": f"import os; os.system({remove!r})"})
        with pytest.raises(SandboxError) as caught:
            await make(source, 20.0)({"command": "true", "code": "1"})
        assert (await leases.diagnose_failure(caught.value, 0)).kind is FailureKind.SANDBOX_BROKEN_BY_AGENT
    finally:
        await leases.close()
        await backend.close()


@pytest.mark.timeout(120)
async def test_a_spawner_that_dies_at_any_moment_is_infrastructure(backend_name: BackendName, own_scratch: Any) -> None:
    """Real sandboxes: whatever the agent was doing, its tools fail as infrastructure."""
    backend = NamespaceBackend(backend_name, SandboxConfig(scratch=own_scratch))
    chance = Random(10)
    blamed: list[SandboxError] = []

    async def rollout(box: RunningSandbox) -> None:
        async def source() -> Sandbox:
            return box

        bash, python = BashTool(source, 10.0), PythonTool(source, 10.0)
        try:
            while True:
                await python({"code": "import os; os.kill(os.getpid(), 9)"})  # so that it starts again and again
                await bash({"command": "true"})
        except SandboxError as error:
            blamed.append(error)
        finally:
            await box.close()

    try:
        for _ in range(5):
            boxes = await asyncio.gather(*(backend.start_sandbox(SandboxSpec()) for _ in range(4)))
            rollouts = [asyncio.ensure_future(rollout(box)) for box in boxes]
            await asyncio.sleep(chance.uniform(0.0, 0.8))  # at whatever point this falls
            os.kill(await backend.spawner_pid(), signal.SIGKILL)
            await asyncio.gather(*rollouts)
    finally:
        await backend.close()
    assert len(blamed) == 20
    assert {error.cause for error in blamed} == {Cause.INFRASTRUCTURE}, blamed
