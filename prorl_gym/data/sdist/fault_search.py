"""Finding faults that a project's own tests notice and that leave most of the project working.

The tests run in fresh sandboxes without a network, and their results are read as in grading.
"""

import random
import re
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from pydantic import BaseModel, ValidationError

from prorl_gym.data.sdist.mutations import Mutation, is_fault, propose_mutations
from prorl_gym.data.sdist.source_tree import ProjectLayout, SourceTree, pack_tree
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.repository import sandbox_spec
from prorl_gym.environments.swe.run_tests import run_tests
from prorl_gym.environments.swe.runner_reports import PASSING, Status
from prorl_gym.environments.swe.swe_row import WORKDIR, TestPlan, parse_swe_row
from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.protocol import Sandbox

_MIN_TESTS = 5
"""Fewer passing tests than this show too little about a repair."""
_TRIES_PER_FAULT = 30
"""Mutants that are tried for each fault that is wanted."""
_SLACK_SECONDS = 5.0
_MAX_FAILING_SHARE = 0.5
_MAX_SPARE = 4
_FAR_LINES = 10
_WARNINGS = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning", "pytest.PytestDeprecationWarning")

_VENDOR = ".vendor"
"""Directory of the tree that holds the requirements, unpacked; pytest does not look for tests in hidden ones."""

_FOLDER = "/tmp/.prorl-suite"
_ARCHIVE = f"{_FOLDER}/tree.tar.gz"
_PLUGIN = f"{_FOLDER}/prorl_suite_report.py"
_REPORT = f"{_FOLDER}/report.json"
_MAX_REPORT = 16 << 20
_UNPACK_SECONDS = 60.0


class _PluginReport(BaseModel):
    messages: dict[str, str] = {}
    lines: dict[str, frozenset[int]] = {}


@dataclass(frozen=True, slots=True)
class SuiteRun:
    statuses: Mapping[str, Status]
    messages: Mapping[str, str]
    """Message of the exception of each failed test, from pytest."""
    lines: Mapping[str, frozenset[int]]
    """Lines that ran, by path; only when they were traced."""
    seconds: float
    problem: str = ""
    """Why the run has no result: it timed out, or did not end."""

    @property
    def passing(self) -> frozenset[str]:
        return frozenset(name for name, status in self.statuses.items() if status in PASSING)

    @property
    def failing(self) -> frozenset[str]:
        return frozenset(name for name, status in self.statuses.items() if status in ("failed", "error"))


_MAX_MESSAGE_LINES = 5
_MAX_MESSAGE = 400
"""Characters of an exception's message that are kept."""
_LOCATIONS = (
    (re.compile(r"0x[0-9a-fA-F]{4,}"), "0x..."),
    (re.compile(r"(?:/[\w.+-]+)+/([\w.+-]+)"), r"\1"),
    (re.compile(r"""(?:File )?["']?[\w./-]+\.py["']?(?:, line \d+|:\d+)?"""), "(source)"),
    (re.compile(r"\bline \d+\b"), "line ..."),
)

RunSuite = Callable[[SourceTree, float, bool], Awaitable[SuiteRun]]
"""Runs the tests of a tree within so many seconds, tracing lines or not."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Results of the tests on the released project."""

    stable: frozenset[str]
    """Tests that passed twice."""
    flaky: tuple[str, ...]
    """Tests that passed once."""
    lines: Mapping[str, frozenset[int]]
    """Lines that the tests run, by path."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault worth a row."""

    mutations: tuple[Mutation, ...]
    """One, or two at places that need two repairs."""
    failing: tuple[str, ...]
    """Tests that fail because of it in both runs."""
    passing: tuple[str, ...]
    """Tests that pass nevertheless in both runs."""
    messages: Mapping[str, str]
    """Messages of the exceptions, without those that differed between the two runs."""


def apply_mutations(tree: SourceTree, faults: Iterable[Mutation]) -> SourceTree:
    """Return the tree with all these edits; of one file they must not overlap."""
    changed = dict(tree)
    for mutation in sorted(faults, key=lambda mutation: mutation.start, reverse=True):
        file = changed[mutation.path]
        changed[mutation.path] = replace(file, data=mutation.apply(file.data))
    return changed


async def measure_baseline(tree: SourceTree, run: RunSuite, seconds: float) -> Baseline:
    """Run the released project three times: twice for what passes, once for the lines that run.

    Raises ``ConfigError`` if its tests do not run here, or too few pass.
    """
    runs: list[SuiteRun] = []
    for _ in range(2):
        runs.append(await run(tree, seconds, False))
        if problem := runs[-1].problem:
            raise ConfigError(f"Its tests do not run in the sandbox: {problem}.", "Take another project.")
    first, second = runs
    stable = first.passing & second.passing
    if len(stable) < _MIN_TESTS:
        raise ConfigError(
            f"Only {len(stable)} of its tests pass in the sandbox.",
            "Its tests may need packages (see --with), a network or files that the distribution lacks.",
        )
    traced = await run(tree, seconds, True)
    if traced.problem or not traced.lines:
        raise ConfigError(
            f"The lines that its tests run cannot be found ({traced.problem or 'nothing was seen'}).",
            "Take a project whose tests are faster and use no tracer of their own.",
        )
    flaky = tuple(sorted(first.passing ^ second.passing))
    return Baseline(stable, flaky, traced.lines, max(first.seconds, second.seconds))


