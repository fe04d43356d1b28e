"""Checks a repair by controls: it must pass tests and fail their wrong versions, without knowing which it runs.

Run C decides: each process has a sandbox of its own and one test function, whose body is drawn among the real one and
its controls. Code that does not compute the expected result has to guess which body is real: with k controls drawn the
best rule is right with a chance of about 1/(e k) for each function. Processes that share a sandbox can compare bodies;
all are equally frequent there, so the chance is 1/(k+1). A few other tests run in the same way, half of them with a
control, since a patch could hide in run A that it breaks them. Run B adds many controls in one interleaved run, for
tests that run C does not reach; it decides nothing about originals. Sealed values leave nothing to chance.
"""

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prorl_gym.environments.killed_program import unexplained_kill_error
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.controls.control_plan import MAX_CONTROL_RUNS, ControlPlan, Edit, TestFunction
from prorl_gym.environments.swe.controls.control_runs import (
    FunctionJob,
    JobResult,
    controls_that_passed,
    run_interleaved,
    run_jobs,
)
from prorl_gym.environments.swe.controls.hidden_tests import place_helpers, read_helpers, restore_helper
from prorl_gym.environments.swe.controls.parsed_tests import isolate_test
from prorl_gym.environments.swe.controls.sealed_values import matches_expected, seal_source
from prorl_gym.environments.swe.repaired_sandbox import UnsolvedError, open_repaired_sandbox, restore_build, run_build
from prorl_gym.environments.swe.swe_row import SweTask
from prorl_gym.records import Score
from prorl_gym.sandbox.protocol import Sandbox

ALLOWED_SECONDS = 5.0
"""Time for the checks, or half of the tests' own time when that is more."""
_TAMPERED_REASON = "tests tampered with"
_MAX_SANDBOXES = 3
"""Sandboxes of one grading at the same time."""
_MIN_SANDBOXES = 3
"""Sandboxes of run C, however long one takes to prepare."""
_MIN_SECONDS = 30.0
"""Smallest time limit of a process, unless the row's own is smaller."""
_MAX_STANDALONE = 6
"""Functions of ``pass_to_pass`` that run alone, half of them with a control."""
_MAX_INTERLEAVED = 12
"""Functions of run B: those of ``fail_to_pass`` first."""


@dataclass(frozen=True, slots=True)
class GradingCost:
    """Wall clock of run A in seconds."""

    prepare_seconds: float
    """Sandbox, repository, patch, and packing the build."""
    test_seconds: float


@dataclass(frozen=True, slots=True)
class RepairUnderTest:
    """A repair that passed run A."""

    task: SweTask
    patch: bytes
    built: bytes = b""
    """tar.gz of what the build changed, from ``/``; empty when the build has to run again."""


class _TamperedError(Exception):
    """A control did not fail, or a test that passed in run A does not pass alone."""


async def check_repair(
    repair: RepairUnderTest, plan: ControlPlan, leases: Leases, cost: GradingCost
) -> Mapping[str, str]:
    """Return entries for the detail of a repair that passed run A, with ``why`` when it fails the checks.

    Raises:
        SandboxError: a sandbox could not be started or was lost.
    """
    return await _ControlChecks(repair, plan, leases, cost).run()


def with_control_detail(score: Score, found: Mapping[str, str]) -> Score:
    """Return the score after the checks, with their entries in its detail."""
    detail = {**found, **score.detail} if "why" in found else {**score.detail, **found}
    return score.model_copy(update={"reward": 0.0 if "why" in found else score.reward, "detail": detail})


def draw_variants(functions: Sequence[TestFunction], rng: random.Random) -> list[tuple[TestFunction, Edit | None]]:
    """Return which function each process of run C runs, and with which control; ``None``: as it is.

    A function with two processes or more gets both the real body and a control. All else is drawn evenly among the
    real body and the controls.
    """
    functions = rng.sample(functions, min(len(functions), MAX_CONTROL_RUNS))
    drawn: list[tuple[TestFunction, Edit | None]] = []
    for number, function in enumerate(functions):
        count = len(range(number, MAX_CONTROL_RUNS, len(functions)))
        bodies: list[Edit | None] = [None, *function.variants]
        if count == 1:
            drawn.append((function, rng.choice([None, rng.choice(function.variants)])))
            continue
        chosen = [None, *rng.sample(function.variants, min(count - 1, len(function.variants)))]
        while len(chosen) < count:
            chosen += rng.sample(bodies, min(count - len(chosen), len(bodies)))
        drawn += [(function, edit) for edit in chosen]
    rng.shuffle(drawn)
    return drawn


