"""Judging a repair by controls: it must pass the tests and fail their wrong versions, without knowing which it runs.

Run C decides: each process has a sandbox of its own, one test function under its own name, and a body that is drawn
among the real one and its controls. Code that does not compute what the test asks for can only guess, by whatever rule,
which of these bodies is right: it must accept the real one and refuse each control that is drawn. With k of them the
best rule does so with a chance of about 1/(e k), in each function. Where processes share a sandbox they can compare
what they saw; all bodies are equally frequent, so that this tells nothing, and the chance is 1/(k+1). A few other tests
run in the same way, half of them with a control, so that a patch that breaks them cannot hide it in run A alone. Run B
adds many controls in one run, for tests that run C does not reach; it never decides about originals. Sealed values need
no chance: what is expected stays outside.
"""

import asyncio
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prorl_gym.environments.killed import killed_unseen
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.controls.built import build_again, unpack_built
from prorl_gym.environments.swe.controls.jobs import Job, Ran, run_jobs
from prorl_gym.environments.swe.controls.layout import place_helpers, put_back, read_helpers
from prorl_gym.environments.swe.controls.plan import PROCESSES, ControlPlan, Edit, Runner, TestFunction
from prorl_gym.environments.swe.controls.proof import run_twins
from prorl_gym.environments.swe.controls.sealing import agrees, sealed
from prorl_gym.environments.swe.controls.source import reduce
from prorl_gym.environments.swe.controls.twins import unfailed
from prorl_gym.environments.swe.ready import repaired
from prorl_gym.environments.swe.task import SweTask
from prorl_gym.records import Score
from prorl_gym.sandbox.protocol import Sandbox

WHY = "tests tampered with"
AT_ONCE = 3
"""Sandboxes of one grading."""
ALLOWED_SECONDS = 5.0
"""That the checks may take, or half of the tests' own time when that is more."""
_FEWEST = 3
"""Sandboxes of run C, however long one takes to prepare."""
_LEAST_SECONDS = 30.0
_BYSTANDERS = 6
"""Functions of ``pass_to_pass`` that run alone, half of them with a control."""
_TWINS = 12
"""Functions of run B: those of ``fail_to_pass`` first."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What run A took, in seconds of wall clock."""

    prepared: float
    """Sandbox, repository, patch, and what the build left."""
    tests: float


@dataclass(frozen=True, slots=True)
class Repair:
    """What is judged."""

    task: SweTask
    patch: bytes
    built: bytes = b""
    """tar.gz of what the build made, from ``/``."""


class _Tampered(Exception):
    """A control did not fail, or a test that passed in run A does not pass alone."""


async def check(repair: Repair, plan: ControlPlan, leases: Leases, cost: Cost) -> Mapping[str, str]:
    """Return what to add to the detail of a repair that passed run A; ``why`` is in it when it fails the checks.

    Raises:
        SandboxError: a sandbox could not be started or was lost.
    """
    return await _Checks(repair, plan, leases, cost).run()


def with_controls(score: Score, found: Mapping[str, str]) -> Score:
    """Return the score after the checks."""
    detail = {**found, **score.detail} if "why" in found else {**score.detail, **found}
    return Score(reward=0.0 if "why" in found else score.reward, detail=detail)


@dataclass(frozen=True, slots=True)
class _Process:
    function: TestFunction
    job: Job
    real: bool


