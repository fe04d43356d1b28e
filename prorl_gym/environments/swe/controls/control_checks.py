"""Checks a repair by controls: it must pass tests and fail their wrong versions, without knowing which it runs.

The repair has passed run A, the hidden tests as the row runs them. Run C decides: each process has a sandbox of its own
and one test function, whose body is drawn among the real one and its controls. Code that does not compute the expected
result has to guess which body is real: with k controls drawn the best rule is right with a chance of about 1/(e k) for
each function. Processes that share a sandbox can compare bodies; all are equally frequent there, so the chance is
1/(k+1). Other tests run in the same way, drawn from all of ``pass_to_pass``, and a few with a control, since a patch
could hide in run A that it breaks them; one that fails counts only if it passes with the gold patch. Run B adds many
controls in one interleaved run, for tests that run C does not reach; it decides nothing about originals. Sealed values
leave nothing to chance.
"""

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from prorl_gym.deadlines import paused_deadline
from prorl_gym.environments.killed_program import unexplained_kill_error
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.controls.control_plan import MAX_CONTROL_RUNS, ControlPlan, Edit, TestFunction
from prorl_gym.environments.swe.controls.control_runs import FunctionJob, JobResult, make_job, run_interleaved, run_jobs
from prorl_gym.environments.swe.controls.control_search import find_others, identify_row
from prorl_gym.environments.swe.controls.sealed_values import matches_expected, seal_source
from prorl_gym.environments.swe.repaired_sandbox import (
    UnsolvedError,
    open_repaired_sandbox,
    pack_tree,
    place_helpers,
    read_helpers,
    restore_build,
    run_build,
)
from prorl_gym.environments.swe.repository import open_clean_repository, sandbox_spec
from prorl_gym.environments.swe.swe_row import SweTask
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
_MAX_STANDALONE = 30
"""Functions of ``pass_to_pass`` that run alone as they are, of those that need pytest a quarter."""
_MAX_STANDALONE_CONTROLS = 3
"""Functions of ``pass_to_pass`` that run alone with a control."""
_MAX_INTERLEAVED = 12
"""Functions of run B: those of ``fail_to_pass`` first."""
_MAX_UNFIT = 100_000
_unfit_tests: set[tuple[str, str]] = set()
"""Rows and their functions of ``pass_to_pass`` that do not pass alone with the gold patch."""


@dataclass(frozen=True, slots=True)
class RepairUnderTest:
    """A repair that passed run A."""

    task: SweTask
    patch: bytes
    prepare_seconds: float
    """Wall clock of sandbox, repository, patch, and packing the build in run A."""
    test_seconds: float
    built: bytes = b""
    """tar.gz of what the build changed, from ``/``; empty when the build has to run again."""


class _TamperedError(Exception):
    """A control did not fail, or a test that passed in run A does not pass alone."""


async def check_repair(repair: RepairUnderTest, plan: ControlPlan, leases: Leases) -> Mapping[str, str]:
    """Return entries for the detail of a repair that passed run A, with ``why`` when it fails the checks."""
    return await _ControlChecks(repair, plan, leases).run()


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
    function: TestFunction
    job: FunctionJob
    is_original: bool


