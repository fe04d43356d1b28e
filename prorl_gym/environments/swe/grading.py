"""Grading a repair: the patch and the hidden tests in a sandbox that the agent has never touched.

A patch that does not apply, does not build, hangs or breaks scores 0.0 with the reason. A sandbox that is lost, a
harness that is not installed or a row whose own tests cannot be put in place raises: no reward. So does a row whose
tests do not even run on its gold patch, which is proven before its first grading that reports no test scores 0.0.
"""

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from prorl_gym.deadlines import paused_deadline
from prorl_gym.environments.killed_program import unexplained_kill_error
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe import swebench_harness
from prorl_gym.environments.swe.controls.control_checks import RepairUnderTest, check_repair
from prorl_gym.environments.swe.controls.control_search import ControlPlanCache, identify_row
from prorl_gym.environments.swe.patch_filter import paths_in_diff
from prorl_gym.environments.swe.repaired_sandbox import (
    UnsolvedError,
    mark_build_start,
    open_repaired_sandbox,
    pack_build,
    place_tests,
)
from prorl_gym.environments.swe.run_tests import (
    StatusLookup,
    TestResults,
    broke_only_others,
    run_tests,
    score_tests,
    summarize_names,
    unsolved_score,
    with_flaky_detail,
)
from prorl_gym.environments.swe.runner_reports import NO_PYTEST, PASSING
from prorl_gym.environments.swe.swe_row import SweTask
from prorl_gym.errors import Evidence, FailureKind, GraderError, TaskError
from prorl_gym.records import Score
from prorl_gym.sandbox.protocol import Sandbox
from prorl_gym.settings import ResolvedSettings

EVAL_SHARE = 0.8
"""Share of the stage's deadline that build and tests may use; the rest is for what is around them."""


@dataclass(frozen=True, slots=True)
class GradeResult:
    """A score and what it cost, in seconds of wall clock."""

    score: Score
    tests_seconds: float
    """Build and tests, without sandbox, repository, patch, report and checks."""
    checks_seconds: float
    """Runs B and C, and sealed values; at a row's first grading also the proof of its controls."""
    seconds: float


_KILLED = "killed"
"""Key of ``Score.detail``: SIGKILL ended the run of a failed repair, and no limit explains that."""
_control_plans = ControlPlanCache()
_proven_rows: set[str] = set()
"""Rows whose tests ran on the gold patch or the starting state."""
_MAX_PROVEN = 100_000
_CANNOT_EXECUTE = (126, 127)
"""Exit codes of a shell that could not start its command."""


async def grade(task: SweTask, patch: bytes, leases: Leases, settings: ResolvedSettings) -> Score:
    """Return 1.0 when the patch makes every test pass that has to, otherwise 0.0 with the reason.

    Raises ``SandboxError``; ``GraderError``: the row needs the harness of SWE-bench, and it is not installed or broken;
    ``TaskError``: the hidden tests cannot be put in place even without the patch, or do not run even on the gold patch.
    """
    return (await grade_timed(task, patch, leases, settings)).score


async def grade_timed(task: SweTask, patch: bytes, leases: Leases, settings: ResolvedSettings) -> GradeResult:
    """Return the score of ``grade`` with the time of build, tests and checks."""
    started = time.monotonic()
    if not patch.strip():
        return GradeResult(unsolved_score("empty patch"), 0.0, 0.0, 0.0)
    seconds = min(task.tests.seconds, settings.eval_seconds * EVAL_SHARE)
    grading = _grade_with_swebench if task.tests.parser == "swebench" else _grade_with_own_runner
    try:
        score, in_tests, in_checks = await grading(task, patch, leases, seconds)
        if _KILLED in score.detail:  # by the host or by the code under test: a second run in fresh sandboxes decides
            score, in_tests, in_checks = await grading(task, patch, leases, seconds)
            if (sigkill := score.detail.get(_KILLED)) in set(Evidence):
                raise unexplained_kill_error("the run of the tests", Evidence(sigkill))
        if score.reward == 0.0 and not _has_results(score):
            await _prove_row(task, leases, seconds)
    except UnsolvedError as why:
        score, in_tests, in_checks = unsolved_score(str(why)), 0.0, 0.0
    return GradeResult(score, in_tests, in_checks, time.monotonic() - started)


async def _grade_with_own_runner(
    task: SweTask, patch: bytes, leases: Leases, seconds: float
) -> tuple[Score, float, float]:
    own = {*paths_in_diff(os.fsdecode(patch))} - {*paths_in_diff(task.gold_patch)}
    started = time.monotonic()
    async with open_repaired_sandbox(task, patch, leases) as (sandbox, apply_command):
        tests = _HiddenTestRun(task, sandbox)
        prepared = time.monotonic() - started
        results = await tests.run(seconds, own)
        if tests.placement_failed:
            await _check_tests_fit(task, leases)
        score, used = _with_kill_detail(score_tests(task, results), results), results.seconds
        if broke_only_others(task, results) and used < seconds / 2:  # the repair or a flaky test: run again
            again = await tests.run(seconds - used, own)
            score, used = with_flaky_detail(score, task, results, again), used + again.seconds
    started = time.monotonic()
    if score.reward == 1.0:
        found: Mapping[str, str] = {"controls": "none"}
        if (plan := await _control_plans.get(task, leases)) is not None:
            found = await check_repair(RepairUnderTest(task, patch, prepared, used, tests.built), plan, leases)
        detail = {**found, **score.detail} if "why" in found else {**score.detail, **found}
        score = score.model_copy(update={"reward": 0.0 if "why" in found else 1.0, "detail": detail})
    return _with_apply_command(score, apply_command), used, time.monotonic() - started


