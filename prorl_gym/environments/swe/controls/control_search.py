"""Finds the controls of a row, proven by running them with the gold patch and without it.

A control is a hidden test with one wrong value, which a right repair fails. A test gets controls when it passes alone,
twice, with the gold patch. Its proposals are tried place by place; one counts when it fails with the gold patch, and
without the patch runs at least as far as the test itself does. What cannot be tried alone (it depends on the order, is
flaky, lacks a fixture of another file) has no control.
"""

import ast
import asyncio
import hashlib
import random
import secrets
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prorl_gym.deadlines import hold_uncharged
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.controls import sealed_values
from prorl_gym.environments.swe.controls.control_mutations import propose_controls
from prorl_gym.environments.swe.controls.control_plan import (
    MAX_CONTROL_RUNS,
    ControlPlan,
    Edit,
    SealedValue,
    TestFunction,
)
from prorl_gym.environments.swe.controls.control_runs import (
    NOT_RUN,
    FunctionJob,
    JobResult,
    make_job,
    run_interleaved,
    run_jobs,
)
from prorl_gym.environments.swe.controls.parsed_tests import TestFile, parse_tests
from prorl_gym.environments.swe.patch_filter import diff_lines, paths_in_diff
from prorl_gym.environments.swe.repaired_sandbox import (
    UnsolvedError,
    open_repaired_sandbox,
    place_helpers,
    place_tests,
    run_build,
)
from prorl_gym.environments.swe.swe_row import SweTask
from prorl_gym.errors import FailureKind, TaskError
from prorl_gym.sandbox.protocol import Sandbox

_SUPPORTED_PARSERS = ("pytest", "unittest")
"""Runners for whose tests there are controls."""
_MAX_FUNCTIONS = 24
"""Functions of ``fail_to_pass`` that are searched, sampled where there are more."""
_MAX_OTHERS = 10
"""Functions of ``pass_to_pass`` that are searched."""
_MAX_OTHER_CONTROLS = 2
"""Controls of each of these."""
_MAX_PLACES = 6
"""Places of a function at which controls are tried."""
_MAX_CONTROLS = 4
"""Controls of a function, after which no further place is tried."""
_JOB_SECONDS = 60.0
_MAX_TEST_FILE = 4 << 20
_HELPER_NAMES = ("conftest.py", "__init__.py")
"""Files that other test files need, even if there are tests in them."""
_SETUP_NAMES = (
    *("setup_module", "setup_function", "teardown_module", "teardown_function"),
    *("setup_method", "setup_class", "teardown_method", "setup", "setUp", "setUpClass"),
)


class ControlPlanCache:
    """Controls of rows that bring none, proven once for each row of a service."""

    def __init__(self, capacity: int = 4096) -> None:
        self._plans: dict[str, ControlPlan] = {}
        self._searches: dict[str, asyncio.Lock] = {}
        self._capacity = capacity

    async def get(self, task: SweTask, leases: Leases) -> ControlPlan | None:
        """Return a row's controls, or ``None`` when it can have none. Concurrent calls for one row share a search.

        It is charged to the deadline of the call that searches; the others wait uncharged.
        """
        if task.tests.controls is not None:
            return task.tests.controls
        if task.tests.parser not in _SUPPORTED_PARSERS or not task.gold_patch.strip():
            return None
        key = identify_row(task)
        lock = self._searches.setdefault(key, asyncio.Lock())
        try:
            async with hold_uncharged(lock):
                if key not in self._plans:
                    self._plans[key] = await find_controls(task, leases)
                    while len(self._plans) > self._capacity:
                        del self._plans[next(iter(self._plans))]
                return self._plans[key]
        finally:
            if not lock.locked():
                self._searches.pop(key, None)


def identify_row(task: SweTask) -> str:
    """Return a key that rows share only when the same tests run on the same repository."""
    repository = task.sha256 or hashlib.sha256(task.archive.encode()).hexdigest()
    identity = (task.image, task.workdir, task.base_commit, repository, task.source, task.gold_patch, task.tests)
    return hashlib.sha256(repr(identity).encode()).hexdigest()


