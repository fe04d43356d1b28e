"""Grading a program on hidden tests, in a sandbox that the agent has never touched.

The program is written there and run once per test, each time in a process of its own with its own time and memory.
Expected results stay here: there is nothing in the sandbox to read, patch or forge. Whatever the program does to
itself is a failed test; a sandbox that cannot run Python at all, or is lost, raises and gives no reward.
"""

from contextlib import AsyncExitStack

from prorl_gym.environments.code.rows import CodeRow
from prorl_gym.environments.code.runs import ProgramRunner
from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import GraderError, SandboxError
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
    total = len(task.tests.cases)
    async with AsyncExitStack() as sandboxes:
        runner = await _prepare(task, program, leases, sandboxes)
        for index in range(total):
            if seconds <= 0:
                return failed("time limit", index, total)
            try:
                run = await runner.run(index, seconds)
            except SandboxError:
                if index == 0:
                    raise
                # What the program left running after an earlier test may choke this sandbox: that is no reason to
                # call the machine broken. A fresh one tells.
                runner = await _prepare(task, program, leases, sandboxes)
                run = await runner.run(index, seconds)
            if run.failure is not None:
                return failed(run.failure, index, total)
            seconds -= run.seconds
    return Score(reward=1.0, detail={"passed": total, "tests": total})


async def _prepare(task: CodeRow, program: str, leases: Leases, sandboxes: AsyncExitStack) -> ProgramRunner:
    """Start a clean sandbox with the program in it."""
    sandbox = await leases.clean(SANDBOX)
    sandboxes.push_async_callback(sandbox.close)
    await _check_python(sandbox)
    runner = ProgramRunner(sandbox, task)
    await runner.write(program)
    return runner


async def _check_python(sandbox: Sandbox) -> None:
    """A sandbox without Python would fail every program, and nobody would notice that it is not theirs."""
    result = await sandbox.exec(["python3", "-I", "-c", "print('ready')"], timeout=60)
    if result.stdout.strip() != b"ready":
        raise GraderError(
            f"python3 does not run in the grading sandbox: exit code {result.exit_code}.",
            f"Use an image with a working python3 instead of '{sandbox.spec.image}'.",
        )


def failed(why: str, passed: int, total: int) -> Score:
    """Return the score of a program that fails; ``passed`` counts the tests before the first failure."""
    return Score(reward=0.0, detail={"why": why, "passed": passed, "tests": total})
