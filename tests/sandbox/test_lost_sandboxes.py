"""A sandbox that dies under a call is a lost sandbox, whichever call sees it first: never a bad image or a bad agent.

The guest is scripted: it starts what it is asked for and dies, or kills, at one seam. The last test does it for real.
"""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from errno import EAGAIN, EINVAL, ENOENT, ENOMEM
from functools import partial
from random import Random
from typing import Any

import pytest
from sandbox_support import closing, fails_as, source_of

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

Boxes = Callable[..., RunningSandbox]
Call = Callable[[RunningSandbox], Awaitable[None]]
Act = Callable[["Guest", int], None]


class Guest:
    """The other end of a channel.

    ``act`` decides what happens to each program that is started; ``refusals`` are answers to operations that fail,
    after which the guest is gone if it ``dies_refusing``.
    """

    def __init__(
        self,
        control: socket.socket,
        act: Act,
        refusals: Mapping[str, Mapping[str, Any]],
        dies_refusing: bool,
    ) -> None:
        self._control = control
        self._act = act
        self._refusals = refusals
        self._dies_refusing = dies_refusing
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
        if request["op"] in self._refusals:
            self.tell(type="reply", id=request["id"], **self._refusals[request["op"]])
            if self._dies_refusing:
                self.die()
        elif request["op"] in ("spawn", "shell"):
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
async def box_of() -> AsyncIterator[Boxes]:
    guests: list[Guest] = []

    def make(
        act: Act,
        timeouts: GuestTimeouts | None = None,
        count_oom_kills: Callable[[], Awaitable[int]] | None = None,
        *,
        is_silent: bool = False,
        refusals: Mapping[str, Mapping[str, Any]] | None = None,
        dies_refusing: bool = False,
    ) -> RunningSandbox:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        guests.append(Guest(theirs, act, refusals or {}, dies_refusing))
        if is_silent:
            theirs.shutdown(socket.SHUT_WR)  # the service sees the same when the guest's end is closed
        channel = GuestChannel(ours, timeouts)
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


def tool_of(make: type[BashTool] | type[PythonTool]) -> Call:
    async def act(box: RunningSandbox) -> None:
        await make(source_of(box), 5.0)({"command": "true", "code": "1"})

    return act


CALLS = [_shell, _python, _exec, tool_of(BashTool), tool_of(PythonTool)]


def idle(guest: Guest, number: int) -> None:
    """Nothing happens to what is started."""


def dies(guest: Guest, number: int) -> None:
    guest.die()


def dies_after_its_child(guest: Guest, number: int) -> None:
    """The kernel takes the processes of a namespace in any order: the guest may still report the end of a child."""
    guest.end(number, -signal.SIGKILL)
    guest.die()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("act", [dies, dies_after_its_child])
async def test_a_sandbox_that_dies_under_a_call_is_lost(box_of: Boxes, call: Call, act: Act) -> None:
    with fails_as(FailureKind.SANDBOX_LOST):
        await call(box_of(act))


@pytest.mark.parametrize("call", CALLS)
async def test_a_sandbox_that_dies_before_a_later_call_is_lost(box_of: Boxes, call: Call) -> None:
    with fails_as(FailureKind.SANDBOX_LOST):
        await call(box_of(idle, is_silent=True))


@pytest.mark.parametrize("call", [_shell, tool_of(BashTool)])
async def test_the_end_of_a_killed_shell_is_reported_after_its_descriptors_are_closed(
    box_of: Boxes, call: Call
) -> None:
    def act(guest: Guest, number: int) -> None:
        guest.stop_reading_commands()
        report = partial(guest.end, number, -signal.SIGKILL, struck=False, sent=False)
        asyncio.get_running_loop().call_later(0.1, report)

    with pytest.raises(SandboxError) as caught:
        await call(box_of(act))
    assert caught.value.cause is Cause.INFRASTRUCTURE, caught.value


async def test_python_that_was_killed_while_it_started_is_started_again(box_of: Boxes) -> None:
    def act(guest: Guest, number: int) -> None:
        guest.end(number, -signal.SIGKILL) if number == 1 else guest.greet()

    assert (await box_of(act).python()).cell_runner == "console"


@pytest.mark.parametrize(
    ("status", "was_started", "kind"),
    [
        pytest.param(1, False, FailureKind.IMAGE_BROKEN, id="ends by itself"),
        pytest.param(-signal.SIGKILL, False, FailureKind.SANDBOX_LOST, id="is killed"),
        pytest.param(-signal.SIGKILL, True, FailureKind.SANDBOX_BROKEN_BY_AGENT, id="is killed later"),
        pytest.param(None, False, FailureKind.SANDBOX_UNAVAILABLE, id="is slow"),
        pytest.param(None, True, FailureKind.SANDBOX_UNAVAILABLE, id="is slow later"),
    ],
)
async def test_python_that_does_not_start_each_time_it_is_tried(
    box_of: Boxes, status: int | None, was_started: bool, kind: FailureKind
) -> None:
    def act(guest: Guest, number: int) -> None:
        if was_started and number == 1:
            guest.greet()
            guest.end(number, 0)
        elif status is not None:
            guest.end(number, status)

    box = box_of(act, GuestTimeouts(python_start=0.3))
    if was_started:
        await box.python()
    with fails_as(kind):
        await box.python()


