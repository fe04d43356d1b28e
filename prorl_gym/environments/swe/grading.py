"""Grading a repair: the patch and the hidden tests in a sandbox that the agent has never touched.

A patch that does not apply, does not build, hangs or breaks scores 0.0 with the reason. A sandbox that is lost, a
harness that is not installed or a row whose own tests cannot be put in place raises: no reward.
"""

import os
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from prorl_gym.environments.killed_program import unexplained_kill_error
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe import swebench_harness
from prorl_gym.environments.swe.controls.control_checks import (
    GradingCost,
    RepairUnderTest,
    check_repair,
    with_control_detail,
)
from prorl_gym.environments.swe.controls.control_search import ControlPlanCache
from prorl_gym.environments.swe.patch_filter import changed_paths
from prorl_gym.environments.swe.repaired_sandbox import BuildSnapshot, UnsolvedError, open_repaired_sandbox, place_tests
from prorl_gym.environments.swe.run_tests import (
    KILLED,
    StatusLookup,
    TestResults,
    broke_only_others,
    run_tests,
    score_tests,
    summarize_names,
    unsolved_score,
    with_flaky_detail,
)
from prorl_gym.environments.swe.runner_reports import PASSING
from prorl_gym.environments.swe.swe_row import SweTask
from prorl_gym.errors import Evidence, FailureKind, TaskError
from prorl_gym.records import Score
from prorl_gym.sandbox.protocol import Sandbox
from prorl_gym.settings import ResolvedSettings

EVAL_SHARE = 0.8
"""Share of the stage's deadline that build and tests may use; the rest is for what is around them."""

_CONDA = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi\n"
"""The conda environment with the interpreter of the tests, in images of SWE-Gym."""


@dataclass(frozen=True, slots=True)
class GradeResult:
    """A score and what it cost, in seconds of wall clock."""

    score: Score
    tests_seconds: float
    """Build and tests, without sandbox, repository, patch, report and checks."""
    checks_seconds: float
    """Runs B and C, and sealed values; at a row's first grading also the proof of its controls."""
    seconds: float


_control_plans = ControlPlanCache()


async def grade(task: SweTask, patch: bytes, leases: Leases, settings: ResolvedSettings) -> Score:
    """Return 1.0 when the patch makes every test pass that has to, otherwise 0.0 with the reason.

    Raises:
        SandboxError: the sandbox could not be started or was lost.
        GraderError: the row needs the harness of SWE-bench, and it is not installed or broken.
        TaskError: the hidden tests cannot be put in place even without the patch.
    """
    return (await grade_timed(task, patch, leases, settings)).score


async def grade_timed(task: SweTask, patch: bytes, leases: Leases, settings: ResolvedSettings) -> GradeResult:
    """Return the score of ``grade`` with the time of build, tests and checks.

    Raises:
        SandboxError, GraderError, TaskError: see ``grade``.
    """
    started = time.monotonic()
    if not patch.strip():
        return GradeResult(unsolved_score("empty patch"), 0.0, 0.0, 0.0)
    seconds = min(task.tests.seconds, settings.eval_seconds * EVAL_SHARE)
    grading = _grade_with_swebench if task.tests.parser == "swebench" else _grade_with_own_runner
    try:
        score, in_tests, in_checks = await grading(task, patch, leases, seconds)
        if KILLED in score.detail:  # by the host or by the code under test: a second run in fresh sandboxes decides
            score, in_tests, in_checks = await grading(task, patch, leases, seconds)
            if (sigkill := score.detail.get(KILLED)) in set(Evidence):
                raise unexplained_kill_error("the run of the tests", Evidence(sigkill))
    except UnsolvedError as why:
        score, in_tests, in_checks = unsolved_score(str(why)), 0.0, 0.0
    return GradeResult(score, in_tests, in_checks, time.monotonic() - started)


async def _grade_with_own_runner(
    task: SweTask, patch: bytes, leases: Leases, seconds: float
) -> tuple[Score, float, float]:
    task = _with_conda(task)
    own = changed_paths(os.fsdecode(patch)) - changed_paths(task.gold_patch)
    started = time.monotonic()
    async with open_repaired_sandbox(task, patch, leases) as ready:
        tests = _HiddenTestRun(task, ready.sandbox)
        prepared = time.monotonic() - started
        results = await tests.run(seconds, own)
        if tests.placement_failed:
            await _check_tests_fit(task, leases)
        score, used = score_tests(task, results), results.seconds
        if broke_only_others(task, results) and used < seconds / 2:  # the repair or a flaky test: run again
            again = await tests.run(seconds - used, own)
            score, used = with_flaky_detail(score, task, results, again), used + again.seconds
    started = time.monotonic()
    if score.reward == 1.0:
        score = await _check_controls(
            RepairUnderTest(task, patch, tests.built), score, leases, GradingCost(prepared, used)
        )
    return _with_apply_command(score, ready.apply_command), used, time.monotonic() - started


