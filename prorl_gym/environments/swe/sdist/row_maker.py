"""From a source distribution to rows: run tests, seed a fault, hide the tests that see it, prove the row by grading.

The problem statement has the symptoms of the fault without its place. The agent's tree has the test files without the
tests that must fail first.
"""

import ast
import asyncio
import base64
import random
import re
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.controls.control_plan import ControlPlan
from prorl_gym.environments.swe.controls.control_search import find_controls
from prorl_gym.environments.swe.grading import run_hidden_tests
from prorl_gym.environments.swe.repository import PYTEST, sandbox_spec
from prorl_gym.environments.swe.runner_reports import PASSING
from prorl_gym.environments.swe.sdist.fault_search import (
    Baseline,
    Fault,
    FaultSearch,
    SuiteRun,
    measure_baseline,
    run_suite,
    suite_command,
    with_requirements,
)
from prorl_gym.environments.swe.sdist.fetch import applicable_requirements, fetch_sdist, fetch_wheels
from prorl_gym.environments.swe.sdist.source_tree import ProjectLayout, SourceTree, find_layout, pack_tree, read_sdist
from prorl_gym.environments.swe.swe_row import WORKDIR, git_diff, parse_swe_row
from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.protocol import Sandbox

_MAX_ARCHIVE = 4 << 20
"""Bytes of a row's archive."""
SECONDS = 180.0
"""For one run of the tests of the released project."""
_TIME_STEPS = (150.0, 900.0, 3600.0)
_TIME_FACTOR = 15
_MAX_SYMPTOMS = 4
_PROVIDED = f"""
import importlib.metadata
for one in importlib.metadata.distributions(path=[{PYTEST!r}]):
    print(one.metadata["Name"] + "==" + one.version)
"""


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options for the rows of a project."""

    rows: int = 1
    seed: int = 0
    max_failing: int = 20
    """Tests that a fault may break."""


@dataclass(slots=True)
class ProjectReport:
    """Findings about a project, for people."""

    tests: int = 0
    """Tests that pass twice in the released project."""
    flaky: tuple[str, ...] = ()
    rejected: Counter[str] = field(default_factory=Counter[str])
    """Mutants that make no row, by reason."""
    coverage: dict[str, ControlPlan] = field(default_factory=dict[str, ControlPlan])
    """Controls by the id of the row."""


async def open_project(
    name: str, test_requirements: Sequence[str], cache: Path, index: str, leases: Leases, options: RowOptions
) -> "Project":
    """Fetch a project and what its tests need.

    Args:
        name: ``NAME==VERSION``.
        test_requirements: requirements of its tests beyond its own.
        cache: see ``fetch_sdist``.
        index: see ``fetch_sdist``.
        leases: gives the sandboxes.
        options: for the rows.

    Raises:
        ConfigError: it cannot be fetched, or is not of a kind that can be used.
        SandboxError: a sandbox could not be started or was lost.
    """
    released = read_sdist(await asyncio.to_thread(fetch_sdist, name, cache, index))
    layout = find_layout(released)
    python = await _python_version(leases)
    wanted = applicable_requirements([*layout.requires, *test_requirements], python)
    # Left out, because Python would compile them anew in each sandbox.
    provided = (await _query_python(leases, _PROVIDED)).split() if wanted else []
    wheels = await asyncio.to_thread(fetch_wheels, wanted, python, index, provided)
    return Project(released, layout, wheels, leases, options)


class Project:
    """A project unpacked in memory, with a way to run its tests.

    Args:
        released: files of its source distribution.
        layout: of these files.
        requirements: what its tests import, unpacked; see ``fetch_wheels``.
        leases: gives the sandboxes.
        options: for the rows.
    """

    def __init__(
        self, released: SourceTree, layout: ProjectLayout, requirements: SourceTree, leases: Leases, options: RowOptions
    ) -> None:
        self.layout = layout
        self._tree = with_requirements(released, self.layout, requirements)
        self._leases = leases
        self._options = options
        self._command = suite_command(self.layout, self.layout.tests)
        self.outcome = ProjectReport()

    async def make_rows(self) -> AsyncIterator[dict[str, Any]]:
        """Yield rows, the same ones for the same distribution, requirements and seed.

        Raises:
            ConfigError: the project's tests do not run here, or the project cannot be used.
            SandboxError: a sandbox could not be started or was lost.
        """
        await self._raise_if_installed()
        baseline = await measure_baseline(self._tree, self._run, SECONDS)
        self.outcome.tests, self.outcome.flaky = len(baseline.stable), baseline.flaky
        rng = random.Random(f"{self.layout.name}=={self.layout.version}:{self._options.seed}")
        search = FaultSearch(self._tree, self.layout.sources, baseline, self._run, rng, self._options.max_failing)
        self.outcome.rejected = search.rejected
        made = 0
        unchecked: list[dict[str, Any]] = []
        # Search for more than are wanted: the last checks refuse some.
        async for fault in search.find_faults(2 * self._options.rows):
            row = await self._row(fault, baseline)
            if isinstance(row, str):
                search.rejected[row] += 1
            elif not _plan(row).has_checks:
                unchecked.append(row)
            else:
                yield self._numbered(row, made)
                made += 1
            if made == self._options.rows:
                break
        missing = self._options.rows - made
        for row in unchecked[:missing]:  # and named in the report
            yield self._numbered(row, made)
            made += 1
        if left := unchecked[missing:]:
            search.rejected["no test that shows the fault has a control"] += len(left)

    def _numbered(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        name = f"{self.layout.name}-{self.layout.version}-s{self._options.seed}-{number}"
        self.outcome.coverage[name] = _plan(row)
        return {"id": name, **row}

    async def _raise_if_installed(self) -> None:
        """Refuse a project that is installed in the sandbox: the answer could be read there."""
        prefix = f"{self.layout.source_root}/" if self.layout.source_root else ""
        names = {path.removeprefix(prefix).split("/")[0].removesuffix(".py") for path in self.layout.sources}
        look = f"import importlib.util as u; print(*(n for n in {sorted(names)!r} if u.find_spec(n)))"
        if found := (await _query_python(self._leases, look)).split():
            raise ConfigError(
                f"The sandbox has {', '.join(found)} already, so that the answer could be read there.",
                "Take another project.",
            )

    async def _start(self) -> Sandbox:
        return await _start(self._leases)

    async def _run(self, tree: SourceTree, seconds: float, trace: bool) -> SuiteRun:
        return await run_suite(self._start, WORKDIR, tree, self._command, seconds, trace=trace)

    async def _row(self, fault: Fault, baseline: Baseline) -> dict[str, Any] | str:
        """Return the row of a fault without an id, or why it makes none."""
        broken = fault.apply(self._tree)
        tests = _texts(broken, self.layout.test_files)
        agents = _with_tests(broken, self.layout, hide_tests(tests, fault.failing))
        command = self._visible_command(agents)
        if command:
            seen = await run_suite(self._start, WORKDIR, agents, command, _seconds(baseline))
            if seen.problem or baseline.stable & seen.failing:
                return "the tests that remain do not run without the hidden ones"
        question = write_statement(self.layout.name, command, fault.failing, fault.messages)
        if quotes_source(question, _changed_lines(self._tree, broken)):
            return "the statement would quote the fault"
        archive = pack_tree(agents)
        if len(archive) > _MAX_ARCHIVE:
            raise ConfigError(f"The tree of {self.layout.name} is too large for a row.", "Take a smaller project.")
        row: dict[str, Any] = {
            "question": question,
            "archive": base64.b64encode(archive).decode(),
            "tests": {
                "files": tests,
                "command": self._command,
                "parser": "pytest",
                "fail_to_pass": list(fault.failing),
                "pass_to_pass": list(fault.passing),
                "seconds": _seconds(baseline),
            },
            "patch": _patch(broken, self._tree, fault),
        }
        if not await self._is_proven(row):
            return "grading finds other tests that fail or pass"
        plan = await find_controls(parse_swe_row(row), self._leases, random.Random(question))
        row["tests"]["controls"] = plan.model_dump(mode="json", exclude_defaults=True)
        return row

    def _visible_command(self, tree: SourceTree) -> str:
        left = [test for test in self.layout.tests if any(p == test or _tests_in(p, test) for p in tree)]
        return suite_command(self.layout, left) if left else ""

    async def _is_proven(self, row: Mapping[str, Any]) -> bool:
        """Whether grading agrees: the right tests fail before, and all pass after the gold patch."""
        task = parse_swe_row(row)
        plan = task.tests
        before = await run_hidden_tests(task, b"", self._leases, plan.seconds)
        after = await run_hidden_tests(task, task.gold_patch.encode(), self._leases, plan.seconds)
        if before.problem or after.problem:
            return False
        fails = all(before.statuses.get(name) in ("failed", "error") for name in plan.fail_to_pass)
        stays = all(before.statuses.get(name) in PASSING for name in plan.pass_to_pass)
        return fails and stays and all(after.statuses.get(n) in PASSING for n in plan.fail_to_pass + plan.pass_to_pass)


async def _start(leases: Leases) -> Sandbox:
    """Start a sandbox of the kind that the rows will have."""
    row = {"question": "-", "tests": {"command": "-", "parser": "pytest", "fail_to_pass": ["-"]}}
    return await leases.start_clean_sandbox(await sandbox_spec(parse_swe_row(row)))


async def _python_version(leases: Leases) -> str:
    """Return the version of the sandbox's Python, as in ``3.11``."""
    return (await _query_python(leases, "import sys; print('%d.%d' % sys.version_info[:2])")).strip()


