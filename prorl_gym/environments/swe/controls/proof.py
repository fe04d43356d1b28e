"""Which controls a row has, proven by running them on the gold patch."""

import ast
import asyncio
import hashlib
import random
import re
import secrets
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.controls.jobs import NOT_RUN, Job, Ran, run_jobs
from prorl_gym.environments.swe.controls.layout import absent_files, find, parse_tests, place_helpers, read_tests
from prorl_gym.environments.swe.controls.plan import PROCESSES, ControlPlan, Edit, Runner, Seal, TestFunction
from prorl_gym.environments.swe.controls.sealing import agrees, equalities, kept, sealed, seals
from prorl_gym.environments.swe.controls.source import TestFile, reduce
from prorl_gym.environments.swe.controls.twins import make_twins, unfailed
from prorl_gym.environments.swe.controls.wrong import versions
from prorl_gym.environments.swe.parsers import Status
from prorl_gym.environments.swe.placing import place_tests
from prorl_gym.environments.swe.ready import Unsolved, repaired
from prorl_gym.environments.swe.run_tests import CommandRun, run_tests
from prorl_gym.environments.swe.task import SweTask
from prorl_gym.sandbox.protocol import Sandbox

PARSERS = ("pytest", "unittest")
"""Runners for whose tests there are controls."""
MAX_FUNCTIONS = 24
"""Of ``fail_to_pass``, chosen by chance where there are more."""
MAX_OTHERS = 10
_OF_OTHERS = 2
"""Controls of each."""
_PLACES = 6
"""Places of a function at which a control is tried."""
_ENOUGH = 4
"""Controls of a function, after which no further place is tried."""
_JOB_SECONDS = 60.0
_SETUPS = (
    *("setup_module", "setup_function", "teardown_module", "teardown_function"),
    *("setup_method", "setup_class", "teardown_method", "setup", "setUp", "setUpClass"),
)


def may_have_controls(task: SweTask) -> bool:
    """Whether controls could be made for a row."""
    return task.tests.parser in PARSERS and bool(task.gold_patch.strip())


async def prove(task: SweTask, leases: Leases, rng: random.Random | None = None) -> ControlPlan:
    """Return the controls that hold on the gold patch.

    A test has one when it passes alone, twice, and fails with the control. Whatever else happens (it depends on the
    order, it is flaky, a fixture of another file is missing) it has none.

    Args:
        task: a row with a gold patch.
        leases: gives one sandbox.
        rng: chooses among what looks alike; fresh by default.

    Raises:
        SandboxError: the sandbox could not be started or was lost.
    """
    rng = rng or random.Random(secrets.randbits(64))
    try:
        async with repaired(task, task.gold_patch.encode(), leases) as gold, repaired(task, b"", leases) as broken:
            return await _Proof(task, gold.sandbox, broken.sandbox, rng).plan()
    except Unsolved:
        return ControlPlan(unknown=task.tests.fail_to_pass)


@dataclass(slots=True, eq=False)
class _Candidate:
    """What is known about one function so far."""

    function: TestFunction
    file: TestFile
    groups: Iterator[tuple[Edit, ...]]
    passes: bool = False
    with_repair: Ran = NOT_RUN
    without: Ran = NOT_RUN
    """How far it comes with the gold patch, and without."""
    group: tuple[Edit, ...] = ()
    tried: int = 0
    seals: tuple[Seal, ...] = field(default=())


