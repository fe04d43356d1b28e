"""Running a program on one test in the grading sandbox. Says how it went; never whether the sandbox is to blame."""

import json
import math
import secrets
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from prorl_gym.environments.code.compare import read_result, same_output, same_result
from prorl_gym.environments.code.rows import CodeRow, FunctionCase, FunctionTests, StdioCase
from prorl_gym.sandbox.protocol import ExecResult, Sandbox, SandboxLimits

_CALL_FUNCTION = files("prorl_gym.environments.code").joinpath("call_function.py").read_text(encoding="utf-8")

WALL_FACTOR = 4.0
WALL_EXTRA = 2.0
"""Wall clock of a test: the CPU limit times the factor, plus this many seconds, so that a busy machine does not turn
right programs into wrong ones. CPU time is what a program is measured by."""

_XCPU, _KILLED = 128 + 24, 128 + 9


@dataclass(frozen=True, slots=True)
class TestRun:
    """How a program did on one test."""

    failure: str | None
    """``None`` when it passed; otherwise what went wrong, without anything of the test."""
    seconds: float

    __test__ = False


class ProgramRunner:
    """Runs one program on tests, each time in a process of its own.

    Args:
        sandbox: a clean sandbox.
        task: for limits and the entry point.
    """

    def __init__(self, sandbox: Sandbox, task: CodeRow) -> None:
        self._sandbox = sandbox
        self._task = task
        self._program = f"{sandbox.spec.workdir}/solution.py"
        self._cpu_seconds = math.ceil(task.time_limit)

    async def write(self, program: str) -> None:
        """Put the program where the tests run it."""
        await self._sandbox.write_file(self._program, program.encode(errors="replace"), mode=0o444)

    async def run(self, index: int, seconds: float) -> TestRun:
        """Run one test.

        Args:
            index: of the test, from 0.
            seconds: wall clock that is left for all tests.

        Raises:
            SandboxError: the sandbox is lost, or cannot start a process.
        """
        tests = self._task.tests
        wall_seconds = min(self._task.time_limit * WALL_FACTOR + WALL_EXTRA, seconds)
        if isinstance(tests, FunctionTests):
            return await self._function(tests.entry, tests.cases[index], wall_seconds)
        return await self._stdio(tests.cases[index], wall_seconds)

    async def _stdio(self, case: StdioCase, wall_seconds: float) -> TestRun:
        room = 2 * len(case.stdout.encode())
        result = await self._exec(["python3", "-I", self._program], case.stdin.encode(), room, wall_seconds)
        failure = _crash(result, self._cpu_seconds)
        if failure is None and not same_output(case.stdout, result.stdout):
            failure = "wrong output"
        return TestRun(failure, result.seconds)

    async def _function(self, entry: str, case: FunctionCase, wall_seconds: float) -> TestRun:
        nonce = secrets.token_hex(16)
        request = {"program": self._program, "entry": entry, "args": case.args, "nonce": nonce}
        room = 4 * len(json.dumps(case.expected))
        result = await self._exec(
            ["python3", "-I", "-c", _CALL_FUNCTION], json.dumps(request).encode(), room, wall_seconds
        )
        failure = _crash(result, self._cpu_seconds) or _judge(case.expected, result.stdout, nonce.encode())
        return TestRun(failure, result.seconds)

    async def _exec(self, argv: list[str], stdin: bytes, room: int, wall_seconds: float) -> ExecResult:
        limits: SandboxLimits = replace(
            self._sandbox.spec.limits,
            memory=self._task.memory_limit,
            cpu_seconds=self._cpu_seconds,
            output=(64 << 10) + room,
        )
        return await self._sandbox.exec(argv, stdin=stdin, timeout=wall_seconds, limits=limits)


def _crash(result: ExecResult, cpu_seconds: int) -> str | None:
    """How a program failed whatever it printed, or ``None``."""
    # The kernel kills at the CPU limit with the signal that it also uses for everything else; the clock tells.
    spent = result.exit_code in (_XCPU, _KILLED) and result.seconds >= 0.9 * cpu_seconds
    if result.timed_out or spent:
        return "time limit"
    if result.truncated:
        return "too much output"
    if result.exit_code == 0:
        return None
    if b"MemoryError" in result.stderr[-2000:]:
        return "memory limit"
    return "killed" if result.exit_code == _KILLED else "runtime error"


def _judge(expected: Any, stdout: bytes, nonce: bytes) -> str | None:
    """Compare the result behind the nonce; more than one is as good as none."""
    results = [line[len(nonce) + 1 :] for line in stdout.split(b"\n") if line.startswith(nonce + b" ")]
    if len(results) != 1:
        return "no result"
    try:
        result = read_result(results[0])
    except ValueError:
        return "unreadable result"
    return None if same_result(expected, result) else "wrong result"