@dataclass(frozen=True, slots=True)
class _ControlRun:
    """A process, and what it runs."""

    function: TestFunction
    job: FunctionJob
    is_original: bool


class _ControlChecks:
    def __init__(self, repair: RepairUnderTest, plan: ControlPlan, leases: Leases, cost: GradingCost) -> None:
        self._repair = repair
        self._task = repair.task
        self._plan = plan
        self._leases = leases
        self._cost = cost
        self._sandbox_permits = asyncio.Semaphore(_MAX_SANDBOXES)
        self._seconds = min(self._task.tests.seconds, max(_MIN_SECONDS, 5 * cost.test_seconds))
        self._rng = random.Random(secrets.randbits(128))
        self._texts = {**self._task.tests.files, **plan.texts}
        self._may_retry = True

    async def run(self) -> Mapping[str, str]:
        runs = await asyncio.to_thread(self._draw_runs)
        detail = self._detail(runs)
        try:
            await self._check_all(runs)
        except _TamperedError as error:
            return {"why": _TAMPERED_REASON, "check": str(error), **detail}
        return detail

    async def _check_all(self, runs: Sequence[_ControlRun]) -> None:
        """Run all checks; the first that fails ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                if self._plan.sealed:
                    group.create_task(self._check_sealed())
                for batch in self._split_runs(runs):
                    group.create_task(self._check_batch(batch))
                if self._plan.interleavable or self._plan.standalone_others:
                    group.create_task(self._check_others())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _detail(self, runs: Sequence[_ControlRun]) -> dict[str, str]:
        plan = self._plan
        detail = {
            "sealed": f"{len(plan.sealed)}/{plan.total}",
            "controls": f"{len(plan.controlled)}/{plan.total}",
        }
        if runs:
            originals = sum(each.is_original for each in runs)
            own = sum(each.function.runner == "own" for each in runs)
            detail["run_c"] = (
                f"{originals} real + {len(runs) - originals} control (own runner {own}, pytest {len(runs) - own})"
            )
        return detail

    # --- run C ------------------------------------------------------------------------------------------------------

    def _draw_runs(self) -> list[_ControlRun]:
        return [self._build_run(function, edit) for function, edit in draw_variants(self._plan.controlled, self._rng)]

    def _build_run(self, function: TestFunction, edit: Edit | None) -> _ControlRun:
        source = self._texts[function.path]
        text = isolate_test(edit.apply(source) if edit else source, function.defined)
        return _ControlRun(function, FunctionJob(function.path, text, function.name, function.runner), edit is None)

    def _split_runs(self, runs: Sequence[_ControlRun]) -> list[Sequence[_ControlRun]]:
        """Divide processes among sandboxes: each has its own, unless that costs too much."""
        allowed = max(ALLOWED_SECONDS, self._cost.test_seconds / 2)
        affordable = int(allowed * _MAX_SANDBOXES / max(self._cost.prepare_seconds, 0.001))
        count = min(len(runs), max(affordable, _MIN_SANDBOXES))
        return [runs[start::count] for start in range(count)]

    async def _check_batch(self, batch: Sequence[_ControlRun]) -> None:
        async with self._sandbox_permits:
            for run, result in zip(batch, await self._run_in_fresh_sandbox(batch), strict=True):
                await self._check_result(run, result)

    async def _check_result(self, run: _ControlRun, result: JobResult) -> None:
        if run.is_original and not result.passed and self._may_retry:
            # The test may be slow or flaky. One more try in a grading adds little to a guess, since code cannot
            # recognise it in a fresh sandbox.
            self._may_retry = False
            result = (await self._run_in_fresh_sandbox([run]))[0]
        if run.is_original:
            _require_complete(run.function, result)
        if result.passed is not run.is_original:
            what = "does not pass alone" if run.is_original else "passes with a wrong value"
            raise _TamperedError(f"{run.function.name} {what}")

    async def _run_in_fresh_sandbox(self, batch: Sequence[_ControlRun]) -> list[JobResult]:
        async with self._prepared_sandbox() as sandbox:
            # One at a time: no process finds the texts of the others among its jobs.
            return [(await self._run(sandbox, [each.job]))[0] for each in batch]

    # --- sealed values ----------------------------------------------------------------------------------------------

    async def _check_sealed(self) -> None:
        emit = f"_{secrets.token_hex(4)}"
        functions = self._plan.sealed
        async with self._sandbox_permits, self._prepared_sandbox() as sandbox:
            jobs = [await asyncio.to_thread(self._sealed_job, each, emit) for each in functions]
            for function, result in zip(functions, await self._run(sandbox, jobs), strict=True):
                _check_values(function, result)

    def _sealed_job(self, function: TestFunction, emit: str) -> FunctionJob:
        text = seal_source(self._texts[function.path], function.seals, emit)
        return FunctionJob(function.path, isolate_test(text, function.defined), function.name, function.runner, emit)

    # --- other tests, and run B -------------------------------------------------------------------------------------

    async def _check_others(self) -> None:
        async with self._sandbox_permits, self._prepared_sandbox() as sandbox:
            await self._check_standalone(sandbox)
            await self._check_interleaved(sandbox)

    async def _check_standalone(self, sandbox: Sandbox) -> None:
        """Run other tests alone: in run A the patch may have made the runner pass them."""
        functions = self._plan.standalone_others
        drawn = self._rng.sample(functions, min(len(functions), _MAX_STANDALONE))
        originals = (len(drawn) + self._rng.randrange(2)) // 2
        runs = [
            self._build_run(each, None if number < originals else self._rng.choice(each.variants))
            for number, each in enumerate(drawn)
        ]
        self._rng.shuffle(runs)
        for run, result in zip(runs, await self._run(sandbox, [each.job for each in runs]), strict=True):
            await self._check_result(run, result)

    async def _check_interleaved(self, sandbox: Sandbox) -> None:
        functions, others = list(self._plan.functions), list(self._plan.others)
        self._rng.shuffle(functions)
        self._rng.shuffle(others)
        chosen = [each for each in (*functions, *others) if each in self._plan.interleavable][:_MAX_INTERLEAVED]
        if not chosen:
            return
        controls, statuses = await run_interleaved(sandbox, self._task, self._texts, chosen, self._rng, self._seconds)
        if passed := controls_that_passed(statuses, controls):
            raise _TamperedError(f"{controls[passed[0]].rpartition('/')[2]} does not fail with a wrong value")

    # --- sandboxes --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _prepared_sandbox(self) -> AsyncGenerator[Sandbox]:
        """Give a sandbox with the repair and its build, and of the hidden tests only their helpers."""
        async with open_repaired_sandbox(self._task, self._repair.patch, self._leases) as repaired:
            await self._prepare(repaired.sandbox)
            yield repaired.sandbox

    async def _prepare(self, sandbox: Sandbox) -> None:
        # Before the build: programs and processes that the build leaves may record what they see.
        if problem := await place_helpers(sandbox, self._task, self._plan.absent):
            raise _TamperedError(problem)
        if not self._task.tests.build:
            return
        helpers = await read_helpers(sandbox, self._task, self._plan.absent)
        if self._repair.built:
            await restore_build(sandbox, self._repair.built)
        elif not await run_build(sandbox, self._task):
            raise UnsolvedError("the build failed when it ran once more")
        for path, data in helpers.items():
            await restore_helper(sandbox, path, data)

    async def _run(self, sandbox: Sandbox, jobs: Sequence[FunctionJob]) -> list[JobResult]:
        total_seconds = self._seconds * max(1, len(jobs) // 4)
        return await run_jobs(sandbox, self._task, jobs, self._seconds, total_seconds)


def _require_complete(function: TestFunction, result: JobResult) -> None:
    """Raise for a test that was killed from outside before its end.

    Raises:
        SandboxError: it was killed, and nothing in its sandbox did that.
    """
    if result.sigkill is not None:
        raise unexplained_kill_error(function.name, result.sigkill)


def _check_values(function: TestFunction, result: JobResult) -> None:
    _require_complete(function, result)
    for number, seal in enumerate(function.seals):
        is_expected = matches_expected(seal, result.emitted.get(number, ()))
        if is_expected is None and function.variants:
            continue  # a right repair may give a value of another kind; run C checks this function as well
        if not is_expected:
            raise _TamperedError(f"{function.name} does not give the expected value")
    if not result.passed:
        raise _TamperedError(f"{function.name} does not pass alone")
