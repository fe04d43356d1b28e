"""What grading a repair costs beside the run of its hidden tests: what is around them, and runs B and C."""

from operator import add
from pathlib import Path
from statistics import median

from _report import SHORT, Figure, figure

from prorl_gym.environments import registry
from prorl_gym.environments.row_format import read_rows
from prorl_gym.environments.swe.controls.control_checks import ALLOWED_SECONDS
from prorl_gym.environments.swe.grading import grade_timed
from prorl_gym.environments.swe.swe_row import SweTask
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import ResolvedSettings, resolve_settings

ROWS = Path(__file__).parents[1] / "environments" / "prorl_swe" / "data" / "example.jsonl"
RUNS = 2 if SHORT else 20
TARGET_MS = 300.0


async def run() -> list[Figure]:
    """Grade the gold repair of each example row, in a user-namespace sandbox; one at a time.

    Raises:
        RuntimeError: gold does not score 1.0: the figure would be worthless.
    """
    environment = registry.get("swe")
    settings = resolve_settings(environment.settings)
    backend = await open_backend(SandboxConfig(backend="userns"))
    around: list[float] = []
    tests: list[float] = []
    checks: list[float] = []
    bounds: list[float] = []
    per_row: list[Figure] = []
    try:
        for row in read_rows(ROWS):
            task = environment.parse_row(row.task)
            begun = len(checks)
            await _prove(task, backend, settings)
            for _ in range(RUNS):
                leases = SandboxLeases(backend)
                try:
                    graded = await grade_timed(task, task.gold_patch.encode(), leases, settings)
                finally:
                    await leases.close()
                if graded.score.reward != 1.0:
                    raise RuntimeError(f"{row.name}: gold scores {graded.score.reward} ({graded.score.detail})")
                around.append(1000 * (graded.seconds - graded.tests_seconds - graded.checks_seconds))
                tests.append(1000 * graded.tests_seconds)
                checks.append(1000 * graded.checks_seconds)
                bounds.append(1000 * max(ALLOWED_SECONDS, graded.tests_seconds / 2))
            name = f"SWE: {row.task['id']}"
            per_row += [
                figure(f"{name}: run A", [median(tests[begun:])], "ms", better="lower"),
                figure(
                    f"{name}: runs A, B and C", [median(map(add, tests[begun:], checks[begun:]))], "ms", better="lower"
                ),
            ]
    finally:
        await backend.close()
    around.sort()
    what = f"of {len(around)} gradings"
    return [
        figure(f"SWE: around the tests, p50 {what}", [median(around)], "ms", better="lower", target=TARGET_MS),
        figure(f"SWE: around the tests, p99 {what}", [around[len(around) * 99 // 100]], "ms", better="lower"),
        figure("SWE: the tests themselves, p50", [median(tests)], "ms", better="lower"),
        figure("SWE: controls (runs B and C), p50", [median(checks)], "ms", better="lower"),
        figure(
            "SWE: controls, most of what is allowed (half of run A, or 5 s)",
            [max(each / bound for each, bound in zip(checks, bounds, strict=True))],
            "",
            better="lower",
            target=1.0,
        ),
        *per_row,
    ]


async def _prove(task: SweTask, backend: SandboxBackend, settings: ResolvedSettings) -> None:
    """Grade once, so that the controls of the row are proven before the clock runs."""
    leases = SandboxLeases(backend)
    try:
        await grade_timed(task, task.gold_patch.encode(), leases, settings)
    finally:
        await leases.close()
