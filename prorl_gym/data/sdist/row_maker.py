"""From a source distribution to rows: run tests, seed a fault, hide the tests that see it, prove the row by grading.

The problem statement has the symptoms of the fault without its place. The agent's tree has the test files without the
tests that must fail first.
"""

import ast
import asyncio
import base64
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from prorl_gym.data.sdist.fault_search import (
    Baseline,
    Fault,
    FaultSearch,
    apply_mutations,
    measure_baseline,
    run_suite,
    start_sandbox,
    suite_command,
    with_requirements,
)
from prorl_gym.data.sdist.source_tree import (
    TEST_MODULE,
    ProjectLayout,
    SourceTree,
    applicable_requirements,
    fetch_sdist,
    fetch_wheels,
    find_layout,
    pack_tree,
    read_sdist,
)
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.controls.control_plan import ControlPlan
from prorl_gym.environments.swe.controls.control_search import find_controls
from prorl_gym.environments.swe.controls.parsed_tests import TestFile, parse_tests
from prorl_gym.environments.swe.grading import run_hidden_tests
from prorl_gym.environments.swe.repository import PYTEST
from prorl_gym.environments.swe.runner_reports import PASSING
from prorl_gym.environments.swe.swe_row import git_diff, parse_swe_row
from prorl_gym.errors import ConfigError

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
    """Fetch a project (``NAME==VERSION``), its requirements, and further ones of its tests.

    Raises ``ConfigError`` if it cannot be fetched, or is not of a kind that can be used. Raises ``SandboxError`` if a
    sandbox could not be started or was lost.
    """
    released = read_sdist(await asyncio.to_thread(fetch_sdist, name, cache, index))
    layout = find_layout(released)
    python = (await _query_python(leases, "import sys; print('%d.%d' % sys.version_info[:2])")).strip()
    wanted = applicable_requirements([*layout.requires, *test_requirements], python)
    # Left out, because Python would compile them again in each sandbox.
    provided = (await _query_python(leases, _PROVIDED)).split() if wanted else []
    wheels = await asyncio.to_thread(fetch_wheels, wanted, python, index, provided)
    return Project(released, layout, wheels, leases, options)


