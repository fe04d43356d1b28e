"""SIGKILL and SIGTERM: one that a payload sent is its own doing, one from outside is not."""

import asyncio
import os
import signal

import pytest
from sandbox_support import children_of, closing, source_of, status_of

from prorl_gym.agents.tools import BashTool, PythonTool
from prorl_gym.errors import Cause, Evidence, SandboxError
from prorl_gym.process_identity import read_start_ticks
from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

FROM_OUTSIDE = {Evidence.PROGRAM_KILLED_OUTSIDE, Evidence.SANDBOX_KILLED_OUTSIDE}


async def kill_from_outside(backend: NamespaceBackend, name: str, number: int = signal.SIGKILL) -> None:
    """Signal the session leader of this name that began last in a sandbox's pid namespace: what the guest started."""
    found: list[int] = []
    for pid in children_of(await backend.spawner_pid()):
        status = status_of(pid)
        is_inside = len(status.get("NSpid", "").split()) > 1
        if is_inside and status["Name"] == name and status["NSpid"] == status["NSsid"]:
            found.append(pid)
    os.kill(max(found, key=lambda pid: read_start_ticks(pid) or 0), number)


SELF_KILLS = {
    "kill": "os.kill(os.getpid(), 9)",
    "its group": "os.kill(0, 9)",
    "its group by number": "os.killpg(os.getpgid(0), 9)",
    "everything": "os.system('kill -9 -1')",
    "a child": "os.system('kill -9 $PPID')",
    "pidfd": "signal.pidfd_send_signal(os.pidfd_open(os.getpid()), 9)",
    "thread": "signal.pthread_kill(__import__('threading').get_ident(), 9)",
}


@pytest.mark.parametrize("way", SELF_KILLS)
async def test_a_session_that_kills_itself_is_reported_as_such(box: RunningSandbox, way: str) -> None:
    said = (await PythonTool(source_of(box), 20.0)({"code": f"import os, signal; {SELF_KILLS[way]}"})).text
    assert "exit code 137" in said
    assert (await PythonTool(source_of(box), 20.0)({"code": "6 * 7"})).text == "42"


@pytest.mark.default
async def test_a_shell_that_kills_itself_is_reported_as_such(box: RunningSandbox) -> None:
    tool = BashTool(source_of(box), 10.0)
    assert "exit code 137" in (await tool({"command": "sleep 40 & kill -9 %1; kill -9 $$"})).text
    assert "fine" in (await tool({"command": "echo fine"})).text


