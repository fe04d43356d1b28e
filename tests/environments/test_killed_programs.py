"""Programs that SIGKILL ends within their limits: the host may have sent it, so another run decides.

The kill comes from outside the sandbox, as the host's OOM killer sends it, in the moment that a program says that it
runs; a program that kills itself does so again.
"""

import asyncio
import contextlib
import os
import signal
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments.code.code_row import CodeRow
from prorl_gym.environments.code.environment import CodeEnvironment
from prorl_gym.environments.code.program_runs import CompileError, compile_cpp
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe import grading
from prorl_gym.environments.swe.environment import activate_interpreter
from prorl_gym.environments.taskdir.environment import TaskDirEnvironment, sandbox_spec
from prorl_gym.environments.taskdir.task_dir_row import TaskDirRow
from prorl_gym.errors import Cause, FailureKind, RolloutError, SandboxError
from prorl_gym.records import Score
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.protocol import ExecResult, Sandbox, SandboxBackend, SandboxSpec, ShellResult
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.settings import resolve_settings
from prorl_gym.testing.sandbox.fake_sandbox import FakeBackend, SandboxScript
from tests.environments.swe.mini import WRONG, judged, task

ENVIRONMENT = TaskDirEnvironment()

SLEEP = "import sys, time\nn = input()\ntime.sleep(float(n))\nprint(n)\n"
KILLED = ExecResult(137, b"", b"")


def processes_below(pid: int) -> list[tuple[int, str]]:
    """Return pid and command line of the processes below one."""
    children: dict[int, list[int]] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            commands[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
    found, level = list[int](), [pid]
    while level:
        level = [child for parent in level for child in children.get(parent, ())]
        found += level
    return [(one, commands[one]) for one in found]


async def kill_from_outside(backend: NamespaceBackend, marker: str) -> None:
    """Send SIGKILL to the first process below the spawner that was started with ``marker`` as its last argument."""
    spawner = await backend.spawner_pid()
    while True:
        for pid, command in processes_below(spawner):
            if command.rstrip("\0").endswith(marker):
                return os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)  # a process of a sandbox: there is no event to wait for


class Kills:
    """Leases of real sandboxes in which the first programs that match are killed before they begin.

    Args:
        leases: the real ones.
        marker: what an argument of theirs contains.
        times: how many.
    """

    def __init__(self, leases: Leases, marker: str, times: int) -> None:
        self._leases = leases
        self._marker = marker
        self._left = times
        self.seen = 0
        """Programs that matched."""

    async def get_agent_sandbox(self, spec: SandboxSpec) -> Any:
        return _Watched(await self._leases.get_agent_sandbox(spec), self)

    async def start_clean_sandbox(self, spec: SandboxSpec) -> Any:
        return _Watched(await self._leases.start_clean_sandbox(spec), self)

    async def enter_context(self, resource: Any) -> Any:
        return await self._leases.enter_context(resource)

    def get_judge(self) -> None:
        return None

    def strikes(self, argv: Sequence[str]) -> bool:
        matched = any(self._marker in argument for argument in argv)
        self.seen += matched
        self._left -= matched
        return matched and self._left >= 0


class _Watched:
    def __init__(self, sandbox: Sandbox, kills: Kills) -> None:
        self._sandbox = sandbox
        self._kills = kills

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        return KILLED if self._kills.strikes(argv) else await self._sandbox.exec(argv, **options)


@pytest.fixture
async def namespaces(backend: SandboxBackend) -> AsyncIterator[NamespaceBackend]:
    if not isinstance(backend, NamespaceBackend):
        pytest.skip("the programs of plain processes cannot be found from outside")
    yield backend


async def mark(program: str, leases: Leases, **row: Any) -> Score:
    environment, given = CodeEnvironment(), ("0.5", "0.6", "0.7")
    tests = {"kind": "stdio", "cases": [{"stdin": each, "stdout": each} for each in given]}
    task: CodeRow = environment.parse_row({"question": "?", "tests": tests, **row})
    return await environment.evaluate(task, Artifacts(answer=program), leases, resolve_settings(environment.settings))