async def _grade_with_swebench(
    task: SweTask, patch: bytes, leases: Leases, seconds: float
) -> tuple[Score, float, float]:
    score, ran = await _run_with_swebench(task, patch, leases, seconds)
    return score, ran.seconds, 0.0


async def _run_with_swebench(task: SweTask, patch: bytes, leases: Leases, seconds: float) -> tuple[Score, TestResults]:
    script = await swebench_harness.eval_script(task)  # first: without the harness no sandbox is needed
    async with open_repaired_sandbox(task, patch, leases) as (sandbox, apply_command):
        ran = await swebench_harness.run_script(sandbox, task, script, seconds)  # it applies the test patch itself
    score = _with_kill_detail(await swebench_harness.score_log(task, ran), ran)
    return _with_apply_command(score, apply_command), ran


async def _prove_row(task: SweTask, leases: Leases, seconds: float) -> None:
    """Run the tests on the gold patch, or on the starting state of a row without one, once for each row, uncharged.

    Raises ``TaskError`` (BAD_ROW): none is reported there either; ``GraderError``: they are too slow, or killed. On a
    starting state only a runner that does not start shows that: what the tests import may not be there yet.
    """
    if (key := identify_row(task)) in _proven_rows:
        return
    gold = task.gold_patch.encode()
    with paused_deadline():
        try:
            if task.tests.parser == "swebench":
                score, results = await _run_with_swebench(task, gold, leases, seconds)
            else:
                results = await run_hidden_tests(task, gold, leases, seconds)
                score = score_tests(task, results)
        except UnsolvedError as why:
            results = TestResults({}, str(why))
            score = unsolved_score(results.problem)
    did_start = results.exit_code not in _CANNOT_EXECUTE and results.problem != NO_PYTEST
    if _has_results(score) or (did_start and not gold.strip()):
        if len(_proven_rows) >= _MAX_PROVEN:
            _proven_rows.clear()
        _proven_rows.add(key)
        return
    state = "its gold patch" if gold.strip() else "its starting state"
    why = results.problem or "none of the named tests is reported"
    message = results.log.rstrip().rpartition("\n")[2][:200] or "no output"
    what = f"swe row {task.id or 'without id'}: its tests do not run, not even on {state}: {why}: {message}."
    if results.killed or why.endswith("took too long"):
        raise GraderError(what, "Look at the load of the node, and at the row's 'seconds'.")
    fix = "Run its command by hand in its image, which may lack the runner or need the network."
    raise TaskError(FailureKind.BAD_ROW, what, fix)


def _has_results(score: Score) -> bool:
    """Whether a test that the row names was reported."""
    return not all(line.startswith("missing ") for line in score.report.split("\n") if line)


async def run_hidden_tests(task: SweTask, patch: bytes, leases: Leases, seconds: float) -> TestResults:
    """Return the status of each test after a patch (an empty one: of the repository as it is), without a verdict.

    For tools that make rows. Not for rows of SWE-bench.
    """
    try:
        async with open_repaired_sandbox(task, patch, leases) as (sandbox, _):
            tests = _HiddenTestRun(task, sandbox)
            results = await tests.run(seconds)
    except UnsolvedError as why:
        return TestResults({}, str(why))
    if tests.placement_failed:
        await _check_tests_fit(task, leases)
    return results


async def passing_without_repair(task: SweTask, leases: Leases, settings: ResolvedSettings) -> str:
    """Return the names of ``fail_to_pass`` that pass without a repair; empty when each fails, as it must.

    Rows of R2E-Gym name all tests and not which of them fail, so they cannot be checked.
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


@dataclass(slots=True)
class _HiddenTestRun:
    task: SweTask
    sandbox: Sandbox
    mark: str = ""
    built: bytes = b""
    """Packed output of the build."""
    placement_failed: bool = False
    """The hidden tests could not be put in place."""

    async def run(self, seconds: float, own: Collection[str] = ()) -> TestResults:
        if self.task.tests.build:
            self.mark = await mark_build_start(self.sandbox)
        return await run_tests(self.sandbox, self.task.workdir, self.task.tests, seconds, own, self._put_tests)

    async def _put_tests(self) -> str:
        if self.task.tests.build and not self.built:
            self.built = await pack_build(self.sandbox, self.task.workdir, self.mark)
        problem = await place_tests(self.sandbox, self.task)
        self.placement_failed = bool(problem)
        return problem


async def _check_tests_fit(task: SweTask, leases: Leases) -> None:
    """Raise ``TaskError`` (BAD_ROW) when the hidden tests cannot be put in place without the patch either."""
    async with open_repaired_sandbox(task, b"", leases) as (sandbox, _):
        if problem := await place_tests(sandbox, task):
            what = f"swe row {task.id or 'without id'}: {problem}."
            raise TaskError(FailureKind.BAD_ROW, what, "Check the row's tests against its repository.")


def _with_kill_detail(score: Score, results: TestResults) -> Score:
    if score.reward == 1.0 or not results.killed:
        return score
    evidence = True if results.sigkill is None else results.sigkill.value
    return score.model_copy(update={"detail": {**score.detail, _KILLED: evidence}})


def _with_apply_command(score: Score, way: str) -> Score:
    """Name in the detail a command more forgiving than ``git apply``."""
    if way in ("", "git apply"):
        return score
    return score.model_copy(update={"detail": {**score.detail, "applied_with": way}})