class _ControlChecks:
    def __init__(self, repair: RepairUnderTest, plan: ControlPlan, leases: Leases) -> None:
        self._repair = repair
        self._task = repair.task
        self._plan = plan
        self._leases = leases
        self._sandbox_permits = asyncio.Semaphore(_MAX_SANDBOXES)
        self._seconds = min(self._task.tests.seconds, max(_MIN_SECONDS, 5 * repair.test_seconds))
        self._rng = random.Random(secrets.randbits(128))
        self._texts = {**self._task.tests.files, **plan.texts}
        self._may_retry = True
        self._others: Sequence[TestFunction] = plan.standalone_others
        self._tree = b""
        """Packed repository with the repair; empty where the image holds the repository."""

    async def run(self) -> Mapping[str, str]:
        plan = self._plan
        if self._task.gold_patch.strip():  # which shows whether a test passes alone at all
            row, others = identify_row(self._task), await asyncio.to_thread(find_others, self._task, plan)
            self._others = [each for each in others if (row, each.test_id) not in _unfit_tests]
        drawn = draw_variants(plan.controlled, self._rng)
        runs = await asyncio.to_thread(lambda: [self._build_run(function, edit) for function, edit in drawn])
        detail = {"sealed": f"{len(plan.sealed)}/{plan.total}", "controls": f"{len(plan.controlled)}/{plan.total}"}
        if runs:
            real, own = sum(run.is_original for run in runs), sum(run.function.runner == "own" for run in runs)
            detail["run_c"] = f"{real} real + {len(runs) - real} control (own runner {own}, pytest {len(runs) - own})"
        try:
            async with asyncio.TaskGroup() as group:  # the first check that fails ends the others
                if self._task.archive or self._task.path:
                    async with self._repaired_sandbox(self._repair.patch) as sandbox:
                        self._tree = await pack_tree(sandbox, self._task.workdir)
                if plan.standalone_others or self._others:
                    group.create_task(self._check_standalone())
                if plan.interleavable:
                    group.create_task(self._check_interleaved())
                if plan.sealed:
                    group.create_task(self._check_sealed())
                for batch in self._split_runs(runs):
                    group.create_task(self._check_batch(batch))
        except ExceptionGroup as failed:
            if isinstance(error := failed.exceptions[0], _TamperedError):
                return {"why": _TAMPERED_REASON, "check": str(error), **detail}
            raise error from None
        return detail

    # --- run C ------------------------------------------------------------------------------------------------------

    def _build_run(self, function: TestFunction, edit: Edit | None) -> _ControlRun:
        source = self._texts[function.path]
        return _ControlRun(function, make_job(function, edit.apply(source) if edit else source), edit is None)

    def _split_runs(self, runs: Sequence[_ControlRun]) -> list[Sequence[_ControlRun]]:
        """Divide processes among sandboxes: each has its own, unless that costs too much."""
        allowed = max(ALLOWED_SECONDS, self._repair.test_seconds / 2)
        affordable = int(allowed * _MAX_SANDBOXES / max(self._repair.prepare_seconds, 0.001))
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
            jobs = await asyncio.to_thread(
                lambda: [
                    make_job(each, seal_source(self._texts[each.path], each.seals, emit), emit) for each in functions
                ]
            )
            for function, result in zip(functions, await self._run(sandbox, jobs), strict=True):
                _require_complete(function, result)
                for number, seal in enumerate(function.seals):
                    if not matches_expected(seal, result.emitted.get(number, ())):
                        raise _TamperedError(f"{function.name} does not give the expected value")
                if not result.passed:
                    raise _TamperedError(f"{function.name} does not pass alone")

    # --- other tests, and run B -------------------------------------------------------------------------------------

    async def _check_standalone(self) -> None:
        """Run other tests alone: in run A the patch may have made the runner pass them."""
        controlled = self._plan.standalone_others
        drawn = self._rng.sample(controlled, min(len(controlled), _MAX_STANDALONE_CONTROLS))
        bodies: list[tuple[TestFunction, Edit | None]] = [(each, self._rng.choice(each.variants)) for each in drawn]
        others = self._rng.sample(self._others, len(self._others))
        originals = [each for each in others if each.runner == "own"][:_MAX_STANDALONE]
        originals += [each for each in others if each.runner == "pytest"][: _MAX_STANDALONE // 4]
        bodies += [(each, None) for each in originals[:_MAX_STANDALONE]]
        self._rng.shuffle(bodies)
        runs = await asyncio.to_thread(lambda: [self._build_run(function, edit) for function, edit in bodies])
        async with self._sandbox_permits, self._prepared_sandbox() as sandbox:
            results = list(zip(runs, await self._run(sandbox, [each.job for each in runs]), strict=True))
        failed = [run for run, result in results if run.is_original and not result.passed]
        excused = await self._find_excused(failed) if failed and self._task.gold_patch.strip() else ()
        for run, result in results:
            if run not in excused:
                await self._check_result(run, result)

    async def _find_excused(self, failed: Sequence[_ControlRun]) -> Collection[_ControlRun]:
        """Return the runs that pass where no control ran before, or do not pass alone with the gold patch either."""
        again = await self._run_in_fresh_sandbox(failed)
        left = [run for run, result in zip(failed, again, strict=True) if not result.passed]
        unfit: list[_ControlRun] = []
        try:
            with paused_deadline():  # found out once for each row
                async with self._prepared_sandbox(self._task.gold_patch.encode()) as sandbox:
                    for _ in range(2):
                        results = await self._run(sandbox, [each.job for each in left])
                        unfit += [run for run, result in zip(left, results, strict=True) if not result.passed]
        except (UnsolvedError, _TamperedError):
            return failed
        if len(_unfit_tests) > _MAX_UNFIT:
            _unfit_tests.clear()
        _unfit_tests.update((identify_row(self._task), run.function.test_id) for run in unfit)
        return [run for run in failed if run not in left or run in unfit]

    async def _check_interleaved(self) -> None:
        functions, others = list(self._plan.functions), list(self._plan.others)
        self._rng.shuffle(functions)
        self._rng.shuffle(others)
        chosen = [each for each in (*functions, *others) if each in self._plan.interleavable][:_MAX_INTERLEAVED]
        async with self._sandbox_permits, self._prepared_sandbox() as sandbox:
            passed = await run_interleaved(sandbox, self._task, self._texts, chosen, self._rng, self._seconds)
        if passed:
            raise _TamperedError(f"{passed[0].rpartition('/')[2]} does not fail with a wrong value")

    # --- sandboxes --------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _repaired_sandbox(self, patch: bytes) -> AsyncGenerator[Sandbox]:
        """Give a sandbox with the patch, and of the hidden tests only their helpers."""
        async with open_repaired_sandbox(self._task, patch, self._leases) as (sandbox, _):
            if problem := await place_helpers(sandbox, self._task, self._plan.absent):
                raise _TamperedError(problem)
            yield sandbox

    @asynccontextmanager
    async def _prepared_sandbox(self, gold: bytes = b"") -> AsyncGenerator[Sandbox]:
        """Give a sandbox with the repair, or gold, and its build, and of the hidden tests only their helpers."""
        task = self._task
        if self._tree and not gold:
            opening = open_clean_repository(task, self._leases, await sandbox_spec(task), self._tree)
        else:
            opening = self._repaired_sandbox(gold or self._repair.patch)
        async with opening as sandbox:
            # Before the build: programs and processes that the build leaves may record what they see.
            if task.tests.build:
                helpers = await read_helpers(sandbox, task, self._plan.absent)
                if self._repair.built and not gold:
                    await restore_build(sandbox, self._repair.built)
                elif not await run_build(sandbox, task):
                    raise UnsolvedError("the build failed when it ran once more")
                for path, data in helpers.items():  # written by no program of the sandbox
                    with suppress(OSError):  # the build put a directory in its place: the tests then show the effect
                        await sandbox.write_file(path, data)
            yield sandbox

    async def _run(self, sandbox: Sandbox, jobs: Sequence[FunctionJob]) -> list[JobResult]:
        total_seconds = self._seconds * max(1, len(jobs) // 4)
        return await run_jobs(sandbox, self._task, jobs, self._seconds, total_seconds)


def _require_complete(function: TestFunction, result: JobResult) -> None:
    """Raise ``SandboxError`` for a test that was killed before its end by nothing in its sandbox."""
    if result.sigkill is not None:
        raise unexplained_kill_error(function.name, result.sigkill)
