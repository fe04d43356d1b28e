"""What checking a repair costs on real projects: run A, all runs, and what their tests take by themselves.

A row of each of twenty projects of PyPI is made as ``prorl-gym prepare swe --from-sdist`` does, and its gold repair is
graded a few times, one after the other. Made for a machine with access to a package index.
"""

import os
import time
from dataclasses import dataclass, field
from statistics import median

from _processes import cpu_seconds, process_tree
from _report import SHORT, Figure, figure

from prorl_gym.environments.swe.controls.control_checks import ALLOWED_SECONDS
from prorl_gym.environments.swe.controls.control_plan import ControlPlan
from prorl_gym.environments.swe.grading import grade_timed
from prorl_gym.environments.swe.repository import sandbox_spec
from prorl_gym.environments.swe.sdist.row_maker import RowOptions, open_project
from prorl_gym.environments.swe.swe_row import SweTask, parse_swe_row
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import resolve_settings

PROJECTS = (
    *("cachetools==5.5.0", "inflection==0.5.1", "isodate==0.7.2", "jmespath==1.0.1", "markupsafe==3.0.2"),
    *("ordered-set==4.1.0", "orderedmultidict==1.0.1", "parse==1.20.2", "pathspec==0.12.1", "toolz==1.0.0"),
    *("aiofiles==24.1.0", "async-timeout==4.0.3", "click==8.1.7", "mistune==3.0.2", "dictdiffer==0.9.0"),
    *("semver==3.0.2", "sqlparse==0.5.1", "tabulate==0.9.0", "uritemplate==4.1.1", "webcolors==24.8.0"),
)
NEEDS = {"aiofiles": ("pytest-asyncio",), "async-timeout": ("pytest-asyncio",)}
SEED = 7
RUNS = 1 if SHORT else 3


@dataclass(slots=True)
class _Cost:
    """Seconds of each grading of one row."""

    tests: list[float] = field(default_factory=list[float])
    checks: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    plan: ControlPlan = field(default_factory=ControlPlan)

    @property
    def share(self) -> float:
        """Return how much of what the checks may take they take."""
        return median(
            checks / max(ALLOWED_SECONDS, tests / 2) for tests, checks in zip(self.tests, self.checks, strict=True)
        )


async def run() -> list[Figure]:
    """Make the rows and grade their gold repairs, in user-namespace sandboxes.

    Raises:
        RuntimeError: gold does not score 1.0: the figures would be worthless.
        ConfigError: a project cannot be fetched.
    """
    backend = await open_backend(SandboxConfig(backend="userns"))
    found: dict[str, _Cost] = {}
    try:
        start = [await _start_seconds(backend) for _ in range(3 if SHORT else 20)]
        for name in PROJECTS[:: 10 if SHORT else 1]:
            found[name] = await _project(name, backend)
    finally:
        await backend.close()
    functions = [function for cost in found.values() for function in cost.plan.functions]
    unknown = sum(len(cost.plan.unknown) for cost in found.values())
    total = len(functions) + unknown
    sealed = sum(bool(each.seals) for each in functions)
    controlled = sum(bool(each.variants) for each in functions)
    neither = unknown + sum(not each.seals and not each.variants for each in functions)
    figures = [
        figure(
            "SWE: an empty sandbox of these rows starts and ends in",
            [1000 * each for each in start],
            "ms",
            better="lower",
        ),
        figure(
            f"SWE: {len(found)} projects: most that the checks take of what is allowed (half of run A, or 5 s)",
            [max(cost.share for cost in found.values())],
            "",
            better="lower",
            target=1.0,
        ),
        figure(f"SWE: of {total} tests that show a fault: sealed", [100 * sealed / total], "%", better="higher"),
        figure("SWE: likewise: with controls", [100 * controlled / total], "%", better="higher"),
        figure("SWE: likewise: with neither", [100 * neither / total], "%", better="lower"),
    ]
    for name, cost in found.items():
        figures += [
            figure(f"SWE: {name}: run A", cost.tests, "s", better="lower"),
            figure(f"SWE: {name}: checks (runs B and C, sealed values)", cost.checks, "s", better="lower"),
            figure(f"SWE: {name}: CPU time of a whole grading", cost.cpu, "s", better="lower"),
        ]
    return figures


async def _start_seconds(backend: SandboxBackend) -> float:
    row = {"question": "-", "tests": {"command": "-", "parser": "pytest", "fail_to_pass": ["-"]}}
    started = time.monotonic()
    leases = SandboxLeases(backend)
    try:
        await leases.start_clean_sandbox(await sandbox_spec(parse_swe_row(row)))
    finally:
        await leases.close()
    return time.monotonic() - started


async def _project(name: str, backend: SandboxBackend) -> _Cost:
    leases = SandboxLeases(backend)
    try:
        cache = SandboxConfig().ipython_cache_dir().with_name("sdists")
        project = await open_project(
            name, NEEDS.get(name.partition("==")[0], ()), cache, "", leases, RowOptions(1, SEED)
        )
        (row,) = [row async for row in project.make_rows()]
    finally:
        await leases.close()
    task = parse_swe_row(row)
    cost = _Cost(plan=task.tests.controls or ControlPlan())
    for _ in range(RUNS):
        await _grade(name, task, backend, cost)
    return cost


async def _grade(name: str, task: SweTask, backend: SandboxBackend, cost: _Cost) -> None:
    leases = SandboxLeases(backend)
    used = cpu_seconds(process_tree(os.getpid()))
    try:
        graded = await grade_timed(task, task.gold_patch.encode(), leases, resolve_settings())
    finally:
        await leases.close()
    if graded.score.reward != 1.0:
        raise RuntimeError(f"{name}: gold scores {graded.score.reward} ({graded.score.detail})")
    cost.tests.append(graded.tests_seconds)
    cost.checks.append(graded.checks_seconds)
    cost.cpu.append(cpu_seconds(process_tree(os.getpid())) - used)