async def _query_python(leases: Leases, program: str) -> str:
    sandbox = await _start(leases)
    try:
        done = await sandbox.exec(["python3", "-c", program], timeout=60.0, cwd="/")
    finally:
        await sandbox.close()
    if done.exit_code:
        raise ConfigError("The sandbox has no python3 that works.", "Use an image with python3 3.9 or newer.")
    return done.stdout.decode("utf-8", "replace")


def _plan(row: Mapping[str, Any]) -> ControlPlan:
    return ControlPlan.model_validate(row["tests"]["controls"])


def _seconds(baseline: Baseline) -> float:
    """Return the time limit of the tests, in steps so coarse that the machine's speed rarely changes a row."""
    return next((limit for limit in _TIME_STEPS if _TIME_FACTOR * baseline.seconds <= limit), _TIME_STEPS[-1])


def _texts(tree: SourceTree, paths: tuple[str, ...]) -> dict[str, str]:
    try:
        return {path: tree[path].data.decode("utf-8") for path in paths}
    except UnicodeDecodeError:
        raise ConfigError("A test file of the project is not UTF-8.", "Take another project.") from None


def _with_tests(tree: SourceTree, layout: ProjectLayout, visible: Mapping[str, str]) -> SourceTree:
    kept = {path: file for path, file in tree.items() if path not in layout.test_files}
    return {**kept, **{path: replace(tree[path], data=text.encode()) for path, text in visible.items()}}