class _Checks:
    def __init__(self, repair: Repair, plan: ControlPlan, leases: Leases, cost: Cost) -> None:
        self._repair = repair
        self._task = repair.task
        self._plan = plan
        self._leases = leases
        self._cost = cost
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._seconds = min(self._task.tests.seconds, max(_LEAST_SECONDS, 5 * cost.tests))
        self._rng = random.Random(secrets.randbits(128))
        self._texts = {**self._task.tests.files, **plan.texts}
        self._may_repeat = True

    async def run(self) -> Mapping[str, str]:
        processes = await asyncio.to_thread(self._processes)
        found = self._detail(processes)
        try:
            await self._check_all(processes)
        except _Tampered as error:
            return {"why": WHY, "check": str(error), **found}
        return found

    async def _check_all(self, processes: Sequence[_Process]) -> None:
        """Run all checks; the first that fails ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                if self._plan.sealed:
                    group.create_task(self._check_sealed())
                for share in self._shares(processes):
                    group.create_task(self._check_share(share))
                if self._plan.twins or self._plan.bystanders:
                    group.create_task(self._check_others())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _detail(self, processes: Sequence[_Process]) -> dict[str, str]:
        plan = self._plan
        found = {
            "sealed": f"{len(plan.sealed)}/{plan.total}",
            "controls": f"{len(plan.controlled)}/{plan.total}",
        }
        if processes:
            real = sum(each.real for each in processes)
            own = sum(each.function.runner == "own" for each in processes)
            found["run_c"] = (
                f"{real} real + {len(processes) - real} control (own runner {own}, pytest {len(processes) - own})"
            )
        return found

    # Run C

    def _processes(self) -> list[_Process]:
        """Draw functions and bodies."""
        drawn = draw_bodies(self._plan.controlled, self._rng)
        return [self._process(function, edit) for function, edit in drawn]

    def _process(self, function: TestFunction, edit: Edit | None) -> _Process:
        source = self._texts[function.path]
        text = reduce(edit.apply(source) if edit else source, function.defined)
        return _Process(function, Job(function.path, text, function.name), edit is None)

    def _shares(self, processes: Sequence[_Process]) -> list[Sequence[_Process]]:
        """Divide processes among sandboxes: each has its own, unless that costs too much."""
        allowed = max(ALLOWED_SECONDS, self._cost.tests / 2)
        affordable = int(allowed * AT_ONCE / max(self._cost.prepared, 0.001))
        count = min(len(processes), max(affordable, _FEWEST))
        return [processes[start::count] for start in range(count)]

    async def _check_share(self, share: Sequence[_Process]) -> None:
        async with self._slots:
            for process, ran in zip(share, await self._in_one_sandbox(share), strict=True):
                await self._decide(process, ran)

    async def _decide(self, process: _Process, ran: Ran) -> None:
        if process.real and not ran.passed and self._may_repeat:
            # A test that is slow or flaky now and then. One more try in a grading adds little to a guess,
            # since code cannot recognise it in a fresh sandbox.
            self._may_repeat = False
            ran = (await self._in_one_sandbox([process]))[0]
        if process.real:
            _must_have_ended(process.function, ran)
        if ran.passed is not process.real:
            what = "does not pass alone" if process.real else "passes with a wrong value"
            raise _Tampered(f"{process.function.name} {what}")

    async def _in_one_sandbox(self, share: Sequence[_Process]) -> list[Ran]:
        async with repaired(self._task, self._repair.patch, self._leases) as ready:
            await self._prepare(ready.sandbox)
            return [(await self._run(ready.sandbox, each.function.runner, [each.job]))[0] for each in share]

    # Sealed values

    async def _check_sealed(self) -> None:
        emit = f"_{secrets.token_hex(4)}"
        functions = self._plan.sealed
        async with self._slots, repaired(self._task, self._repair.patch, self._leases) as ready:
            await self._prepare(ready.sandbox)
            for runner in ("own", "pytest"):
                asked = [each for each in functions if each.runner == runner]
                jobs = [await asyncio.to_thread(self._sealed_job, each, emit) for each in asked]
                for function, ran in zip(asked, await self._run(ready.sandbox, runner, jobs), strict=True):
                    _check_values(function, ran)

    def _sealed_job(self, function: TestFunction, emit: str) -> Job:
        text = sealed(self._texts[function.path], function.seals, emit)
        return Job(function.path, reduce(text, function.defined), function.name, emit)

    # Other tests, and run B

    async def _check_others(self) -> None:
        async with self._slots, repaired(self._task, self._repair.patch, self._leases) as ready:
            await self._prepare(ready.sandbox)
            await self._check_bystanders(ready.sandbox)
            await self._check_twins(ready.sandbox)

    async def _check_bystanders(self, sandbox: Sandbox) -> None:
        """Run other tests alone: they may have passed in run A only because of what the patch does to the runner."""
        found = self._plan.bystanders
        drawn = self._rng.sample(found, min(len(found), _BYSTANDERS))
        reals = (len(drawn) + self._rng.randrange(2)) // 2
        processes = [
            self._process(each, None if number < reals else self._rng.choice(each.variants))
            for number, each in enumerate(drawn)
        ]
        for runner in ("own", "pytest"):
            asked = [each for each in processes if each.function.runner == runner]
            self._rng.shuffle(asked)
            for each, ran in zip(asked, await self._run(sandbox, runner, [one.job for one in asked]), strict=True):
                await self._decide(each, ran)

    async def _check_twins(self, sandbox: Sandbox) -> None:
        functions = list(self._plan.functions)
        self._rng.shuffle(functions)
        others = list(self._plan.others)
        self._rng.shuffle(others)
        chosen = [each for each in (*functions, *others) if each in self._plan.twins][:_TWINS]
        if not chosen:
            return
        controls, statuses = await run_twins(sandbox, self._task, self._texts, chosen, self._rng, self._seconds)
        if wrong := unfailed(statuses, controls):
            raise _Tampered(f"{controls[wrong[0]][0].rpartition('/')[2]} does not fail with a wrong value")

    async def _prepare(self, sandbox: Sandbox) -> None:
        # Before the build: what it leaves, programs and processes, is the patch's and may keep what it sees.
        if complaint := await place_helpers(sandbox, self._task, self._plan.absent):
            raise _Tampered(complaint)
        if not self._task.tests.build:
            return
        helpers = await read_helpers(sandbox, self._task, self._plan.absent)
        if self._repair.built:
            await unpack_built(sandbox, self._repair.built)
        else:
            await build_again(sandbox, self._task)
        for path, data in helpers.items():
            await put_back(sandbox, path, data)

    async def _run(self, sandbox: Sandbox, runner: Runner, jobs: Sequence[Job]) -> list[Ran]:
        if not jobs:
            return []
        together = self._seconds * max(1, len(jobs) // 4)
        return await run_jobs(sandbox, self._task, runner, jobs, self._seconds, together)


def draw_bodies(functions: Sequence[TestFunction], rng: random.Random) -> list[tuple[TestFunction, Edit | None]]:
    """Return which function each process runs, and with which control; ``None``: as it is.

    Each function that has two processes or more gets both the real body and a control. All else is drawn evenly among
    the real body and the controls.
    """
    functions = rng.sample(functions, min(len(functions), PROCESSES))
    drawn: list[tuple[TestFunction, Edit | None]] = []
    for number, function in enumerate(functions):
        count = len(range(number, PROCESSES, len(functions)))
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


def _must_have_ended(function: TestFunction, ran: Ran) -> None:
    """Tell a test that does not pass from one that was not let to its end.

    Raises:
        SandboxError: it was killed, and nothing in its sandbox did that.
    """
    if ran.sigkill is not None:
        raise killed_unseen(function.name, ran.sigkill)


def _check_values(function: TestFunction, ran: Ran) -> None:
    _must_have_ended(function, ran)
    for number, seal in enumerate(function.seals):
        emitted = ran.emitted.get(number, ())
        agreed = agrees(seal, emitted)
        if agreed is None and function.variants:
            continue  # a right repair may give a value of another kind; run C looks at this function as well
        if not agreed:
            raise _Tampered(f"{function.name} does not give the expected value")
    if not ran.passed:
        raise _Tampered(f"{function.name} does not pass alone")
