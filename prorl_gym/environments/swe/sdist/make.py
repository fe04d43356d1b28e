"""From a source distribution to rows: the tests run, a fault is seeded, and grading itself proves the row."""

import asyncio
import base64
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.controls.plan import ControlPlan
from prorl_gym.environments.swe.controls.proof import prove
from prorl_gym.environments.swe.grading import run_hidden_tests
from prorl_gym.environments.swe.parsers import PASSING
from prorl_gym.environments.swe.public_rows import unified
from prorl_gym.environments.swe.rows import WORKDIR, read_task
from prorl_gym.environments.swe.sdist.faults import Baseline, Fault, Search, measure
from prorl_gym.environments.swe.sdist.fetch import applicable, fetch_sdist, fetch_wheels
from prorl_gym.environments.swe.sdist.layout import Layout, find_layout
from prorl_gym.environments.swe.sdist.statement import tells, write_statement
from prorl_gym.environments.swe.sdist.suite import SuiteRun, command_for, run_suite, with_requirements
from prorl_gym.environments.swe.sdist.tree import Tree, pack, read_sdist
from prorl_gym.environments.swe.sdist.visible import hide
from prorl_gym.environments.swe.spec import PYTEST, sandbox_spec
from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.protocol import Sandbox

MAX_ARCHIVE = 4 << 20
"""Bytes of a row's archive."""
SECONDS = 180.0
"""For one run of the tests of the released project."""
_STEPS = (150.0, 900.0, 3600.0)
_SLOWER = 15
_PROVIDED = f"""
import importlib.metadata
for one in importlib.metadata.distributions(path=[{PYTEST!r}]):
    print(one.metadata["Name"] + "==" + one.version)
"""


@dataclass(frozen=True, slots=True)
class Wish:
    """What rows are wanted."""

    rows: int = 1
    seed: int = 0
    max_failing: int = 20
    """Tests that a fault may break."""


@dataclass(slots=True)
class Outcome:
    """What was found out on the way, for people."""

    tests: int = 0
    """Tests that pass twice in the released project."""
    flaky: tuple[str, ...] = ()
    rejected: Counter[str] = field(default_factory=Counter[str])
    """Mutants that make no row, by reason."""
    coverage: dict[str, ControlPlan] = field(default_factory=dict[str, ControlPlan])
    """What can be checked about repairs, by the id of the row."""


async def open_project(
    name: str, needs: Sequence[str], cache: Path, index: str, leases: Leases, wish: Wish
) -> "Project":
    """Fetch a project and what its tests need.

    Args:
        name: ``NAME==VERSION``.
        needs: requirements of its tests beyond its own.
        cache: see ``fetch_sdist``.
        index: see ``fetch_sdist``.
        leases: gives the sandboxes.
        wish: what rows are wanted.

    Raises:
        ConfigError: it cannot be fetched, or is not of a kind that can be used.
        SandboxError: a sandbox could not be started or was lost.
    """
    released = read_sdist(await asyncio.to_thread(fetch_sdist, name, cache, index))
    layout = find_layout(released)
    python = await _python_version(leases)
    wanted = applicable([*layout.requires, *needs], python)
    # What is compiled anew in each sandbox makes each run of the tests slower.
    provided = (await _ask_python(leases, _PROVIDED)).split() if wanted else []
    wheels = await asyncio.to_thread(fetch_wheels, wanted, python, index, provided)
    return Project(released, layout, wheels, leases, wish)