@pytest.mark.parametrize(
    ("make", "number"),
    [(BashTool, signal.SIGKILL), (PythonTool, signal.SIGKILL), (PythonTool, signal.SIGTERM)],  # shells ignore SIGTERM
)
@pytest.mark.parametrize("busy", [True, False])
async def test_a_session_that_is_killed_from_outside_is_a_lost_sandbox(
    backend: NamespaceBackend,
    fresh: RunningSandbox,
    make: type[BashTool] | type[PythonTool],
    number: signal.Signals,
    busy: bool,
) -> None:
    async def act(what: str) -> None:
        await make(source_of(fresh), 20.0)({"command": what, "code": what})

    await act("1" if make is PythonTool else "sleep 33 & kill -9 $!; wait")
    wait = "import time; open('/tmp/busy', 'w'); time.sleep(30)"
    wait = wait if make is PythonTool else "echo > /tmp/busy; read -t 30 x"
    running = asyncio.ensure_future(act(wait)) if busy else None
    if running is not None:
        await fresh.exec(["/bin/bash", "-c", "until [ -e /tmp/busy ]; do sleep 0.02; done"], timeout=20)
    await kill_from_outside(backend, "python3" if make is PythonTool else "bash", number)
    with pytest.raises(SandboxError) as caught:
        await (running or act("1" if make is PythonTool else "true"))
    assert (caught.value.cause, caught.value.evidence in FROM_OUTSIDE) == (Cause.INFRASTRUCTURE, True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_program_that_is_killed_from_outside_is_known_for_it(
    backend: NamespaceBackend, box: RunningSandbox, number: signal.Signals
) -> None:
    running = asyncio.ensure_future(box.exec(["/bin/bash", "-c", "exec sleep 30"], timeout=40))
    seen = "until grep -lsax 'sleep' /proc/[0-9]*/comm; do :; done"
    await box.exec(["/bin/bash", "-c", seen], timeout=20)
    await kill_from_outside(backend, "sleep", number)
    result = await running
    assert result.exit_code == 128 + number and result.kill_evidence in FROM_OUTSIDE


_LIMIT = "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))"
_SHARED_DEATH = "ctypes.CDLL(None).prctl(1, 9); os.kill(os.getppid(), 15); signal.pause()"


@pytest.mark.parametrize(
    "script",
    [
        *("kill -9 $$", "sleep 9 & kill -9 $!; wait $!", "bash -c 'kill -9 $PPID'; true"),
        *(
            "bash -c 'exit 137'; exit $?",
            "bash -c 'exit 393'; exit $?",
            "python3 -c 'import os; os._exit(137)'; exit $?",
        ),
        "python3 -c 'import threading, ctypes; ctypes.CDLL(None).syscall(231, 137)'; exit $?",
        f"python3 -c 'import resource; {_LIMIT}\nwhile True: pass'; exit $?",
        f"bash -c \"python3 -c 'import ctypes, os, signal; {_SHARED_DEATH}' & wait \"; exit 137",
    ],
)
async def test_a_program_that_makes_an_end_by_sigkill_is_known_for_it(box: RunningSandbox, script: str) -> None:
    result = await box.exec(["/bin/bash", "-c", script], timeout=10)
    assert (result.exit_code, result.kill_evidence) == (137, None)


async def test_a_shell_that_passes_on_an_end_is_not_taken_for_one_that_chose_it(
    backend: NamespaceBackend, box: RunningSandbox
) -> None:
    running = asyncio.ensure_future(box.exec(["/bin/bash", "-c", "setsid --wait sleep 30; exit $?"], timeout=40))
    await box.exec(["/bin/bash", "-c", "until grep -lsax 'sleep' /proc/[0-9]*/comm; do :; done"], timeout=20)
    await kill_from_outside(backend, "sleep")
    result = await running
    assert (result.exit_code, result.kill_evidence in FROM_OUTSIDE) == (137, True)


_EVENT = "ctypes.byref((ctypes.c_int * 16)(0, 0, 9, 0))"


@pytest.mark.parametrize(
    "call",
    [
        f"t = ctypes.c_void_p(); libc.timer_create(0, {_EVENT}, ctypes.byref(t)); "
        "libc.timer_settime(t, 0, ctypes.byref((ctypes.c_long * 4)(0, 0, 0, 1000)), None)",
        "os.kill(os.getpid(), 15)",
        "libc.prctl(1, 15); os.kill(os.getppid(), 9)",
        "child = os.fork() or signal.pause(); libc.ptrace(0x4206, child, 0, 0x100000); os._exit(0)",
    ],
    ids=["timer", "its own SIGTERM", "shared SIGTERM", "end of its tracer"],
)
async def test_a_signal_by_any_other_way_is_the_payloads_too(box: RunningSandbox, call: str) -> None:
    script = f"import ctypes, os, signal; libc = ctypes.CDLL(None); {call}; signal.pause()"
    result = await box.exec(["/bin/bash", "-c", 'python3 -c "$0" & wait $!; exit $?', script], timeout=10)
    assert result.kill_evidence is None


@pytest.mark.parametrize("call", ["fcntl(0, 10, 9)", "syscall(56, 9, 0, 0, 0, 0)", "syscall(56, 15, 0, 0, 0, 0)"])
async def test_no_other_event_sends_such_a_signal(box: RunningSandbox, call: str) -> None:
    script = f"import ctypes; libc = ctypes.CDLL(None, use_errno=True); print(libc.{call}, ctypes.get_errno())"
    assert (await box.exec(["/usr/bin/python3", "-c", script], timeout=10)).stdout == b"-1 22\n"


@pytest.mark.parametrize("call", ["prctl(22, 1, 0, 0, 0)", "syscall(317, 0, 0, 0)"])
async def test_no_program_has_the_kernel_kill_it_at_its_next_call(box: RunningSandbox, call: str) -> None:
    script = f"import ctypes; print(ctypes.CDLL(None).{call})"
    assert (await box.exec(["/usr/bin/python3", "-c", script], timeout=10)).stdout == b"-1\n"


async def test_a_program_that_ignores_its_limit_of_cpu_is_killed_for_that(backend: NamespaceBackend) -> None:
    async with closing(await backend.start_sandbox(SandboxSpec(limits=SandboxLimits(cpu_seconds=1)))) as box:
        script = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
        result = await box.exec(["/usr/bin/python3", "-c", script], timeout=20)
        assert (result.exit_code, result.breach, result.kill_evidence) == (137, Breach.CPU, None)