async def test_a_program_killed_from_outside_is_not_a_wrong_program(
    leases: Leases, namespaces: NamespaceBackend
) -> None:
    killing = asyncio.create_task(kill_from_outside(namespaces, "solution.py"))
    score = await mark(SLEEP, leases)
    await killing
    assert score.reward == 1.0, score


async def test_a_program_that_kills_itself_at_each_test_costs_two_more_sandboxes_at_most(leases: Leases) -> None:
    started = 0
    clean = leases.start_clean_sandbox

    async def counted(spec: Any) -> Sandbox:
        nonlocal started
        started += 1
        return await clean(spec)

    leases.start_clean_sandbox = counted  # type: ignore[method-assign]
    score = await mark("import os\nif input() != '0.5': os.kill(os.getpid(), 9)\nprint('0.5')", leases, partial=True)
    assert (score.reward, started) == (pytest.approx(1 / 3), 3)


@pytest.mark.parametrize(
    "end",
    [
        "os._exit(137)",
        "resource.setrlimit(resource.RLIMIT_CPU, (1, 1)); [None for _ in iter(int, 1)]",
        "os.execlp('bash', 'bash', '-c', 'exit 137')",
    ],
)
async def test_an_end_that_looks_like_one_from_outside_buys_no_second_sample(leases: Leases, end: str) -> None:
    assert (await mark(f"import os, resource\nif input() != '0.5': {end}\nprint('0.5')", leases)).reward == 0.0


@pytest.mark.cpp
@pytest.mark.parametrize(("times", "reward"), [(1, 1.0), (2, 0.0)])
async def test_a_killed_compiler_is_asked_again(leases: Leases, times: int, reward: float) -> None:
    program = "#include <iostream>\n#include <string>\nint main() { std::string s; std::cin >> s; std::cout << s; }\n"
    kills = Kills(leases, "solution.cpp", times)
    assert (await mark(program, kills, language="cpp")).reward == reward
    assert kills.seen >= 2


@pytest.mark.parametrize("gold", [True, False])
async def test_killed_tests_of_a_repair_run_again(leases: Leases, gold: bool) -> None:
    kills, found = Kills(leases, "python3 -m pytest", 1), task()
    repair = found.gold_patch if gold else {"calc.py": WRONG + "\n# Nothing.\n"}
    score = await judged(replace(found, gold_patch=""), repair, kills)  # without gold there are no controls to count
    assert (score.reward, kills.seen) == (float(gold), 2)


async def test_tests_that_are_killed_twice_are_the_repairs_doing(
    leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "_proven_rows", set[str]())
    kills, found = Kills(leases, "python3 -m pytest", 2), task()
    score = await judged(found, found.gold_patch, kills)
    assert (score.reward, score.detail["killed"], kills.seen) == (0.0, True, 3), "the third proves the row"


@pytest.mark.parametrize("marker", ["place", "git"])
async def test_a_killed_program_of_ours_is_infrastructure(leases: Leases, marker: str) -> None:
    found = task()
    with pytest.raises(SandboxError) as caught:
        await judged(found, found.gold_patch, Kills(leases, marker, 1))
    assert caught.value.kind is FailureKind.SANDBOX_LOST


def taskdir(reward: str, **row: Any) -> TaskDirRow:
    command = {"exit": "grep -q 42 /app/answer.txt", "file": "echo 1 > /logs/verifier/reward.txt"}[reward]
    verifier = {
        "files": [{"path": "/tests/note", "data": "eA=="}],
        "command": f"true verifier; {command}",
        "reward": reward,
    }
    setup = [{"kind": "file", "path": "/app/answer.txt", "data": b64encode(b"42").decode()}]
    return ENVIRONMENT.parse_row({"question": "?", "image": "host", "verifier": verifier, "setup": setup, **row})


