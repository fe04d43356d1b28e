"""Grading a program on hidden tests, in sandboxes that the agent has never touched.

Expected results stay here: there is nothing in the sandbox to read, patch or forge. Whatever the program does to
itself is a failed test; a sandbox that cannot run Python at all, or is lost, raises and gives no reward.
"""

from collections import Counter
from contextlib import aclosing

from prorl_gym.environments.code.batch import Launch
from prorl_gym.environments.code.checker import Checker
from prorl_gym.environments.code.compiler import CompileError, compile_cpp
from prorl_gym.environments.code.launches import binary_launch, inputs, python_launch
from prorl_gym.environments.code.rows import CodeRow, FunctionTests
from prorl_gym.environments.code.runs import TestRunner
from prorl_gym.environments.code.verdicts import judge
from prorl_gym.environments.protocol import Leases
from prorl_gym.records import Score

SHARES = (0.5, 0.35, 0.15)
"""Of the time of a row with a checker: the program's, the checker's on its outputs, the checker's on expected outputs.
They are apart, so that a program cannot use up the others, and none is on top, so that it cannot miss the deadline."""


async def grade(task: CodeRow, program: str, leases: Leases, seconds: float) -> Score:
    """Return 1.0 when the program passes every test, otherwise 0.0 with the kind of the first failure.

    With ``partial`` the share of the tests that pass.

    Args:
        task: the row with its tests.
        program: source.
        leases: gives the clean sandboxes.
        seconds: wall clock that all tests together may take, checks of the outputs included (``SHARES``); a program
            that needs longer fails, so that a slow one cannot pass for a broken grader.

    Raises:
        SandboxError: a sandbox could not be started or was lost.
        GraderError: it does not run Python, or the row's checker is broken.
        TaskError: C++ is asked for and the image cannot compile it.
    """
    cases = task.tests.cases
    try:
        launch = await _launch(task, program, leases)
    except CompileError as complaint:
        return failed(str(complaint), 0, len(cases))
    own, checks, controls = (seconds * share for share in (SHARES if task.checker else (1.0, 0.0, 0.0)))
    runner, checker = TestRunner(leases, own), Checker(task, TestRunner(leases, checks), TestRunner(leases, controls))
    verdicts: list[str | None] = []
    runs = runner.run(launch, inputs(task.tests), stop_at_crash=not task.partial)
    async with aclosing(runs):
        async for ends in runs:
            position = len(verdicts)
            verdicts += await judge(task, cases[position : position + len(ends)], ends, checker)
            if not task.partial and any(verdicts):
                break
    return _score(task, verdicts)


async def _launch(task: CodeRow, program: str, leases: Leases) -> Launch:
    if task.language == "cpp":
        return binary_launch(task, await compile_cpp(program, leases))
    return python_launch(task, program, function=isinstance(task.tests, FunctionTests))


def _score(task: CodeRow, verdicts: list[str | None]) -> Score:
    total = len(task.tests.cases)
    why = next((verdict for verdict in verdicts if verdict), None)
    if why is None:
        return Score(reward=1.0, detail={"passed": total, "tests": total})
    if not task.partial:
        return failed(why, verdicts.index(why), total)
    passed = Counter(verdicts)[None]
    share = passed / total
    return Score(reward=share, detail={"why": why, "passed": passed, "tests": total})


def failed(why: str, passed: int, total: int) -> Score:
    """Return the score of a program that fails; ``passed`` counts the tests before the first failure."""
    return Score(reward=0.0, detail={"why": why, "passed": passed, "tests": total})
