"""SIGKILL: one that a payload sent is its own doing, one from outside is not."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from sandbox_support import children_of, kernel_has_user_namespaces

from prorl_gym.agents.tools import BashTool, PythonTool
from prorl_gym.errors import Cause, Evidence, SandboxError
from prorl_gym.sandbox.backend import NamespaceBackend
from prorl_gym.sandbox.box import Box
from prorl_gym.sandbox.breach import Breach
from prorl_gym.sandbox.launch import BackendName
from prorl_gym.sandbox.processes import start_time
from prorl_gym.sandbox.protocol import Sandbox, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.scratch import read_state

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

FROM_OUTSIDE = {Evidence.SANDBOX_LOST_UNEXPLAINED, Evidence.SANDBOX_KILLED_OUTSIDE}
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


def kill_from_outside(backend: NamespaceBackend, box: Box, name: str) -> None:
    """Kill the process of this name that began last in a sandbox."""
    state = read_state(backend.scratch / box.id, "")
    assert state is not None and state.init is not None
    found = [pid for pid in children_of(state.init.pid) if _name_of(pid) == name]
    os.kill(max(found, key=lambda pid: start_time(pid) or 0), signal.SIGKILL)


def _name_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):  # it ended since it was listed
        return None


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
async def test_a_session_that_kills_itself_is_told_so(box: Box, way: str) -> None:
    async def source() -> Sandbox:
        return box

    said = (await PythonTool(source, 20.0)({"code": f"import os, signal; {SELF_KILLS[way]}"})).text
    assert "exit code 137" in said
    assert (await PythonTool(source, 20.0)({"code": "6 * 7"})).text == "42"


async def test_a_shell_that_kills_itself_is_told_so(box: Box) -> None:
    async def source() -> Sandbox:
        return box

    tool = BashTool(source, 10.0)
    assert "exit code 137" in (await tool({"command": "sleep 40 & kill -9 %1; kill -9 $$"})).text
    assert "fine" in (await tool({"command": "echo fine"})).text


@pytest.mark.parametrize("make", [BashTool, PythonTool])
@pytest.mark.parametrize("busy", [True, False])
async def test_a_session_that_is_killed_from_outside_is_a_lost_sandbox(
    backend: NamespaceBackend, make: type[BashTool] | type[PythonTool], busy: bool
) -> None:
    box = await backend.start(SandboxSpec())

    async def source() -> Sandbox:
        return box

    async def act(what: str) -> None:
        await make(source, 20.0)({"command": what, "code": what})

    try:
        await act("1" if make is PythonTool else "sleep 33 & kill -9 $!")
        wait = "import time; open('/tmp/busy', 'w'); time.sleep(30)"
        wait = wait if make is PythonTool else "echo > /tmp/busy; read -t 30 x"
        running = asyncio.ensure_future(act(wait)) if busy else None
        if running is not None:
            await box.exec(["/bin/bash", "-c", "until [ -e /tmp/busy ]; do sleep 0.02; done"], timeout=20)
        kill_from_outside(backend, box, "python3" if make is PythonTool else "bash")
        with pytest.raises(SandboxError) as caught:
            await (running or act("1" if make is PythonTool else "true"))
        assert (caught.value.cause, caught.value.evidence in FROM_OUTSIDE) == (Cause.INFRASTRUCTURE, True)
    finally:
        await box.close()


async def test_a_program_that_is_killed_from_outside_is_known_for_it(backend: NamespaceBackend, box: Box) -> None:
    running = asyncio.ensure_future(box.exec(["/bin/bash", "-c", "exec sleep 30"], timeout=40))
    seen = "until grep -lsax 'sleep' /proc/[0-9]*/comm; do :; done"
    await box.exec(["/bin/bash", "-c", seen], timeout=20)
    kill_from_outside(backend, box, "sleep")
    result = await running
    assert result.exit_code == 137 and result.sigkill in FROM_OUTSIDE


@pytest.mark.parametrize("script", ["kill -9 $$", "sleep 9 & kill -9 $!; wait $!", "bash -c 'kill -9 $PPID'; true"])
async def test_a_program_that_sends_sigkill_is_known_for_it(box: Box, script: str) -> None:
    result = await box.exec(["/bin/bash", "-c", script], timeout=10)
    assert (result.exit_code, result.sigkill) == (137, None)


async def test_a_program_that_ignores_its_limit_of_cpu_is_killed_for_that(backend: NamespaceBackend) -> None:
    box = await backend.start(SandboxSpec(limits=SandboxLimits(cpu_seconds=1)))
    try:
        script = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
        result = await box.exec(["/usr/bin/python3", "-c", script], timeout=20)
        assert (result.exit_code, result.breach, result.sigkill) == (137, Breach.CPU, None)
    finally:
        await box.close()