def _tests_in(path: str, directory: str) -> bool:
    return path.startswith(f"{directory}/") and bool(re.fullmatch(r"(test_.*|.*_test)\.py", path.rpartition("/")[2]))


def _patch(broken: SourceTree, released: SourceTree, fault: Fault) -> str:
    paths = sorted({mutation.path for mutation in fault.mutations})
    return "".join(git_diff(path, broken[path].data.decode(), released[path].data.decode()) for path in paths)


def _changed_lines(released: SourceTree, broken: SourceTree) -> list[str]:
    """Return lines that only one of the trees has."""
    found: list[str] = []
    for path, file in released.items():
        if file.data != broken[path].data:
            old, new = (tree[path].data.decode().split("\n") for tree in (released, broken))
            found += sorted(set(old) ^ set(new))
    return found


def hide_tests(files: Mapping[str, str], tests: Iterable[str]) -> dict[str, str]:
    """Return test files without some tests, as the agent may see them.

    A test that a class inherits is cut where it is written, in whatever file that is. A file that cannot be cut, or
    that holds no test any more, is left out; ``__init__.py`` and ``conftest.py`` stay, others may need them.

    Args:
        files: all test files by path.
        tests: ids as pytest has them.
    """
    defined = {path: _defined(source) for path, source in files.items()}
    cuts: dict[str, set[str]] = {path: set() for path in files}
    whole: set[str] = set()
    for test in tests:
        path, _, name = test.partition("[")[0].partition("::")
        if name in defined.get(path, ()):
            cuts[path].add(name)
            continue
        bare = name.rpartition("::")[2]
        places = [(file, other) for file in files for other in defined[file] if other.rpartition("::")[2] == bare]
        for file, other in places:
            cuts[file].add(other)
        if not places:  # not defined in a file
            whole.add(path)
    visible: dict[str, str] = {}
    for path, source in files.items():
        rest = _without_tests(source, cuts[path]) if cuts[path] else source
        if rest is not None and path not in whole and (not cuts[path] or _is_kept(path) or _defined(rest)):
            visible[path] = rest
    return visible