class _Proof:
    def __init__(self, task: SweTask, sandbox: Sandbox, broken: Sandbox, rng: random.Random) -> None:
        self._task = task
        self._sandbox = sandbox
        self._broken = broken
        self._lines = changed_lines(task.gold_patch)
        self._rng = rng
        self._emit = f"_{rng.getrandbits(32):08x}"
        self._enough = _ENOUGH

    async def plan(self) -> ControlPlan:
        task = self._task
        if task.tests.build and not await self._build(self._sandbox):
            return ControlPlan(unknown=task.tests.fail_to_pass)
        if await place_tests(self._sandbox, task):
            return ControlPlan(unknown=task.tests.fail_to_pass)
        texts = await read_tests(self._sandbox, task)
        files = await parse_tests(texts)
        names, unknown = self._names(files)
        absent = absent_files(files)
        if await place_helpers(self._sandbox, task, absent) or not await self._prepare_broken(absent):
            return ControlPlan(unknown=task.tests.fail_to_pass)
        # Of a function no more controls are drawn than it gets processes: each costs a run of its test to prove.
        most = max(2, PROCESSES // max(1, len(names)))
        self._enough = min(_ENOUGH, most)
        candidates = [self._candidate(path, name, files[path], most) for path, name in names[:MAX_FUNCTIONS]]
        await self._run_alone(candidates)
        await self._trace([each for each in candidates if each.passes])
        await self._find_controls([each for each in candidates if each.passes])
        await self._find_seals([each for each in candidates if each.passes], equalities(files.values()))
        functions = [
            each.function.model_copy(update={"variants": each.group, "seals": each.seals}) for each in candidates
        ]
        functions += [TestFunction(path=path, name=name, defined=name) for path, name in names[MAX_FUNCTIONS:]]
        others = await self._others(files, names)
        beside = [each for each in others if each.path in {path for path, _ in names}]
        passed = await self._passing_twins(files, [*functions, *beside])
        if all(_named(each, passed) for each in functions):  # perhaps because of the others
            beside = []
            passed = await self._passing_twins(files, functions)
        functions = [each.model_copy(update={"beside": not _named(each, passed)}) for each in functions]
        others = [each.model_copy(update={"beside": each in beside and not _named(each, passed)}) for each in others]
        brought = {path: text for path, text in texts.items() if path not in task.tests.files}
        return ControlPlan(
            functions=tuple(functions),
            others=tuple(others),
            absent=absent,
            texts={path: brought[path] for path in {each.path for each in (*functions, *others)} & brought.keys()},
            unknown=unknown,
        )

    async def _prepare_broken(self, absent: tuple[str, ...]) -> bool:
        """Prepare the sandbox without the repair; a build that fails there leaves tests that do not begin."""
        if self._task.tests.build:
            await self._build(self._broken)
        return not await place_tests(self._broken, self._task) and not await place_helpers(
            self._broken, self._task, absent
        )

    async def _build(self, sandbox: Sandbox) -> bool:
        run = CommandRun(sandbox, self._task.workdir, self._task.tests.seconds)
        await run.prepare()
        return (await run.command(self._task.tests.build)).exit_code == 0

    def _names(self, files: Mapping[str, TestFile]) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
        found: dict[tuple[str, str], None] = {}
        unknown: dict[str, None] = {}
        for test in self._task.tests.fail_to_pass:
            if (named := find(test, self._task, files)) is None:
                unknown[test.partition("[")[0]] = None
            else:
                found[named.path, named.name] = None
        names = list(found)
        if len(names) > MAX_FUNCTIONS:
            self._rng.shuffle(names)
        return names, tuple(unknown)

    def _candidate(self, path: str, name: str, file: TestFile, most: int) -> _Candidate:
        defined = file.find(name)
        assert defined is not None
        own = self._task.tests.parser == "unittest" or may_call(file, defined)
        function = TestFunction(path=path, name=name, defined=defined, runner="own" if own else "pytest")
        groups = (group[:most] for group in versions(file, defined, self._rng))
        return _Candidate(function, file, groups)

    async def _run_alone(self, candidates: Sequence[_Candidate]) -> None:
        """Find out which functions pass alone, twice, by our own runner, or else by pytest."""
        for runner in ("own", "pytest"):
            asked = [each for each in candidates if not each.passes and each.function.runner == runner]
            jobs = [self._job(each, each.file.source) for each in asked]
            as_graded = await self._run(runner, jobs, warm=False)
            again = await self._run(runner, jobs)
            for each, one, two in zip(asked, as_graded, again, strict=True):
                each.passes = one.passed and two.passed
                if runner == "own" and not each.passes and self._task.tests.parser == "pytest":
                    each.function = each.function.model_copy(update={"runner": "pytest"})

    async def _trace(self, candidates: Sequence[_Candidate]) -> None:
        """Find out how far each function comes with the gold patch and without, and try places near its end first."""
        for runner in ("own", "pytest"):
            asked = [each for each in candidates if each.function.runner == runner]
            jobs = [self._job(each, each.file.source, traced=True) for each in asked]
            with_repair, without = await self._run_in_both(runner, jobs)
            for each, each.with_repair, each.without in zip(asked, with_repair, without, strict=True):
                lines = {line for end in each.without.ends for line in end.lines}
                found = list(each.groups)
                found.sort(key=lambda group, each=each, lines=lines: not _is_at(each.file, group[0], lines))
                each.groups = iter(found)

    async def _find_controls(self, candidates: Sequence[_Candidate]) -> None:
        """Collect controls of each function, of another place while there are few: each body has to be judged anew."""
        for _ in range(_PLACES):
            few = [each for each in candidates if len(each.group) < self._enough]
            groups = [(each, group) for each in few if (group := next(each.groups, None))]
            good = await self._try_controls([(each, group[0]) for each, group in groups])
            more = [(each, edit) for each, group in groups if (each, group[0]) in good for edit in group[1:]]
            for each, edit in [*good, *await self._try_controls(more)]:
                each.group = (*each.group, edit)

    async def _try_controls(self, tried: Sequence[tuple[_Candidate, Edit]]) -> list[tuple[_Candidate, Edit]]:
        """Return those that hold."""
        good: list[tuple[_Candidate, Edit]] = []
        for runner in ("own", "pytest"):
            now = [(each, edit) for each, edit in tried if each.function.runner == runner]
            jobs = [self._job(each, edit.apply(each.file.source), traced=True) for each, edit in now]
            with_repair, without = await self._run_in_both(runner, jobs)
            for (each, edit), ran, bare in zip(now, with_repair, without, strict=True):
                if not ran.passed and _needs_repair(each, ran, bare):
                    good.append((each, edit))
        return good

    async def _find_seals(self, candidates: Sequence[_Candidate], helpers: Collection[str]) -> None:
        """Keep sealed values that are as expected, and the same twice; without those behind names if need be."""
        for are_named in (True, False):
            left = [each for each in candidates if not each.seals]
            found = {each: seals(each.file, each.function.defined, helpers) for each in left}
            if not are_named:
                found = {
                    each: tuple(seal for seal in sites if not seal.blanks)
                    for each, sites in found.items()
                    if any(seal.blanks for seal in sites)
                }
            await self._keep_seals({each: sites for each, sites in found.items() if sites})

    async def _keep_seals(self, found: Mapping[_Candidate, tuple[Seal, ...]]) -> None:
        for runner in ("own", "pytest"):
            asked = [(each, sites) for each, sites in found.items() if each.function.runner == runner]
            jobs = [
                self._job(each, sealed(each.file.source, sites, self._emit), self._emit)
                for each, sites in asked
                for _ in range(2)
            ]
            ran = await self._run(runner, jobs)
            without = await self._run(runner, jobs[::2], self._broken)
            for number, (each, sites) in enumerate(asked):
                one, two = ran[2 * number : 2 * number + 2]
                are_good = [
                    bool(one.emitted.get(at))
                    and one.emitted[at] == two.emitted.get(at)
                    and bool(agrees(seal, one.emitted[at]))
                    for at, seal in enumerate(sites)
                ]
                good = kept(sites, are_good)
                # Values that the repository gives as it is show nothing.
                needs = not all(agrees(sites[at], without[number].emitted.get(at, ())) for at in good)
                if one.passed and two.passed and needs:
                    each.seals = tuple(sites[at] for at in good)

    async def _others(self, files: Mapping[str, TestFile], taken: Sequence[tuple[str, str]]) -> list[TestFunction]:
        """Choose functions of ``pass_to_pass``, and find out which pass alone and fail there with a control."""
        named = [find(test, self._task, files) for test in self._task.tests.pass_to_pass]
        names = [each for each in dict.fromkeys(named) if each is not None and (each.path, each.name) not in taken]
        self._rng.shuffle(names)
        paths = {path for path, _ in taken}
        near = [each for each in names if each.path in paths][: MAX_OTHERS // 2]
        chosen = [*near, *(each for each in names if each not in near)][:MAX_OTHERS]
        candidates = [self._candidate(each.path, each.name, files[each.path], _OF_OTHERS) for each in chosen]
        await self._run_alone(candidates)
        for each in candidates:
            each.group = next(each.groups, ())
        for runner in ("own", "pytest"):
            asked = [each for each in candidates if each.passes and each.function.runner == runner]
            tried = [(each, edit) for each in asked for edit in each.group]
            ran = await self._run(runner, [self._job(each, edit.apply(each.file.source)) for each, edit in tried])
            passing = {(id(each), edit) for (each, edit), one in zip(tried, ran, strict=True) if one.passed}
            for each in asked:
                each.group = tuple(edit for edit in each.group if (id(each), edit) not in passing)
        return [
            each.function.model_copy(update={"variants": each.group, "alone": each.passes})
            for each in candidates
            if each.group
        ]

    async def _passing_twins(
        self, files: Mapping[str, TestFile], functions: Sequence[TestFunction]
    ) -> Mapping[str, Collection[Edit]]:
        """Return the controls, by function, that do not fail in files that hold originals and controls side by side."""
        texts = {path: file.source for path, file in files.items()}
        controlled = [each for each in functions if each.variants]
        if not controlled:
            return {}
        seconds = self._task.tests.seconds
        controls, statuses = await run_twins(self._sandbox, self._task, texts, controlled, self._rng, seconds)
        found: dict[str, list[Edit]] = {}
        for name in unfailed(statuses, controls):
            test, edit = controls[name]
            found.setdefault(test, []).append(edit)
        return found

    def _job(self, candidate: _Candidate, source: str, emit: str = "", *, traced: bool = False) -> Job:
        function = candidate.function
        try:
            text = reduce(source, function.defined)
        except ValueError:  # the edit made a text that is no program: it fails, as a control has to, but is none
            text = source
        return Job(function.path, text, function.name, emit, self._lines if traced else None)

    async def _run_in_both(self, runner: Runner, jobs: Sequence[Job]) -> tuple[list[Ran], list[Ran]]:
        return await asyncio.gather(self._run(runner, jobs), self._run(runner, jobs, self._broken))

    async def _run(
        self, runner: Runner, jobs: Sequence[Job], sandbox: Sandbox | None = None, *, warm: bool = True
    ) -> list[Ran]:
        if not jobs:
            return []
        seconds = min(self._task.tests.seconds, _JOB_SECONDS)
        place = sandbox or self._sandbox
        return await run_jobs(place, self._task, runner, jobs, seconds, seconds * 10, warm=warm)


def _needs_repair(candidate: _Candidate, control: Ran, without: Ran) -> bool:
    """Whether a control is decided by the repair and by nothing before it.

    One that fails where the original still passes, on code that was right all along, is failed honestly by a patch
    that pays itself from the place of the fault on. So without the repair a control must come at least as far.
    """
    real = candidate.without.ends
    if not real:  # it does not even begin: then some line of the repair must have run before the control fails
        needs = any(end.repair for end in candidate.with_repair.ends)
        return not needs or any(end.repair for end in control.ends if end.failed)
    if len(without.ends) != len(real):
        return False
    pairs = zip(without.ends, real, strict=True)
    return all(not end.failed or (other.failed and end.steps >= other.steps) for end, other in pairs)


def changed_lines(patch: str) -> Mapping[str, Sequence[int]]:
    """Return the lines that a trusted diff adds, by path; for lines that it removes, those around them."""
    found: dict[str, set[int]] = {}
    lines: set[int] = set()
    number = 0
    for text in patch.split("\n"):
        if text.startswith("+++ "):
            lines = found.setdefault(text[4:].split("\t")[0].removeprefix("b/"), set())
        elif hunk := re.match(r"@@ -\d+(?:,\d+)? \+(\d+)", text):
            number = int(hunk.group(1))
        elif text.startswith("-") and not text.startswith("--- "):
            lines.update((number - 1, number))
        elif text.startswith("+"):
            lines.add(number)
            number += 1
        elif text.startswith(" "):
            number += 1
    return {path: sorted(numbers) for path, numbers in found.items()}


def _is_at(file: TestFile, edit: Edit, lines: Container[int]) -> bool:
    """Whether an edit is in a statement in which one of these lines is."""
    at = file.source.count("\n", 0, edit.start) + 1
    spans = [(node.lineno, node.end_lineno or at) for node in ast.walk(file.tree) if isinstance(node, ast.stmt)]
    around = [(last - first, first, last) for first, last in spans if first <= at <= last]
    _, first, last = min(around, default=(0, at, at))
    return any(line in lines for line in range(first, last + 1))


def _named(function: TestFunction, tests: Container[str]) -> bool:
    return f"{function.path}::{function.name}" in tests


async def run_twins(
    sandbox: Sandbox,
    task: SweTask,
    texts: Mapping[str, str],
    functions: Sequence[TestFunction],
    rng: random.Random,
    seconds: float,
) -> tuple[Mapping[str, tuple[str, Edit]], Mapping[str, Status]]:
    """Run controls beside originals by the row's command.

    Returns:
        What each control's name means, and the status of each test that was reported.

    Raises:
        SandboxError: the sandbox is lost.
    """
    controls: dict[str, tuple[str, Edit]] = {}
    for path in dict.fromkeys(each.path for each in functions):
        twins = await asyncio.to_thread(make_twins, texts[path], [e for e in functions if e.path == path], rng)
        controls.update(twins.controls)
        await sandbox.write_file(f"{task.workdir}/{path}", twins.text.encode())
    quiet = 'export PYTEST_ADDOPTS="$PYTEST_ADDOPTS --tb=no" PYTHONDONTWRITEBYTECODE=1\n'
    plan = replace(task.tests, build="", command=quiet + task.tests.command)
    results = await run_tests(sandbox, task.workdir, plan, seconds)
    return controls, results.statuses


def may_call(file: TestFile, name: str) -> bool:
    """Whether a function looks as if it could be called without pytest; a run has to show whether it can."""
    found = file.functions[name]
    arguments = found.node.args
    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - len(arguments.kw_defaults)
    if any(part in file.source for part in ("autouse", "usefixtures")):
        return False
    if found.owner is None:
        set_up = any(each in file.functions for each in _SETUPS)
        plain = isinstance(found.node, ast.FunctionDef) and not found.node.decorator_list
        return plain and not set_up and not count - len(arguments.defaults)
    if found.owner.bases:  # perhaps a TestCase
        return True
    prefix = name.rpartition("::")[0]
    set_up = any(f"{prefix}::{each}" in file.functions for each in _SETUPS)
    bare = not found.node.decorator_list and not found.owner.decorator_list
    return bare and not set_up and count == 1 and isinstance(found.node, ast.FunctionDef)


class Proofs:
    """Controls of rows that bring none, proven once for each row of a service."""

    def __init__(self, capacity: int = 4096) -> None:
        self._plans: dict[str, ControlPlan] = {}
        self._proving: dict[str, asyncio.Lock] = {}
        self._capacity = capacity

    async def get(self, task: SweTask, leases: Leases) -> ControlPlan | None:
        """Return a row's controls; concurrent calls for one row share a proof. ``None``: the row can have none.

        Raises:
            SandboxError: see ``prove``.
        """
        if task.tests.controls is not None:
            return task.tests.controls
        if not may_have_controls(task):
            return None
        key = digest(task)
        lock = self._proving.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                if key not in self._plans:
                    self._plans[key] = await prove(task, leases)
                    while len(self._plans) > self._capacity:
                        del self._plans[next(iter(self._plans))]
                return self._plans[key]
        finally:
            if not lock.locked():
                self._proving.pop(key, None)


def digest(task: SweTask) -> str:
    """Return what two rows share only when the same tests run on the same repository."""
    repository = task.repository.sha256 or hashlib.sha256(task.repository.archive.encode()).hexdigest()
    identity = (task.image, task.workdir, task.base_commit, repository, task.source, task.gold_patch, task.tests)
    return hashlib.sha256(repr(identity).encode()).hexdigest()