class FaultSearch:
    """Finds faults in the sources of a released project, the same ones for the same random numbers."""

    def __init__(
        self,
        tree: SourceTree,
        sources: Sequence[str],
        baseline: Baseline,
        run: RunSuite,
        rng: random.Random,
        max_failing: int,
    ) -> None:
        self._tree = tree
        self._baseline = baseline
        self._run = run
        self._max_failing = min(max_failing, int(len(baseline.stable) * _MAX_FAILING_SHARE))
        self._candidates = _candidates(tree, sources, baseline.lines, rng)
        self._files = sum(path in baseline.lines for path in sources)
        self._single_faults: list[Fault] = []
        self._tries = 0
        self.rejected: Counter[str] = Counter()
        """How many mutants were not used, by reason."""

    async def find_faults(self, wanted: int) -> AsyncIterator[Fault]:
        """Yield up to ``wanted`` faults, every second one at two places: in two files where the project has them."""
        self._tries = _TRIES_PER_FAULT * wanted
        for number in range(wanted):
            if number % 2:
                fault = await self._double()
            else:
                fault = self._single_faults.pop(0) if self._single_faults else await self._search()
            if fault is None:
                return
            yield fault

    async def _double(self) -> Fault | None:
        """Combine two faults that do not hide each other; a single one when no two can be found."""
        while len(self._single_faults) < _MAX_SPARE and (one := await self._search()) is not None:
            for other in self._single_faults:
                here, there = one.mutations[0], other.mutations[0]
                is_in_one_file = here.path == there.path
                if not is_in_one_file or (self._files == 1 and abs(here.line - there.line) > _FAR_LINES):
                    both = await self._evaluate_mutant((*other.mutations, *one.mutations))
                    if isinstance(both, Fault) and all(set(both.failing) & set(each.failing) for each in (one, other)):
                        self._single_faults.remove(other)
                        return both
            self._single_faults.append(one)
        return self._single_faults.pop(0) if self._single_faults else None

    async def _search(self) -> Fault | None:
        """Try mutants until one is usable."""
        for mutation in self._candidates:
            self._tries -= 1
            judged = await self._evaluate_mutant((mutation,))
            if isinstance(judged, Fault):
                return judged
            self.rejected[judged] += 1
            if self._tries <= 0:
                return None
        return None

    async def _evaluate_mutant(self, faults: tuple[Mutation, ...]) -> Fault | str:
        """Run the tests twice on a mutant; return it as a fault, or why it is none."""
        tree = apply_mutations(self._tree, faults)
        seconds = 3 * self._baseline.seconds + _SLACK_SECONDS
        runs: list[SuiteRun] = []
        for _ in range(2):
            runs.append(await self._run(tree, seconds, False))
            if why := self._rejection_reason(runs[-1]):
                return why
        first, second = runs
        stable = self._baseline.stable
        failing = stable & first.failing & second.failing
        if not failing:
            return "what fails is not the same twice"
        before = {name: strip_locations(first.messages.get(name, "")) for name in sorted(failing)}
        again = {name: strip_locations(text) for name, text in second.messages.items()}
        messages = {name: text for name, text in before.items() if text and again.get(name) == text}
        return Fault(faults, tuple(sorted(failing)), tuple(sorted(stable & first.passing & second.passing)), messages)

    def _rejection_reason(self, run: SuiteRun) -> str:
        if run.problem:
            return run.problem
        if self._baseline.stable - run.statuses.keys():
            return "tests are not found any more"
        failing = self._baseline.stable & run.failing
        if not failing:
            return "no test notices"
        if len(failing) > self._max_failing:
            return "too much breaks"
        if all(run.messages.get(name, "").startswith(_WARNINGS) for name in failing):
            return "only warnings"
        return ""


def _candidates(
    tree: SourceTree, sources: Sequence[str], lines: Mapping[str, frozenset[int]], rng: random.Random
) -> Iterator[Mutation]:
    """Yield mutants of lines that the tests run, alternating operators so that frequent ones do not dominate."""
    by_operator: dict[str, list[Mutation]] = {}
    for path in sources:
        covered = lines.get(path, frozenset())
        # Another copy of the file would give the repair away.
        is_copied = any(other != path and file.data == tree[path].data for other, file in tree.items())
        for mutation in propose_mutations(path, tree[path].data) if covered and not is_copied else ():
            if mutation.line in covered:
                by_operator.setdefault(mutation.operator, []).append(mutation)
    queues = [by_operator[name] for name in sorted(by_operator)]
    for queue in queues:
        rng.shuffle(queue)
    rng.shuffle(queues)
    while queues:
        queues = [queue for queue in queues if queue]
        for queue in queues:
            mutation = queue.pop()
            if is_fault(mutation, tree[mutation.path].data):
                yield mutation