@pytest.mark.parametrize(("breach", "kind"), [(None, "sandbox_unavailable"), ("processes", "sandbox_broken_by_agent")])
async def test_a_tree_that_does_not_die_is_the_agents_doing_only_at_its_limit_of_processes(
    box_of: Boxes, breach: str | None, kind: str
) -> None:
    def act(guest: Guest, number: int) -> None:
        guest.greet()
        guest.kills = False
        if breach is not None:
            guest.tell(type="breach", pid=number, breach=breach)

    box = box_of(act, GuestTimeouts(kill=0.05, python_interrupt=0.05))

    with pytest.raises(SandboxError) as caught:
        await PythonTool(source_of(box), 0.05)({"code": "while True: pass"})
    assert caught.value.kind == kind, caught.value


@pytest.mark.parametrize(("errno", "kind"), [(ENOMEM, "sandbox_lost"), (EAGAIN, "sandbox_broken_by_agent")])
async def test_a_guest_that_cannot_fork_is_short_of_the_hosts_memory_or_at_the_payloads_limit(
    box_of: Boxes, errno: int, kind: str
) -> None:
    with fails_as(FailureKind(kind)):
        await tool_of(BashTool)(box_of(idle, refusals={"shell": {"errno": errno, "text": os.strerror(errno)}}))


@pytest.mark.parametrize("op", ["spawn", "shell"])
@pytest.mark.parametrize(("errno", "kind"), [(EINVAL, "sandbox_broken_by_agent"), (ENOMEM, "sandbox_unavailable")])
async def test_a_child_that_cannot_become_what_it_should_is_the_agents_doing_in_a_living_sandbox(
    box_of: Boxes, op: str, errno: int, kind: str
) -> None:
    """Whatever changed it between fork and exec; the kernel's want of memory is the host's."""
    box = box_of(idle, refusals={op: {"errno": errno, "stage": "confine"}})
    with fails_as(FailureKind(kind)):
        await tool_of(BashTool if op == "shell" else PythonTool)(box)


@pytest.mark.parametrize(("kills", "breach"), [(1, "memory_sandbox"), (0, None)])
async def test_a_kill_at_the_limit_of_the_cgroup_is_one_for_memory(
    box_of: Boxes, kills: int, breach: str | None
) -> None:
    def act(guest: Guest, number: int) -> None:
        guest.tell(type="exit", pid=number, status=-signal.SIGKILL, struck=False, sent=False)

    async def count() -> int:
        return kills

    box = box_of(act, count_oom_kills=count)
    result = await box.exec(["true"], timeout=5)
    assert (result.breach, result.kill_evidence is None) == (breach, breach is not None)


async def test_a_bash_that_is_gone_from_a_lost_sandbox_is_not_missed(box_of: Boxes) -> None:
    box = box_of(idle, refusals={"shell": {"errno": ENOENT, "stage": "exec"}}, dies_refusing=True)
    with pytest.raises(SandboxError) as caught:
        await box.shell()
    assert caught.value.cause is Cause.INFRASTRUCTURE, caught.value


@pytest.mark.parametrize(
    ("call", "op", "words"), [(_shell, "shell", "has no bash"), (_python, "spawn", "has no python3")]
)
async def test_a_program_that_an_image_lacks_is_its_fault(box_of: Boxes, call: Call, op: str, words: str) -> None:
    with fails_as(FailureKind.IMAGE_BROKEN, match=words):
        await call(box_of(idle, refusals={op: {"errno": ENOENT, "stage": "exec"}}))


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
    chance = Random(10)
    blamed: list[SandboxError] = []

    async def rollout(box: RunningSandbox) -> None:
        bash, python = BashTool(source_of(box), 10.0), PythonTool(source_of(box), 10.0)
        async with closing(box):
            with pytest.raises(SandboxError) as caught:
                while True:
                    await python({"code": "import os; os.kill(os.getpid(), 9)"})  # so that it starts again and again
                    await bash({"command": "true"})
        blamed.append(caught.value)

    async with closing(NamespaceBackend(backend_name, SandboxConfig(scratch=own_scratch))) as backend:
        for _ in range(5):
            boxes = await asyncio.gather(*(backend.start_sandbox(SandboxSpec()) for _ in range(4)))
            rollouts = [asyncio.ensure_future(rollout(box)) for box in boxes]
            await asyncio.sleep(chance.uniform(0.0, 0.8))  # at whatever point this falls
            os.kill(await backend.spawner_pid(), signal.SIGKILL)
            await asyncio.gather(*rollouts)
    assert len(blamed) == 20
    assert {error.cause for error in blamed} == {Cause.INFRASTRUCTURE}, blamed