class Project:
    """A project unpacked in memory, with a way to run its tests."""

    def __init__(
        self, released: SourceTree, layout: ProjectLayout, requirements: SourceTree, leases: Leases, options: RowOptions
    ) -> None:
        self.layout = layout
        self._tree = with_requirements(released, self.layout, requirements)
        self._leases = leases
        self._options = options
        self._command = suite_command(self.layout, self.layout.tests)
        self._run = partial(run_suite, leases, self._command)
        self.outcome = ProjectReport()

    async def make_rows(self) -> AsyncIterator[dict[str, Any]]:
        """Yield rows, the same ones for the same distribution, requirements and seed.

        Raises ``ConfigError`` if the project's tests do not run here, or the project cannot be used. Raises
        ``SandboxError`` if a sandbox could not be started or was lost.
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
            elif not ((plan := _plan(row)).controlled or plan.sealed):
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

    async def _row(self, fault: Fault, baseline: Baseline) -> dict[str, Any] | str:
        """Return the row of a fault without an id, or why it makes none."""
        broken = apply_mutations(self._tree, fault.mutations)
        try:
            tests = {path: broken[path].data.decode("utf-8") for path in self.layout.test_files}
        except UnicodeDecodeError:
            raise ConfigError("A test file of the project is not UTF-8.", "Take another project.") from None
        visible = hide_tests(tests, fault.failing)
        agents = {path: file for path, file in broken.items() if path not in self.layout.test_files}
        agents |= {path: replace(broken[path], data=text.encode()) for path, text in visible.items()}
        modules = [path for path in agents if TEST_MODULE.fullmatch(path.rpartition("/")[2])]
        left = [
            test for test in self.layout.tests if test in agents or any(one.startswith(f"{test}/") for one in modules)
        ]
        command = suite_command(self.layout, left) if left else ""
        # In steps so coarse that the machine's speed rarely changes a row.
        limits = (limit for limit in _TIME_STEPS if _TIME_FACTOR * baseline.seconds <= limit)
        seconds = next(limits, _TIME_STEPS[-1])
        if command:
            seen = await run_suite(self._leases, command, agents, seconds)
            if seen.problem or baseline.stable & seen.failing:
                return "the tests that remain do not run without the hidden ones"
        question = write_statement(self.layout.name, command, fault.failing, fault.messages)
        changed = sorted({mutation.path for mutation in fault.mutations})
        texts = [(path, broken[path].data.decode(), self._tree[path].data.decode()) for path in changed]
        if any(quotes_source(question, set(old.split("\n")) ^ set(new.split("\n"))) for _, old, new in texts):
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
                "seconds": seconds,
            },
            "patch": "".join(git_diff(path, old, new) for path, old, new in texts),
        }
        if not await self._is_proven(row):
            return "grading finds other tests that fail or pass"
        plan = await find_controls(parse_swe_row(row), self._leases, random.Random(question))
        row["tests"]["controls"] = plan.model_dump(mode="json", exclude_defaults=True)
        return row

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


async def _query_python(leases: Leases, program: str) -> str:
    sandbox = await start_sandbox(leases)
    try:
        done = await sandbox.exec(["python3", "-c", program], timeout=60.0, cwd="/")
    finally:
        await sandbox.close()
    if done.exit_code:
        raise ConfigError("The sandbox has no python3 that works.", "Use an image with python3 3.9 or newer.")
    return done.stdout.decode("utf-8", "replace")


def _plan(row: Mapping[str, Any]) -> ControlPlan:
    return ControlPlan.model_validate(row["tests"]["controls"])


def hide_tests(files: Mapping[str, str], tests: Iterable[str]) -> dict[str, str]:
    """Return test files without some tests, as the agent may see them.

    ``tests`` are ids as pytest has them. A test that a class inherits is cut where it is written, in whatever file that
    is. A file that cannot be cut, or that holds no test any more, is left out; ``__init__.py`` and ``conftest.py``
    stay, others may need them.
    """
    parsed = parse_tests(files)
    cuts: dict[str, set[str]] = {path: set() for path in files}
    whole: set[str] = set()
    for test in tests:
        path, _, name = test.partition("[")[0].partition("::")
        bare = name.rpartition("::")[2]
        if path in parsed and name in parsed[path].tests:
            places = [(path, name)]
        else:
            places = [
                (path, each) for path in parsed for each in parsed[path].tests if each.rpartition("::")[2] == bare
            ]
        if not places or path not in parsed:
            whole.add(path)
        for place, defined in places:
            cuts[place].add(defined)
    visible = {path: source for path, source in files.items() if path not in whole and not cuts[path]}
    rest = {path: _without_tests(parsed[path], names) for path, names in cuts.items() if names and path not in whole}
    for path, file in parse_tests(rest).items():
        if file.tests or path.rpartition("/")[2] in ("__init__.py", "conftest.py"):
            visible[path] = file.source
    return visible


def _without_tests(file: TestFile, hidden: Collection[str]) -> str:
    """Return a file without some functions and methods, and without classes that have no others."""
    gone: list[ast.stmt] = [found.node for name, found in file.all_functions if name in hidden]
    for owner in reversed(list(ast.walk(file.tree))):  # inner classes first
        if isinstance(owner, ast.ClassDef) and any(one in gone for one in owner.body):
            rest = [one for one in owner.body if one not in gone]
            if all(isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) for one in rest):
                gone.append(owner)
    lines = file.source.split("\n")
    left_out: set[int] = set()
    for node in gone:
        first, last = (file.source.count("\n", 0, place) for place in file.span(node))
        while first > 0 and not lines[first - 1].strip():  # the blank lines before it too
            first -= 1
        left_out |= set(range(first, last + 1))
    return "\n".join(line for number, line in enumerate(lines) if number not in left_out)


def write_statement(name: str, command: str, failing: Sequence[str], messages: Mapping[str, str]) -> str:
    """Return the problem statement of a fault in the project of this name; the same for the same arguments.

    ``command`` runs the tests that the agent can see; empty when there are none.
    """
    by_function: dict[str, list[str]] = {}
    for test in failing:
        by_function.setdefault(test.partition("[")[0], []).append(test)
    symptoms = [_symptom(function, cases, messages) for function, cases in by_function.items()]
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


def quotes_source(statement: str, lines: Iterable[str]) -> bool:
    """Whether a statement quotes one of these lines of source; short ones (``else:``, ``return x``) do not count."""
    squeezed = "".join(statement.split())
    return any(len(line) >= 16 and line in squeezed for line in ("".join(line.split()) for line in lines))


def _symptom(function: str, tests: Sequence[str], messages: Mapping[str, str]) -> str:
    """Return a list item: the tested behaviour in words, and the first message."""
    *_, last = function.split("::")
    words = re.sub(r"^[Tt]est_?", "", last)
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", words).replace("_", " ").strip() or "basic use"
    cases = f" ({len(tests)} cases)" if len(tests) > 1 else ""
    message = next((messages[test] for test in tests if messages.get(test)), "")
    return f"- {words}{cases}" + "".join(f"\n      {line}" for line in message.split("\n") if message)
