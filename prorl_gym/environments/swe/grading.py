"""Grading a repair: the patch and the hidden tests in a sandbox that the agent has never touched.

A patch that does not apply, does not build, hangs or breaks is worth 0.0 and says why. A sandbox that is lost, a
harness that is not installed or a row whose own tests cannot be put in place raises: no reward comes of that.
"""

import os
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from prorl_gym.environments.killed import killed_unseen
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe import official
from prorl_gym.environments.swe.controls.built import Built
from prorl_gym.environments.swe.controls.judge import Cost, Repair, check, with_controls
from prorl_gym.environments.swe.controls.proof import Proofs
from prorl_gym.environments.swe.parsers import PASSING
from prorl_gym.environments.swe.patches import changed_paths
from prorl_gym.environments.swe.placing import place_tests
from prorl_gym.environments.swe.ready import Unsolved, repaired
from prorl_gym.environments.swe.run_tests import TestResults, run_tests
from prorl_gym.environments.swe.task import SweTask
from prorl_gym.environments.swe.verdict import (
    KILLED,
    Names,
    broke_others,
    judge,
    name_flaky,
    name_some,
    unsolved,
)
from prorl_gym.errors import Evidence, FailureKind, TaskError
from prorl_gym.records import Score
from prorl_gym.sandbox.protocol import Sandbox
from prorl_gym.settings import ResolvedSettings

EVAL_SHARE = 0.8
"""Share of the stage's deadline that build and tests may use; the rest is for what is around them."""

_CONDA = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi\n"
"""Images of SWE-Gym have the interpreter of the tests in an environment of this name."""


@dataclass(frozen=True, slots=True)
class Graded:
    """A score and what it cost, in seconds of wall clock."""

    score: Score
    tests_seconds: float
    """Build and tests. The rest is ours: sandbox, repository, patch, report, and the checks."""
    checks_seconds: float
    """Runs B and C, and sealed values; the first time for a row, also the proof of its controls."""
    seconds: float


_proofs = Proofs()


async def grade(task: SweTask, patch: bytes, leases: Leases, settings: ResolvedSettings) -> Score:
    """Return 1.0 when the patch makes every test pass that has to, otherwise 0.0 with the reason.

    Raises:
        SandboxError: the sandbox could not be started or was lost.
        GraderError: the row needs the harness of SWE-bench, and it is not installed or broken.
        TaskError: the hidden tests cannot be put in place even without the patch.
    """
    return (await grade_timed(task, patch, leases, settings)).score


async def grade_timed(task: SweTask, patch: bytes, leases: Leases, settings: ResolvedSettings) -> Graded:
    """Do as ``grade``, and say how much of the time was the build and the tests themselves.

    Raises:
        SandboxError, GraderError, TaskError: see ``grade``.
    """
    started = time.monotonic()
    if not patch.strip():
        return Graded(unsolved("empty patch"), 0.0, 0.0, 0.0)
    seconds = min(task.tests.seconds, settings.eval_seconds * EVAL_SHARE)
    grading = _grade_officially if task.tests.parser == "swebench" else _grade_ourselves
    try:
        score, in_tests, in_checks = await grading(task, patch, leases, seconds)
        if KILLED in score.detail:  # by the host, or by the code under test? Another run decides, in fresh sandboxes
            score, in_tests, in_checks = await grading(task, patch, leases, seconds)
            if (sigkill := score.detail.get(KILLED)) in set(Evidence):
                raise killed_unseen("the run of the tests", Evidence(sigkill))
    except Unsolved as why:
        score, in_tests, in_checks = unsolved(str(why)), 0.0, 0.0
    return Graded(score, in_tests, in_checks, time.monotonic() - started)


async def _grade_ourselves(task: SweTask, patch: bytes, leases: Leases, seconds: float) -> tuple[Score, float, float]:
    task = _with_conda(task)
    own = changed_paths(os.fsdecode(patch)) - changed_paths(task.gold_patch)
    started = time.monotonic()
    async with repaired(task, patch, leases) as ready:
        tests = _Tests(task, ready.sandbox)
        prepared = time.monotonic() - started
        results = await tests.run(seconds, own)
        if tests.misplaced:
            await _check_row(task, leases)
        score, used = judge(task, results), results.seconds
        if broke_others(task, results) and used < seconds / 2:  # is it the repair, or the test?
            again = await tests.run(seconds - used, own)
            score, used = name_flaky(score, task, results, again), used + again.seconds
    started = time.monotonic()
    if score.reward == 1.0:
        score = await _check(Repair(task, patch, tests.built), score, leases, Cost(prepared, used))
    return _with_way(score, ready.way), used, time.monotonic() - started