async def find_controls(task: SweTask, leases: Leases, rng: random.Random | None = None) -> ControlPlan:
    """Return the controls of a row with a gold patch, proven in two sandboxes, one with the patch and one without.

    ``rng`` chooses among similar changes. Raises ``SandboxError``: a sandbox could not be started or was lost;
    ``TaskError`` (BAD_ROW): the gold patch does not apply.
    """
    rng = rng or random.Random(secrets.randbits(64))
    try:
        async with (
            open_repaired_sandbox(task, task.gold_patch.encode(), leases) as (repaired, _),
            open_repaired_sandbox(task, b"", leases) as (broken, _),
        ):
            return await _ControlSearch(task, repaired, broken, rng).build_plan()
    except UnsolvedError as why:
        what = f"swe row {task.id or 'without id'}: its gold patch is useless: {why}."
        raise TaskError(FailureKind.BAD_ROW, what, "Take the patch from `git diff` at the row's base commit.") from None


@dataclass(slots=True, eq=False)
class _Candidate:
    """A test function whose controls are searched, and what was found."""

    function: TestFunction
    file: TestFile
    proposals: Iterator[tuple[Edit, ...]]
    """Controls to try, those of one place together."""
    passes_alone: bool = False
    with_repair: JobResult = NOT_RUN
    """Traced run of the original with the gold patch."""
    without_repair: JobResult = NOT_RUN
    controls: tuple[Edit, ...] = ()
    seals: tuple[SealedValue, ...] = ()

    def to_function(self, *, alone: bool = False) -> TestFunction:
        return self.function.model_copy(update={"variants": self.controls, "seals": self.seals, "alone": alone})