def _without_tests(source: str, hidden: Collection[str]) -> str | None:
    """Return a file without some functions and methods, everything else as it was.

    Args:
        source: the file.
        hidden: names below the file, as pytest joins them: ``test_one``, ``TestGroup::test_two``.

    Returns:
        The rest, or ``None`` when the file cannot be cut.
    """
    if "\r" in source or "\f" in source:
        return None  # Python may count lines differently
    tree = _parse(source)
    if tree is None:
        return None
    gone = _removed_spans(tree.body, "", hidden)
    rest = "\n".join(_without_lines(source.split("\n"), gone))
    return rest if _parse(rest) is not None else None


def _defined(source: str) -> set[str]:
    """Names of the functions and methods that may be tests."""
    tree = _parse(source)
    return set(_functions(tree.body, "")) if tree is not None else set()


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield f"{prefix}{node.name}"
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}::")


def _is_kept(path: str) -> bool:
    return path.rpartition("/")[2] in ("__init__.py", "conftest.py")


def _parse(source: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return None


def _removed_spans(body: list[ast.stmt], prefix: str, hidden: Collection[str]) -> list[tuple[int, int]]:
    """Return first and last lines of removed definitions; a class without contents is removed, too."""
    gone: list[tuple[int, int]] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and f"{prefix}{node.name}" in hidden:
            gone.append(_span(node))
        elif isinstance(node, ast.ClassDef):
            inner = _removed_spans(node.body, f"{prefix}{node.name}::", hidden)
            gone += [_span(node)] if inner and len(inner) == len(_effective_statements(node.body)) else inner
    return gone


def _effective_statements(body: list[ast.stmt]) -> list[ast.stmt]:
    return [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]


def _span(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> tuple[int, int]:
    assert node.end_lineno is not None
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.end_lineno


def _without_lines(lines: list[str], gone: list[tuple[int, int]]) -> list[str]:
    """Leave out lines, and the blank ones before them."""
    left_out: set[int] = set()
    for first, last in gone:
        left_out |= set(range(first - 1, last))
        above = first - 2
        while above >= 0 and not lines[above].strip():
            left_out.add(above)
            above -= 1
    return [line for number, line in enumerate(lines) if number not in left_out]


def write_statement(name: str, command: str, failing: Sequence[str], messages: Mapping[str, str]) -> str:
    """Return the problem statement of a fault; the same for the same arguments.

    Args:
        name: of the project.
        command: how the tests run that the agent can see; empty when there are none.
        failing: ids of the tests that fail.
        messages: of their exceptions, where the same each time; see ``strip_locations``.
    """
    symptoms = [_symptom(test, tests, messages) for test, tests in _by_function(failing).items()]
    shown = sorted(symptoms, key=lambda symptom: symptom.count("\n") == 0)[:_MAX_SYMPTOMS]  # those with a message first
    more = len(symptoms) - len(shown)
    lines = [
        f"Something in {name} has stopped working as it should. What was seen:",
        "",
        *shown,
        *([f"- and {more} more of this kind"] if more else []),
        "",
        f"Find the cause in the source of {name} and repair it there, without changing what works. The behaviour above "
        "is judged by tests that you do not have.",
        *(["", "The tests in the repository run with:", "", f"    {command}"] if command else []),
    ]
    return "\n".join(lines)


def quotes_source(statement: str, lines: Sequence[str]) -> bool:
    """Whether a statement quotes one of these lines of source; short ones (``else:``, ``return x``) do not count."""
    squeezed = _collapse_whitespace(statement)
    return any(len(line) >= 16 and line in squeezed for line in map(_collapse_whitespace, lines))


def _by_function(failing: Sequence[str]) -> dict[str, list[str]]:
    """Group the cases of a parametrised test."""
    found: dict[str, list[str]] = {}
    for test in failing:
        found.setdefault(test.partition("[")[0], []).append(test)
    return found


def _symptom(function: str, tests: Sequence[str], messages: Mapping[str, str]) -> str:
    """Return a list item: the tested behaviour in words, and the first message."""
    *_, last = function.split("::")
    words = re.sub(r"^[Tt]est_?", "", last)
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", words).replace("_", " ").strip() or "basic use"
    cases = f" ({len(tests)} cases)" if len(tests) > 1 else ""
    message = next((messages[test] for test in tests if messages.get(test)), "")
    return f"- {words}{cases}" + "".join(f"\n      {line}" for line in message.split("\n") if message)


def _collapse_whitespace(text: str) -> str:
    return "".join(text.split())