async def _check(repair: Repair, score: Score, leases: Leases, cost: Cost) -> Score:
    """Let controls decide about a repair whose tests pass."""
    plan = await _proofs.get(repair.task, leases)
    if plan is None:
        return score.model_copy(update={"detail": {**score.detail, "controls": "none"}})
    return with_controls(score, await check(repair, plan, leases, cost))


async def _grade_officially(task: SweTask, patch: bytes, leases: Leases, seconds: float) -> tuple[Score, float, float]:
    script = await official.eval_script(task)  # first of all: without the harness no sandbox is needed
    bare = replace(task, tests=replace(task.tests, patch=""))  # the script applies the test patch itself
    async with repaired(bare, patch, leases, hidden=task) as ready:
        log = await official.run_script(ready.sandbox, task, script, seconds)
    return _with_way(await official.report(task, log), ready.way), log.seconds, 0.0


async def run_hidden_tests(task: SweTask, patch: bytes, leases: Leases, seconds: float) -> TestResults:
    """Return the status of each test after a patch (an empty one: of the repository as it is), without a verdict.

    For tools that make rows and have to know which tests pass. Not for rows of SWE-bench.

    Raises:
        SandboxError, TaskError: see ``grade``.
    """
    task = _with_conda(task)
    try:
        async with repaired(task, patch, leases) as ready:
            tests = _Tests(task, ready.sandbox)
            results = await tests.run(seconds)
    except Unsolved as why:
        return TestResults({}, str(why))
    if tests.misplaced:
        await _check_row(task, leases)
    return results


async def passing_unrepaired(task: SweTask, leases: Leases, settings: ResolvedSettings) -> str:
    """Name the tests of ``fail_to_pass`` that pass in the repository as it is; empty when each one fails, as it must.

    Rows of R2E-Gym name all tests and not which of them fail, so they cannot be checked.

    Raises:
        SandboxError, GraderError, TaskError: see ``grade``.
    """
    seconds = min(task.tests.seconds, settings.eval_seconds * EVAL_SHARE)
    if task.source == "r2egym":
        return ""
    if task.tests.parser == "swebench":
        score, _, _ = await _grade_officially(task, b"", leases, seconds)
        count = str(score.detail.get("fail_to_pass", "0/0"))
        return "" if count.startswith("0/") else count
    results = await run_hidden_tests(task, b"", leases, seconds)
    found = Names(results.statuses).all(task.tests.fail_to_pass)
    passing = [name for name, status in found if status in PASSING]
    return "" if results.complaint else name_some(passing)


class _Tests:
    """Build and hidden tests of a repaired repository."""

    def __init__(self, task: SweTask, sandbox: Sandbox) -> None:
        self._task = task
        self._sandbox = sandbox
        self._changes = Built(sandbox, task.workdir)
        self.built = b""
        """What the build made, packed."""
        self.misplaced = False
        """The hidden tests could not be put in place."""

    async def run(self, seconds: float, own: Collection[str] = ()) -> TestResults:
        if self._task.tests.build:
            await self._changes.begin()
        return await run_tests(self._sandbox, self._task.workdir, self._task.tests, seconds, own, self._put_tests)

    async def _put_tests(self) -> str:
        if self._task.tests.build and not self.built:
            self.built = await self._changes.pack()
        complaint = await place_tests(self._sandbox, self._task)
        self.misplaced = bool(complaint)
        return complaint


def _with_conda(task: SweTask) -> SweTask:
    if task.source != "swegym":
        return task
    return replace(task, tests=replace(task.tests, command=_CONDA + task.tests.command))


async def _check_row(task: SweTask, leases: Leases) -> None:
    """Tell a patch that is in the way of the hidden tests from a row whose tests fit nowhere.

    Raises:
        TaskError: they fit nowhere.
    """
    async with repaired(task, b"", leases) as ready:
        if complaint := await place_tests(ready.sandbox, task):
            raise _bad_row(task, complaint)


def _bad_row(task: SweTask, complaint: str) -> TaskError:
    return TaskError(
        FailureKind.BAD_ROW,
        f"swe row {task.id or 'without id'}: {complaint}.",
        "Check the row's tests against its repository.",
    )


def _with_way(score: Score, way: str) -> Score:
    """Say in the detail when the patch needed a more forgiving way of applying it."""
    if way in ("", "git apply"):
        return score
    return score.model_copy(update={"detail": {**score.detail, "applied_with": way}})