def suite_command(layout: ProjectLayout, tests: Sequence[str]) -> str:
    """Return the shell command that runs tests (files or directories) from the root of the tree.

    Of the project's own configuration only the mode of pytest-asyncio is kept: the rest may need plug-ins that are not
    there. Hashes are fixed, so that the order of sets is the same in every run.
    """
    roots = [f'"$PWD/{layout.source_root}"' if layout.source_root else '"$PWD"', f'"$PWD/{_VENDOR}"']
    variables = f"PYTHONPATH={':'.join(roots)}${{PYTHONPATH:+:$PYTHONPATH}} PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1"
    options = "-rA -p no:cacheprovider -c /dev/null --rootdir=." + " -o asyncio_mode=auto" * layout.marks_async
    return f"{variables} python3 -m pytest {options} {' '.join(map(shlex.quote, tests))}"


async def start_sandbox(leases: Leases) -> Sandbox:
    """Start a sandbox of the kind that the rows will have."""
    row = {"question": "-", "tests": {"command": "-", "parser": "pytest", "fail_to_pass": ["-"]}}
    return await leases.start_clean_sandbox(await sandbox_spec(parse_swe_row(row)))


async def run_suite(leases: Leases, command: str, tree: SourceTree, seconds: float, trace: bool = False) -> SuiteRun:
    """Run the tests of a tree once, unpacked in a new sandbox; tracing is several times slower.

    Raises ``ConfigError`` if the tree cannot be unpacked, or the sandbox has no bash or python3 to run it with.
    """
    variables = {
        "PRORL_SUITE_ROOT": f"{WORKDIR}/",
        "PRORL_SUITE_REPORT": _REPORT,
        "PRORL_SUITE_TRACE": "1" if trace else "",
        "PYTHONPATH": f"{_FOLDER}${{PYTHONPATH:+:$PYTHONPATH}}",
        "PYTEST_ADDOPTS": "$PYTEST_ADDOPTS -p prorl_suite_report --tb=no",  # tracebacks take most of the time
    }
    export = "export " + " ".join(f'{name}="{value}"' for name, value in variables.items())
    plan = TestPlan(command=f"{export}; {command}", parser="pytest", fail_to_pass=(), seconds=seconds)
    sandbox = await start_sandbox(leases)
    try:
        await sandbox.write_file(_ARCHIVE, pack_tree(tree))
        await sandbox.write_file(_PLUGIN, files("prorl_gym.data.sdist").joinpath("guest_report.py").read_bytes())
        unpack = f"mkdir -p {WORKDIR} && tar --no-same-owner -xzf {_ARCHIVE} -C {WORKDIR}"
        done = await sandbox.exec(["sh", "-c", unpack], timeout=_UNPACK_SECONDS, cwd="/")
        if done.exit_code:
            said = done.stderr.decode("utf-8", "replace").strip()[:200]
            raise ConfigError(
                f"The tree cannot be unpacked in the sandbox: {said}", "Use an image with bash, tar and gzip."
            )
        results = await run_tests(sandbox, WORKDIR, plan, seconds)
        try:
            hints = _PluginReport.model_validate_json(await sandbox.read_file(_REPORT, limit=_MAX_REPORT))
        except (OSError, ValidationError):  # the project's code may have stopped the plug-in, or written there itself
            hints = _PluginReport()
    finally:
        await sandbox.close()
    if "No module named pytest" in results.log and not results.statuses:
        raise ConfigError("The sandbox has no pytest.", "Use an image with python3 3.9 or newer.")
    return SuiteRun(results.statuses, hints.messages, hints.lines, results.seconds, results.problem)


def with_requirements(tree: SourceTree, layout: ProjectLayout, requirements: SourceTree) -> SourceTree:
    """Return the tree with the imports of its tests in ``_VENDOR``, and the metadata of an installation."""
    name = f"{layout.name.replace('-', '_')}-{layout.version}.dist-info"
    vendored = {f"{_VENDOR}/{path}": file for path, file in requirements.items()}
    installed = {f"{_VENDOR}/{name}/METADATA": replace(tree["PKG-INFO"], executable=False)}
    return {**tree, **vendored, **installed}


def strip_locations(message: str) -> str:
    """Return the message of an exception without files, lines and addresses, cut to a few lines."""
    for pattern, instead in _LOCATIONS:
        message = pattern.sub(instead, message)
    lines = [line.rstrip() for line in message.split("\n") if line.strip()][:_MAX_MESSAGE_LINES]
    text = "\n".join(lines)
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
