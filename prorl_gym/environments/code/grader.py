"""Grading a program on hidden tests, in a sandbox that the agent has never touched.

The program is written there and run once per test, each time in a process of its own with its own time and memory.
Expected results stay here: there is nothing in the sandbox to read, patch or forge. Whatever the program does to
itself is a failed test; a sandbox that cannot run Python at all, or is lost, raises and gives no reward.
"""

from prorl_gym.environments.code.rows import CodeRow, FunctionTests
from prorl_gym.environments.code.runs import PROGRAM, ProgramRunner, TestRun
from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import GraderError
from prorl_gym.records import Score
from prorl_gym.sandbox.protocol import Sandbox, SandboxSpec

SANDBOX = SandboxSpec()


async def grade(task: CodeRow, program: str, leases: Leases, seconds: float) -> Score:
    """Return 1.0 when the program passes every test, otherwise 0.0 with the kind of the first failure.

    Args:
        task: the row with its tests.
        program: Python source.
        leases: gives the clean sandbox.
        seconds: wall clock that all tests together may take; a program that needs longer fails, so that a slow one
            cannot pass for a broken grader.

    Raises:
        SandboxError: the sandbox could not be started or was lost.
        GraderError: it does not run Python.
    """
    sandbox = await leases.clean(SANDBOX)
    try:
        await _check_python(sandbox)
        await sandbox.write_file(PROGRAM, program.encode(errors="replace"), mode=0o444)
        return await _run_tests(task, ProgramRunner(sandbox, task), seconds)
    finally:
        await sandbox.close()


async def _check_python(sandbox: Sandbox) -> None:
    """A sandbox without Python would fail every program, and nobody would notice that it is not theirs."""
    result = await sandbox.exec(["python3", "-I", "-c", "print('ready')"], timeout=60)
    if result.stdout.strip() != b"ready":
        raise GraderError(
            f"python3 does not run in the grading sandbox: exit code {result.exit_code}.",
            f"Use an image with a working python3 instead of '{sandbox.spec.image}'.",
        )


async def _run_tests(task: CodeRow, runner: ProgramRunner, seconds: float) -> Score:
    total = len(task.tests.cases)
    left = seconds
    for passed in range(total):
        wall_seconds = min(runner.wall_seconds, left)
        run = await _run_one(task, runner, passed, wall_seconds) if left > 0 else TestRun("time limit", 0.0)
        if run.failure is not None:
            return failed(run.failure, passed, total)
        left -= run.seconds
    return Score(reward=1.0, detail={"passed": total, "tests": total})


async def _run_one(task: CodeRow, runner: ProgramRunner, index: int, wall_seconds: float) -> TestRun:
    tests = task.tests
    if isinstance(tests, FunctionTests):
        return await runner.function(tests.entry, tests.cases[index], wall_seconds)
    return await runner.stdio(tests.cases[index], wall_seconds)


def failed(why: str, passed: int, total: int) -> Score:
    """Return the score of a program that fails; ``passed`` counts the tests before the first failure."""
    return Score(reward=0.0, detail={"why": why, "passed": passed, "tests": total})