class _ControlSearch:
    def __init__(self, task: SweTask, repaired: Sandbox, broken: Sandbox, rng: random.Random) -> None:
        self._task = task
        self._repaired = repaired
        self._broken = broken
        self._gold_lines = _changed_lines(task.gold_patch)
        self._rng = rng
        self._emit = f"_{rng.getrandbits(32):08x}"

    async def build_plan(self) -> ControlPlan:
        task = self._task
        no_controls = ControlPlan(unknown=task.tests.fail_to_pass)
        if task.tests.build and not await run_build(self._repaired, task):
            return no_controls
        if await place_tests(self._repaired, task):
            return no_controls
        texts = await _read_tests(self._repaired, task)
        files = await asyncio.to_thread(parse_tests, texts)
        absent = tuple(
            path for path, file in files.items() if file.tests and path.rpartition("/")[2] not in _HELPER_NAMES
        )
        if task.tests.build:  # it may fail without the repair: then no test runs
            await run_build(self._broken, task)
        for sandbox in (self._repaired, self._broken):
            if await place_helpers(sandbox, task, absent):
                return no_controls
        located = {test: _find_test_function(test, task, files) for test in task.tests.fail_to_pass}
        named = list(dict.fromkeys(found for found in located.values() if found is not None))
        functions = await self._search_functions(files, named)
        others = await self._sample_others(files, named)
        functions, others = await self._mark_interleavable(files, functions, others)
        paths = {each.path for each in (*functions, *_locate_others(task, files, named))}
        paths &= texts.keys() - task.tests.files.keys()
        return ControlPlan(
            functions=tuple(functions),
            others=tuple(others),
            absent=absent,
            texts={path: texts[path] for path in paths},
            unknown=tuple(dict.fromkeys(test.partition("[")[0] for test, found in located.items() if found is None)),
        )

    async def _search_functions(self, files: Mapping[str, TestFile], named: list[TestFunction]) -> list[TestFunction]:
        """Return the functions of ``fail_to_pass`` with their controls and sealed values."""
        if len(named) > _MAX_FUNCTIONS:
            self._rng.shuffle(named)
        # Grading draws no more controls of a function than it has processes; each costs a run of its test to prove.
        limit = max(2, MAX_CONTROL_RUNS // max(1, len(named)))
        candidates = [self._new_candidate(each, files, limit) for each in named[:_MAX_FUNCTIONS]]
        await self._run_alone(candidates)
        standalone = [each for each in candidates if each.passes_alone]
        await self._trace_originals(standalone)
        await self._find_controls(standalone, min(_MAX_CONTROLS, limit))
        await self._find_seals(standalone, sealed_values.equality_helpers(files.values()))
        return [*(each.to_function() for each in candidates), *named[_MAX_FUNCTIONS:]]

    def _new_candidate(self, function: TestFunction, files: Mapping[str, TestFile], limit: int) -> _Candidate:
        file, defined = files[function.path], function.defined
        function = _with_likely_runner(function, self._task, file)
        return _Candidate(function, file, (edits[:limit] for edits in propose_controls(file, defined, self._rng)))

    async def _run_alone(self, candidates: Sequence[_Candidate]) -> None:
        """Find out which functions pass alone, twice, by our own runner, or else by pytest."""
        for runner in ("own", "pytest"):
            tried = [each for each in candidates if not each.passes_alone and each.function.runner == runner]
            jobs = [self._job(each, each.file.source) for each in tried]
            once = await self._run(self._repaired, jobs)
            again = await self._run(self._repaired, jobs)
            for candidate, first, second in zip(tried, once, again, strict=True):
                candidate.passes_alone = first.passed and second.passed
                if runner == "own" and not candidate.passes_alone and self._task.tests.parser == "pytest":
                    candidate.function = candidate.function.model_copy(update={"runner": "pytest"})

    async def _trace_originals(self, candidates: Sequence[_Candidate]) -> None:
        """Trace how far each function runs with and without the gold patch; put places near its end first."""
        jobs = [self._job(each, each.file.source, traced=True) for each in candidates]
        with_repair, without_repair = await self._run_in_both(jobs)
        for candidate, repaired, broken in zip(candidates, with_repair, without_repair, strict=True):
            candidate.with_repair, candidate.without_repair = repaired, broken
            lines = {line for point in broken.stop_points for line in point.lines}
            near: list[tuple[Edit, ...]] = []
            far: list[tuple[Edit, ...]] = []
            for edits in candidate.proposals:
                (near if _is_near_lines(candidate.file, edits[0], lines) else far).append(edits)
            candidate.proposals = iter([*near, *far])

    async def _find_controls(self, candidates: Sequence[_Candidate], enough: int) -> None:
        """Collect controls of each function, from further places while it has fewer than ``enough``."""
        for _ in range(_MAX_PLACES):
            open_candidates = [each for each in candidates if len(each.controls) < enough]
            places = [(each, edits) for each in open_candidates if (edits := next(each.proposals, None))]
            # The others at a place are worth a run only where the first one holds.
            proven = await self._proven([(candidate, edits[0]) for candidate, edits in places])
            rest = [
                (candidate, edit)
                for candidate, edits in places
                if (candidate, edits[0]) in proven
                for edit in edits[1:]
            ]
            for candidate, edit in [*proven, *await self._proven(rest)]:
                candidate.controls = (*candidate.controls, edit)

    async def _proven(self, proposals: Sequence[tuple[_Candidate, Edit]]) -> list[tuple[_Candidate, Edit]]:
        """Return the proposals that are controls: they fail with the gold patch, and because of what it changes."""
        jobs = [self._job(each, edit.apply(each.file.source), traced=True) for each, edit in proposals]
        with_repair, without_repair = await self._run_in_both(jobs)
        return [
            (candidate, edit)
            for (candidate, edit), repaired, broken in zip(proposals, with_repair, without_repair, strict=True)
            if not repaired.passed and _needs_repair(candidate, repaired, broken)
        ]

    async def _find_seals(self, candidates: Sequence[_Candidate], helpers: Collection[str]) -> None:
        """Keep sealed values that are as expected twice; if that fails, only those whose literal has no name."""
        found = {
            each: sealed_values.find_sealed_values(each.file, each.function.defined, helpers) for each in candidates
        }
        await self._keep_seals(found)
        without_names = {
            candidate: tuple(seal for seal in seals if not seal.blanks)
            for candidate, seals in found.items()
            if not candidate.seals and any(seal.blanks for seal in seals)
        }
        await self._keep_seals(without_names)

    async def _keep_seals(self, found: Mapping[_Candidate, tuple[SealedValue, ...]]) -> None:
        found = {candidate: seals for candidate, seals in found.items() if seals}
        jobs = [
            self._job(each, sealed_values.seal_source(each.file.source, found[each], self._emit), self._emit)
            for each in found
        ]
        twice = await self._run(self._repaired, [*jobs, *jobs])
        broken = await self._run(self._broken, jobs)
        for number, (candidate, seals) in enumerate(found.items()):
            first, second = twice[number], twice[len(jobs) + number]
            are_good = [
                bool(first.emitted.get(site))
                and first.emitted[site] == second.emitted.get(site)
                and sealed_values.matches_expected(seal, first.emitted[site])
                for site, seal in enumerate(seals)
            ]
            good = sealed_values.valid_seals(seals, are_good)
            # Values that the repository gives without the repair show nothing.
            needs_repair = not all(
                sealed_values.matches_expected(seals[site], broken[number].emitted.get(site, ())) for site in good
            )
            if first.passed and second.passed and needs_repair:
                candidate.seals = tuple(seals[site] for site in good)

    async def _sample_others(self, files: Mapping[str, TestFile], taken: Sequence[TestFunction]) -> list[TestFunction]:
        """Return functions of ``pass_to_pass`` with controls; ``alone`` where they pass alone and their controls fail.

        Functions that do not pass alone keep the proposals of one place, for interleaved files.
        """
        others = _locate_others(self._task, files, taken)
        self._rng.shuffle(others)
        paths = {each.path for each in taken}
        near = [each for each in others if each.path in paths][: _MAX_OTHERS // 2]
        chosen = [*near, *(each for each in others if each not in near)][:_MAX_OTHERS]
        candidates = [self._new_candidate(each, files, _MAX_OTHER_CONTROLS) for each in chosen]
        await self._run_alone(candidates)
        tried: list[tuple[_Candidate, Edit]] = []
        for candidate in candidates:
            edits = next(candidate.proposals, ())
            if candidate.passes_alone:
                tried += [(candidate, edit) for edit in edits]
            else:
                candidate.controls = edits
        jobs = [self._job(each, edit.apply(each.file.source)) for each, edit in tried]
        for (candidate, edit), result in zip(tried, await self._run(self._repaired, jobs), strict=True):
            if not result.passed:
                candidate.controls = (*candidate.controls, edit)
        return [each.to_function(alone=each.passes_alone) for each in candidates if each.controls]

    async def _mark_interleavable(
        self, files: Mapping[str, TestFile], functions: Sequence[TestFunction], others: Sequence[TestFunction]
    ) -> tuple[list[TestFunction], list[TestFunction]]:
        """Return the functions with ``beside`` set where all their controls fail in an interleaved file."""
        paths = {each.path for each in functions}
        near = [each for each in others if each.path in paths]
        bad = await self._passing_interleaved(files, [*functions, *near])
        if all(each.test_id in bad for each in functions):  # perhaps because of the others
            near = []
            bad = await self._passing_interleaved(files, functions)
        return (
            [each.model_copy(update={"beside": each.test_id not in bad}) for each in functions],
            [each.model_copy(update={"beside": each in near and each.test_id not in bad}) for each in others],
        )

    async def _passing_interleaved(
        self, files: Mapping[str, TestFile], functions: Sequence[TestFunction]
    ) -> Collection[str]:
        """Return the ids of tests of which a control does not fail in an interleaved file."""
        controlled = [each for each in functions if each.variants]
        if not controlled:
            return ()
        texts = {path: file.source for path, file in files.items()}
        seconds = self._task.tests.seconds
        return await run_interleaved(self._repaired, self._task, texts, controlled, self._rng, seconds)

    def _job(self, candidate: _Candidate, source: str, emit: str = "", *, traced: bool = False) -> FunctionJob:
        function, gold_lines = candidate.function, self._gold_lines if traced else None
        try:
            return make_job(function, source, emit, gold_lines)
        except ValueError:  # the edit broke the syntax: it fails for that alone, and is no control
            return FunctionJob(function.path, source, function.name, function.runner, emit, gold_lines)

    async def _run_in_both(self, jobs: Sequence[FunctionJob]) -> tuple[list[JobResult], list[JobResult]]:
        """Return the results with the gold patch, and without."""
        return await asyncio.gather(self._run(self._repaired, jobs), self._run(self._broken, jobs))

    async def _run(self, sandbox: Sandbox, jobs: Sequence[FunctionJob]) -> list[JobResult]:
        seconds = min(self._task.tests.seconds, _JOB_SECONDS)
        return await run_jobs(sandbox, self._task, jobs, seconds, seconds * 10)


async def _read_tests(sandbox: Sandbox, task: SweTask) -> dict[str, str]:
    """Return the texts of the hidden Python files, and of other files that ``fail_to_pass`` names, by path.

    The hidden tests must be in place, and no code of the repository may have run since.
    """
    texts = {path: text for path, text in task.tests.files.items() if path.endswith(".py")}
    named = [name.partition("::")[0] for name in task.tests.fail_to_pass if "::" in name]
    for path in dict.fromkeys([*paths_in_diff(task.tests.patch), *named]):
        if path.endswith(".py") and path not in texts:
            try:
                texts[path] = (await sandbox.read_file(f"{task.workdir}/{path}", limit=_MAX_TEST_FILE)).decode()
            except (OSError, UnicodeDecodeError):
                continue
    return texts


def _find_test_function(test: str, task: SweTask, files: Mapping[str, TestFile]) -> TestFunction | None:
    """Return the function of a test that a row names in its runner's way; ``None`` when there is not exactly one."""
    bare = test.partition("[")[0]
    if task.tests.parser == "unittest":
        parts = bare.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            found = _locate("/".join(parts[:cut]) + ".py", "::".join(parts[cut:]), files)
            if found is not None:
                return found
        return None
    path, _, name = bare.partition("::")
    if name:
        return _locate(path, name, files)
    name = bare.replace(".", "::")  # R2E-Gym has no files in its names
    matches = [found for path in files if (found := _locate(path, name, files))]
    return matches[0] if len(matches) == 1 else None


def _locate(path: str, name: str, files: Mapping[str, TestFile]) -> TestFunction | None:
    """Return the function of this name in a file; the path may start at a directory below the working directory."""
    paths = [path] if path in files else [each for each in files if each.endswith(f"/{path}")]
    if len(paths) != 1 or (defined := files[paths[0]].find_definition(name)) is None:
        return None
    return TestFunction(path=paths[0], name=name, defined=defined)


def find_others(task: SweTask, plan: ControlPlan) -> list[TestFunction]:
    """Return all functions of ``pass_to_pass`` whose text is known, whether or not they pass alone. Blocks."""
    files = parse_tests(
        {**{path: text for path, text in task.tests.files.items() if path.endswith(".py")}, **plan.texts}
    )
    taken = {each.test_id for each in plan.functions}
    others = [each for each in _locate_others(task, files, ()) if each.test_id not in taken]
    return [_with_likely_runner(each, task, files[each.path]) for each in others]


def _locate_others(task: SweTask, files: Mapping[str, TestFile], taken: Collection[TestFunction]) -> list[TestFunction]:
    found = [_find_test_function(test, task, files) for test in task.tests.pass_to_pass]
    return [each for each in dict.fromkeys(found) if each is not None and each not in taken]


def _with_likely_runner(function: TestFunction, task: SweTask, file: TestFile) -> TestFunction:
    is_own = task.tests.parser == "unittest" or _may_run_without_pytest(file, function.defined)
    return function.model_copy(update={"runner": "own"}) if is_own else function


def _needs_repair(candidate: _Candidate, control: JobResult, without_repair: JobResult) -> bool:
    """Whether a control is decided by the repair and by nothing before it.

    A control that fails in code that was right before the repair also fails for a patch that cheats only from the
    place of the fault on. So without the repair a control must run at least as far as the original.
    """
    original = candidate.without_repair.stop_points
    if not original:  # it does not even begin: then some line of the repair must have run before the control fails
        runs_repair = any(point.ran_repair for point in candidate.with_repair.stop_points)
        return not runs_repair or any(point.ran_repair for point in control.stop_points if point.failed)
    if len(without_repair.stop_points) != len(original):
        return False
    pairs = zip(without_repair.stop_points, original, strict=True)
    return all(not end.failed or (other.failed and end.steps >= other.steps) for end, other in pairs)


def _changed_lines(patch: str) -> Mapping[str, Sequence[int]]:
    """Return the lines that a trusted diff adds, by path, and for removed lines those around them."""
    by_path: dict[str, set[int]] = {}
    lines: set[int] = set()
    for text, number in diff_lines(patch):
        if number is None and text.startswith("+++ "):
            lines = by_path.setdefault(text[4:].split("\t")[0].removeprefix("b/"), set())
        elif number is not None and text.startswith("-"):
            lines.update((number - 1, number))
        elif number is not None and text.startswith("+"):
            lines.add(number)
    return {path: sorted(numbers) for path, numbers in by_path.items()}


def _is_near_lines(file: TestFile, edit: Edit, lines: Container[int]) -> bool:
    """Whether the innermost statement around an edit has one of these lines."""
    line = file.source.count("\n", 0, edit.start) + 1
    spans = [(node.lineno, node.end_lineno or line) for node in ast.walk(file.tree) if isinstance(node, ast.stmt)]
    around = [(last - first, first, last) for first, last in spans if first <= line <= last]
    _, first, last = min(around, default=(0, line, line))
    return any(number in lines for number in range(first, last + 1))


def _may_run_without_pytest(file: TestFile, name: str) -> bool:
    """Whether a function may be callable without pytest; a run has to confirm it."""
    if any(word in file.source for word in ("autouse", "usefixtures")):
        return False
    node, owner = file.functions[name].node, file.functions[name].owner
    if owner is not None and owner.bases:  # perhaps a TestCase
        return True
    arguments = node.args
    required = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - len(arguments.kw_defaults)
    prefix = name[: -len(node.name)]
    is_plain = (
        isinstance(node, ast.FunctionDef)
        and not node.decorator_list
        and not any(f"{prefix}{each}" in file.functions for each in _SETUP_NAMES)
    )
    if owner is None:
        return is_plain and required == len(arguments.defaults)
    return is_plain and not owner.decorator_list and required == 1