async def _check_controls(repair: RepairUnderTest, score: Score, leases: Leases, cost: GradingCost) -> Score:
    """Check a repair whose tests pass by the row's controls."""
    plan = await _control_plans.get(repair.task, leases)
    if plan is None:
        return score.model_copy(update={"detail": {**score.detail, "controls": "none"}})
    return with_control_detail(score, await check_repair(repair, plan, leases, cost))


async def _grade_with_swebench(
    task: SweTask, patch: bytes, leases: Leases, seconds: float
) -> tuple[Score, float, float]:
    script = await swebench_harness.eval_script(task)  # first: without the harness no sandbox is needed
    bare = replace(task, tests=replace(task.tests, patch=""))  # the script applies the test patch itself
    async with open_repaired_sandbox(bare, patch, leases, hidden=task) as ready:
        log = await swebench_harness.run_script(ready.sandbox, task, script, seconds)
    return _with_apply_command(await swebench_harness.score_log(task, log), ready.apply_command), log.seconds, 0.0


async def run_hidden_tests(task: SweTask, patch: bytes, leases: Leases, seconds: float) -> TestResults:
    """Return the status of each test after a patch (an empty one: of the repository as it is), without a verdict.

    For tools that make rows. Not for rows of SWE-bench.

    Raises:
        SandboxError, TaskError: see ``grade``.
    """
    task = _with_conda(task)
    try:
        async with open_repaired_sandbox(task, patch, leases) as ready:
            tests = _HiddenTestRun(task, ready.sandbox)
            results = await tests.run(seconds)
    except UnsolvedError as why:
        return TestResults({}, str(why))
    if tests.placement_failed:
        await _check_tests_fit(task, leases)
    return results


async def passing_without_repair(task: SweTask, leases: Leases, settings: ResolvedSettings) -> str:
    """Return the names of ``fail_to_pass`` that pass without a repair; empty when each fails, as it must.

    Rows of R2E-Gym name all tests and not which of them fail, so they cannot be checked.

    Raises:
        SandboxError, GraderError, TaskError: see ``grade``.
    """
    seconds = min(task.tests.seconds, settings.eval_seconds * EVAL_SHARE)
    if task.source == "r2egym":
        return ""
    if task.tests.parser == "swebench":
        score, _, _ = await _grade_with_swebench(task, b"", leases, seconds)
        count = str(score.detail.get("fail_to_pass", "0/0"))
        return "" if count.startswith("0/") else count
    results = await run_hidden_tests(task, b"", leases, seconds)
    found = StatusLookup(results.statuses).statuses_of(task.tests.fail_to_pass)
    passing = [name for name, status in found if status in PASSING]
    return "" if results.problem else summarize_names(passing)


class _HiddenTestRun:
    """Build and hidden tests of a repaired repository."""

    def __init__(self, task: SweTask, sandbox: Sandbox) -> None:
        self._task = task
        self._sandbox = sandbox
        self._build_snapshot = BuildSnapshot(sandbox, task.workdir)
        self.built = b""
        """Packed output of the build."""
        self.placement_failed = False
        """The hidden tests could not be put in place."""

    async def run(self, seconds: float, own: Collection[str] = ()) -> TestResults:
        if self._task.tests.build:
            await self._build_snapshot.record_start()
        return await run_tests(self._sandbox, self._task.workdir, self._task.tests, seconds, own, self._put_tests)

    async def _put_tests(self) -> str:
        if self._task.tests.build and not self.built:
            self.built = await self._build_snapshot.pack_changes()
        complaint = await place_tests(self._sandbox, self._task)
        self.placement_failed = bool(complaint)
        return complaint


def _with_conda(task: SweTask) -> SweTask:
    if task.source != "swegym":
        return task
    return replace(task, tests=replace(task.tests, command=_CONDA + task.tests.command))


async def _check_tests_fit(task: SweTask, leases: Leases) -> None:
    """Check that the hidden tests can be put in place without the patch.

    Raises:
        TaskError: they cannot: the row is bad.
    """
    async with open_repaired_sandbox(task, b"", leases) as ready:
        if complaint := await place_tests(ready.sandbox, task):
            raise _bad_row(task, complaint)


def _bad_row(task: SweTask, complaint: str) -> TaskError:
    return TaskError(
        FailureKind.BAD_ROW,
        f"swe row {task.id or 'without id'}: {complaint}.",
        "Check the row's tests against its repository.",
    )


def _with_apply_command(score: Score, way: str) -> Score:
    """Note in the detail when the patch needed a more forgiving command."""
    if way in ("", "git apply"):
        return score
    return score.model_copy(update={"detail": {**score.detail, "applied_with": way}})