class Project:
    """A project unpacked in memory, with a way to run its tests.

    Args:
        released: files of its source distribution.
        layout: of these files.
        requirements: what its tests import, unpacked; see ``fetch_wheels``.
        leases: gives the sandboxes.
        wish: what rows are wanted.
    """

    def __init__(self, released: Tree, layout: Layout, requirements: Tree, leases: Leases, wish: Wish) -> None:
        self.layout = layout
        self._tree = with_requirements(released, self.layout, requirements)
        self._leases = leases
        self._wish = wish
        self._command = command_for(self.layout, self.layout.tests)
        self.outcome = Outcome()

    async def rows(self) -> AsyncIterator[dict[str, Any]]:
        """Yield rows, the same ones for the same distribution, requirements and seed.

        Raises:
            ConfigError: the project's tests do not run here, or the project cannot be used.
            SandboxError: a sandbox could not be started or was lost.
        """
        await self._refuse_installed()
        baseline = await measure(self._tree, self._run, SECONDS)
        self.outcome.tests, self.outcome.flaky = len(baseline.stable), baseline.flaky
        rng = random.Random(f"{self.layout.name}=={self.layout.version}:{self._wish.seed}")
        search = Search(self._tree, self.layout.sources, baseline, self._run, rng, self._wish.max_failing)
        self.outcome.rejected = search.rejected
        made = 0
        unchecked: list[dict[str, Any]] = []
        # More than are wanted are looked for: the last checks refuse some.
        async for fault in search.faults(2 * self._wish.rows):
            row = await self._row(fault, baseline)
            if isinstance(row, str):
                search.rejected[row] += 1
            elif not _plan(row).is_checking:
                unchecked.append(row)
            else:
                yield self._numbered(row, made)
                made += 1
            if made == self._wish.rows:
                break
        missing = self._wish.rows - made
        for row in unchecked[:missing]:  # and named in the report
            yield self._numbered(row, made)
            made += 1
        if left := unchecked[missing:]:
            search.rejected["no test that shows the fault has a control"] += len(left)

    def _numbered(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        name = f"{self.layout.name}-{self.layout.version}-s{self._wish.seed}-{number}"
        self.outcome.coverage[name] = _plan(row)
        return {"id": name, **row}

    async def _refuse_installed(self) -> None:
        """A sandbox that has the package installed would have the answer in it."""
        prefix = f"{self.layout.source_root}/" if self.layout.source_root else ""
        names = {path.removeprefix(prefix).split("/")[0].removesuffix(".py") for path in self.layout.sources}
        look = f"import importlib.util as u; print(*(n for n in {sorted(names)!r} if u.find_spec(n)))"
        if found := (await _ask_python(self._leases, look)).split():
            raise ConfigError(
                f"The sandbox has {', '.join(found)} already, so that the answer could be read there.",
                "Take another project.",
            )

    async def _start(self) -> Sandbox:
        return await _start(self._leases)

    async def _run(self, tree: Tree, seconds: float, trace: bool) -> SuiteRun:
        return await run_suite(self._start, WORKDIR, tree, self._command, seconds, trace=trace)

    async def _row(self, fault: Fault, baseline: Baseline) -> dict[str, Any] | str:
        """Return the row of a fault without an id, or why it makes none."""
        broken = fault.apply(self._tree)
        tests = _texts(broken, self.layout.test_files)
        agents = _with_tests(broken, self.layout, hide(tests, fault.failing))
        command = self._visible_command(agents)
        if command:
            seen = await run_suite(self._start, WORKDIR, agents, command, _seconds(baseline))
            if seen.problem or baseline.stable & seen.failing:
                return "the tests that remain do not run without the hidden ones"
        question = write_statement(self.layout.name, command, fault.failing, fault.messages)
        if tells(question, _changed_lines(self._tree, broken)):
            return "the statement would quote the fault"
        archive = pack(agents)
        if len(archive) > MAX_ARCHIVE:
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
        if not await self._proven(row):
            return "grading sees other tests fail or pass"
        plan = await prove(read_task(row), self._leases, random.Random(question))
        row["tests"]["controls"] = plan.model_dump(mode="json", exclude_defaults=True)
        return row

    def _visible_command(self, tree: Tree) -> str:
        left = [test for test in self.layout.tests if any(p == test or _tests_in(p, test) for p in tree)]
        return command_for(self.layout, left) if left else ""

    async def _proven(self, row: Mapping[str, Any]) -> bool:
        """Whether grading agrees: the right tests fail before, and all pass after the gold patch."""
        task = read_task(row)
        plan = task.tests
        before = await run_hidden_tests(task, b"", self._leases, plan.seconds)
        after = await run_hidden_tests(task, task.gold_patch.encode(), self._leases, plan.seconds)
        if before.complaint or after.complaint:
            return False
        fails = all(before.statuses.get(name) in ("failed", "error") for name in plan.fail_to_pass)
        stays = all(before.statuses.get(name) in PASSING for name in plan.pass_to_pass)
        return fails and stays and all(after.statuses.get(n) in PASSING for n in plan.fail_to_pass + plan.pass_to_pass)


async def _start(leases: Leases) -> Sandbox:
    """Start a sandbox of the kind that the rows will have."""
    row = {"question": "-", "tests": {"command": "-", "parser": "pytest", "fail_to_pass": ["-"]}}
    return await leases.clean(await sandbox_spec(read_task(row)))


async def _python_version(leases: Leases) -> str:
    """Return the version of the sandbox's Python, as in ``3.11``."""
    return (await _ask_python(leases, "import sys; print('%d.%d' % sys.version_info[:2])")).strip()


async def _ask_python(leases: Leases, program: str) -> str:
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
    """Time for the tests, in steps so coarse that the speed of the machine that makes a row seldom shows in it."""
    return next((limit for limit in _STEPS if _SLOWER * baseline.seconds <= limit), _STEPS[-1])


def _texts(tree: Tree, paths: tuple[str, ...]) -> dict[str, str]:
    try:
        return {path: tree[path].data.decode("utf-8") for path in paths}
    except UnicodeDecodeError:
        raise ConfigError("A test file of the project is not UTF-8.", "Take another project.") from None


def _with_tests(tree: Tree, layout: Layout, visible: Mapping[str, str]) -> Tree:
    kept = {path: file for path, file in tree.items() if path not in layout.test_files}
    return {**kept, **{path: replace(tree[path], data=text.encode()) for path, text in visible.items()}}


def _tests_in(path: str, directory: str) -> bool:
    return path.startswith(f"{directory}/") and bool(re.fullmatch(r"(test_.*|.*_test)\.py", path.rpartition("/")[2]))


def _patch(broken: Tree, released: Tree, fault: Fault) -> str:
    paths = sorted({mutation.path for mutation in fault.mutations})
    return "".join(unified(path, broken[path].data.decode(), released[path].data.decode()) for path in paths)


def _changed_lines(released: Tree, broken: Tree) -> list[str]:
    """Lines of either tree that the other has not."""
    found: list[str] = []
    for path, file in released.items():
        if file.data != broken[path].data:
            old, new = (tree[path].data.decode().split("\n") for tree in (released, broken))
            found += sorted(set(old) ^ set(new))
    return found
