"""Grading a repair: the patch and the hidden tests in a sandbox that the agent has never touched.

A patch that does not apply, does not build, hangs or breaks is worth 0.0 and says why. A sandbox that is lost, a
harness that is not installed or a row whose own tests cannot be put in place raises: no reward comes of that.
"""

import os
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe import official
from prorl_gym.environments.swe.parsers import PASSING
from prorl_gym.environments.swe.patches import changed_paths
from prorl_gym.environments.swe.placing import apply_patch, place_tests
from prorl_gym.environments.swe.prepare import place
from prorl_gym.environments.swe.run_tests import TestResults, run_tests
from prorl_gym.environments.swe.spec import sandbox_spec
from prorl_gym.environments.swe.task import SweTask
from prorl_gym.environments.swe.verdict import Names, broke_others, judge, name_flaky, name_some, unsolved
from prorl_gym.errors import FailureKind, TaskError
from prorl_gym.records import Score
from prorl_gym.sandbox.protocol import Sandbox
from prorl_gym.settings import ResolvedSettings

EVAL_SHARE = 0.8
"""Share of the stage's deadline that build and tests may use; the rest is for what is around them."""

_CONDA = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi\n"
"""Images of SWE-Gym have the interpreter of the tests in an environment of this name."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A sandbox in which only the tests are still to be run."""

    sandbox: Sandbox
    way: str
    """How the patch was applied."""


@dataclass(frozen=True, slots=True)
class Graded:
    """A score and what it cost, in seconds of wall clock."""

    score: Score
    tests_seconds: float
    """Build and tests. The rest is ours: sandbox, repository, patch, report."""
    seconds: float


class _Unsolved(Exception):
    """The patch is worth nothing, before any test ran."""


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
        return Graded(unsolved("empty patch"), 0.0, 0.0)
    seconds = min(task.tests.seconds, settings.eval_seconds * EVAL_SHARE)
    grading = _grade_officially if task.tests.parser == "swebench" else _grade_ourselves
    try:
        score, in_tests = await grading(task, patch, leases, seconds)
    except _Unsolved as why:
        score, in_tests = unsolved(str(why)), 0.0
    return Graded(score, in_tests, time.monotonic() - started)


async def _grade_ourselves(task: SweTask, patch: bytes, leases: Leases, seconds: float) -> tuple[Score, float]:
    async with _ready(task, patch, leases) as ready:
        own = changed_paths(os.fsdecode(patch)) - changed_paths(task.gold_patch)
        results = await _run(task, ready.sandbox, seconds, own)
        score, used = judge(task, results), results.seconds
        if broke_others(task, results) and used < seconds / 2:  # is it the repair, or the test?
            again = await _run(task, ready.sandbox, seconds - used, own)
            score, used = name_flaky(score, task, results, again), used + again.seconds
    return _with_way(score, ready.way), used


async def _grade_officially(task: SweTask, patch: bytes, leases: Leases, seconds: float) -> tuple[Score, float]:
    script = await official.eval_script(task)  # first of all: without the harness no sandbox is needed
    bare = replace(task, tests=replace(task.tests, patch=""))  # the script applies the test patch itself
    async with _ready(bare, patch, leases, hidden=task) as ready:
        log = await official.run_script(ready.sandbox, task, script, seconds)
    return _with_way(await official.report(task, log), ready.way), log.seconds


async def run_hidden_tests(task: SweTask, patch: bytes, leases: Leases, seconds: float) -> TestResults:
    """Return the status of each test after a patch (an empty one: of the repository as it is), without a verdict.

    For tools that make rows and have to know which tests pass. Not for rows of SWE-bench.

    Raises:
        SandboxError, TaskError: see ``grade``.
    """
    try:
        async with _ready(task, patch, leases) as ready:
            return await _run(task, ready.sandbox, seconds)
    except _Unsolved as why:
        return TestResults({}, str(why))


async def passing_unrepaired(task: SweTask, leases: Leases, settings: ResolvedSettings) -> str:
    """Name the tests of ``fail_to_pass`` that pass in the repository as it is; empty when each one fails, as it must.

    Rows of R2E-Gym name all tests there and say not which of them fail: nothing can be told of them.

    Raises:
        SandboxError, GraderError, TaskError: see ``grade``.
    """
    seconds = min(task.tests.seconds, settings.eval_seconds * EVAL_SHARE)
    if task.source == "r2egym":
        return ""
    if task.tests.parser == "swebench":
        score, _ = await _grade_officially(task, b"", leases, seconds)
        count = str(score.detail.get("fail_to_pass", "0/0"))
        return "" if count.startswith("0/") else count
    results = await run_hidden_tests(task, b"", leases, seconds)
    found = Names(results.statuses).all(task.tests.fail_to_pass)
    passing = [name for name, status in found if status in PASSING]
    return "" if results.complaint else name_some(passing)


async def _run(task: SweTask, sandbox: Sandbox, seconds: float, own: Collection[str] = ()) -> TestResults:
    plan = task.tests
    if task.source == "swegym":
        plan = replace(plan, command=_CONDA + plan.command)
    return await run_tests(sandbox, task.workdir, plan, seconds, own, partial(place_tests, sandbox, task))


@asynccontextmanager
async def _ready(
    task: SweTask, patch: bytes, leases: Leases, *, hidden: SweTask | None = None
) -> AsyncGenerator[_Ready]:
    """Start a clean sandbox with the repository, the patch and the hidden tests in it.

    Args:
        task: what is put in place.
        patch: the agent's; may be empty.
        leases: gives the sandbox.
        hidden: names the paths of hidden tests, when it is another than ``task``.
    """
    sandbox = await leases.clean(await sandbox_spec(task))
    try:
        await place(task, sandbox)
        way = await _apply(hidden or task, patch, sandbox)
        if complaint := await place_tests(sandbox, task):
            if patch.strip():
                await _check_row(task, leases)
            raise _Unsolved(complaint) if patch.strip() else _bad_row(task, complaint)
        yield _Ready(sandbox, way)
    finally:
        await sandbox.close()


async def _apply(task: SweTask, patch: bytes, sandbox: Sandbox) -> str:
    if not patch.strip():
        return ""
    applied = await apply_patch(sandbox, task, patch)
    if not applied.way:
        raise _Unsolved(f"the patch does not apply: {applied.complaint}")
    return applied.way


async def _check_row(task: SweTask, leases: Leases) -> None:
    """Tell a patch that is in the way of the hidden tests from a row whose tests fit nowhere."""
    async with _ready(task, b"", leases):
        pass


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