@pytest.mark.parametrize(("times", "score"), [(1, 1.0), (2, 0.0)])
@pytest.mark.parametrize("reward", ["exit", "file"])
async def test_a_killed_verifier_runs_again(
    leases: Leases, namespaces: NamespaceBackend, reward: str, times: int, score: float
) -> None:
    row, kills = taskdir(reward), Kills(leases, "true verifier", times)
    await ENVIRONMENT.init(row, kills, resolve_settings())
    assert (await ENVIRONMENT.evaluate(row, Artifacts(), kills, resolve_settings())).reward == score


async def test_large_processes_that_an_agent_leaves_cost_it_nothing(
    leases: Leases, namespaces: NamespaceBackend
) -> None:
    """They are killed before the verifier begins; the kernel takes its time to give back their memory."""
    row = taskdir("exit")
    await ENVIRONMENT.init(row, leases, resolve_settings())
    shell = await (await leases.get_agent_sandbox(sandbox_spec(row))).shell()
    large = "import time; held = bytearray(b'1') * (1 << 30); print('held', flush=True); time.sleep(1000)"
    started = f'mkfifo /tmp/p; (setsid python3 -c "{large}" > /tmp/p &); head -n 1 /tmp/p'
    assert "held" in (await shell.run_command(started, timeout=60)).output
    score = await ENVIRONMENT.evaluate(row, Artifacts(), leases, resolve_settings())
    assert score.reward == 1.0, score


async def test_a_killed_setup_is_not_a_bad_row(leases: Leases, namespaces: NamespaceBackend) -> None:
    row = taskdir("exit", setup=[{"kind": "run", "command": "true setup"}])
    with pytest.raises(SandboxError) as caught:
        await ENVIRONMENT.init(row, Kills(leases, "true setup", 1), resolve_settings())
    assert caught.value.kind is FailureKind.SANDBOX_LOST


async def test_a_slow_setup_is_not_a_bad_row() -> None:
    row = taskdir("exit", setup=[{"kind": "run", "command": "make"}])
    late = ExecResult(137, b"", b"", timed_out=True)
    leases = SandboxLeases(FakeBackend(SandboxScript(on_exec=lambda argv, stdin: late)))
    with pytest.raises(SandboxError) as caught:
        await ENVIRONMENT.init(row, leases, resolve_settings())
    assert caught.value.cause is Cause.INFRASTRUCTURE
    await leases.close()


@pytest.mark.parametrize("result", [{"timed_out": True}, {"restarted": True}])
async def test_an_agent_never_begins_without_the_interpreter_of_its_project(result: dict[str, bool]) -> None:
    ended = ShellResult("", 137, "/testbed", **result)
    leases = SandboxLeases(FakeBackend(SandboxScript(on_shell_input=lambda command: ended)))
    with pytest.raises(SandboxError) as caught:
        await activate_interpreter(replace(task(), source="swebench"), await leases.get_agent_sandbox(SandboxSpec()))
    assert caught.value.cause is Cause.INFRASTRUCTURE
    await leases.close()


@pytest.mark.parametrize(
    ("simplest", "kind"),
    [
        (ExecResult(137, b"", b"", timed_out=True, seconds=60.0), FailureKind.SANDBOX_UNAVAILABLE),
        (ExecResult(0, b"", b"", seconds=40.0), FailureKind.SANDBOX_UNAVAILABLE),
        (KILLED, FailureKind.SANDBOX_LOST),
        (ExecResult(1, b"", b"no such file: cc1plus"), FailureKind.IMAGE_BROKEN),
        (ExecResult(127, b"", b"g++: not found"), FailureKind.IMAGE_BROKEN),
        (ExecResult(0, b"", b"", seconds=1.0), None),
    ],
)
async def test_a_slow_or_killed_compiler_is_neither_the_images_nor_the_programs_fault(
    simplest: ExecResult, kind: FailureKind | None
) -> None:
    results = [ExecResult(137, b"", b"", timed_out=True, seconds=60.0), simplest]
    backend = FakeBackend(SandboxScript(on_exec=lambda argv, stdin: results.pop(0)))
    leases = SandboxLeases(backend)
    with pytest.raises((RolloutError, CompileError)) as caught:
        await compile_cpp("int main() {}", leases)
    assert getattr(caught.value, "kind", None) is kind
    await leases.close()
