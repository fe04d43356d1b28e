r"""End to end beside peers: whole rollouts of an agent, their rate, the CPU and the time that they cost.

Work 1, one question: a python call (``12345 * 6789``), then the answer in ``\boxed{}``. Work 2, a shell task: twenty
commands on a small project, three of them edits, then its hidden tests. Work 3, ours only: a program, tried with two
tools, then hidden tests in a clean sandbox. One engine process, 20 ms per call, serves all systems; its CPU is taken
from that of the whole machine (/proc/stat), so clients count, as do sandboxes being removed. Closed loops at 1, 32 and
128 callers (works 2 and 3: 1 and 32), then an open loop at half of the system's own rate at 32, with starts at a fixed
spacing. Each system is warmed up. Runs are interleaved: every system once, then again. The bench waits for a load
average below 1, and is refused unless every reward is 1 and the engine counted the exact calls.

Peers live in environments of their own (``bench/peers-environment``); one that is missing is left out by name.
``--short`` measures a tenth, once, on a machine of any load.
"""

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import _rollout_systems as systems
import _versions
from _report import Better, Figure, Report, StartConditions, figure, peer, report
from _rollout_floors import Floors, measure_floors
from _rollout_measure import OPEN, Machine, Measured, Results, left_out, measure_all, wait_for_idle_machine
from _rollout_systems import BenchRefusedError, Site, all_systems, peer_environment, running_engine
from _rollout_work import CALLERS, CODE_WORK, QUESTION_WORK, SHELL_WORK, WORKS, Work

from prorl_gym.sandbox.spawner.spawner_protocol import BackendName


@dataclass(frozen=True, slots=True)
class Metric:
    """What is read from a load."""

    name: str
    unit: str
    better: Better
    of: Callable[[Measured], float]


RATE = Metric("rollouts", "1/s", "higher", lambda load: load.per_second)
CPU = Metric("CPU per rollout", "ms", "lower", lambda load: load.cpu_ms)
P50 = Metric("beyond the engine, p50", "ms", "lower", lambda load: median(load.beyond_ms))
P99 = Metric("beyond the engine, p99", "ms", "lower", lambda load: p99(load.beyond_ms))

TARGETS: Mapping[tuple[str, BackendName], Mapping[tuple[Metric, int], float]] = {
    (QUESTION_WORK.name, "userns"): {(CPU, CALLERS): 35.0, (P50, 1): 30.0},
    (QUESTION_WORK.name, "apptainer"): {(CPU, CALLERS): 60.0},
}
"""By work and backend, then by metric and callers."""
TIMES = {systems.GYM: 1.2, systems.TOOL_ENV: 0.7, systems.TOOL_ENV_BWRAP: 2.0}
"""How many times the rate of a peer is wanted of ``userns`` at 32 callers."""
MEMORY_MB = 8.0
PEERS = {
    QUESTION_WORK.name: (systems.GYM, systems.TOOL_ENV, systems.TOOL_ENV_BWRAP, systems.BASH_HARNESS),
    SHELL_WORK.name: (systems.MINI, systems.MINI_BWRAP),
    CODE_WORK.name: (),
}
PEER_PACKAGES = {"verifiers-0.1": "verifiers", "verifiers-0.4": "verifiers", "mini-swe-agent": "mini-swe-agent"}
"""Package of each peer's own environment."""


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return quantiles(values, n=100, method="inclusive")[98]


def work_rows(results: Results, work: Work) -> list[Figure]:
    """Return the figures of a work: ours on each backend beside the peers, ours warm, ours through Gym beside Gym's."""
    rows: list[Figure] = []
    for backend, arm in systems.OURS.items():
        rows += arm_rows(
            results, work, work.name, arm, backend, PEERS[work.name], TARGETS.get((work.name, backend), {})
        )
    if work is QUESTION_WORK:
        rows += arm_rows(results, work, f"{work.name}, 32 warm", systems.WARM, "userns", (), {})
        through = f"{work.name}, through Gym"
        rows += arm_rows(results, work, through, systems.THROUGH_GYM, "userns", (systems.GYM,), {})
    return rows


def arm_rows(
    results: Results,
    work: Work,
    name: str,
    arm: str,
    backend: BackendName,
    peers: Sequence[str],
    bounds: Mapping[tuple[Metric, int], float],
) -> list[Figure]:
    """Return the figures of an arm of ours; none of a load that was not measured."""
    closed = list(work.sizes.closed)
    wanted = [(RATE, callers) for callers in closed if callers > 1] + [(CPU, callers) for callers in closed]
    rows: list[Figure] = []
    for metric, callers in (*wanted, (P50, 1), (P50, OPEN), (P99, OPEN)):
        if not (seen := results.of(work.name, arm, callers)):
            continue
        compared = metric is RATE and callers == CALLERS and backend == "userns"
        # The floor answers how much of a latency is the client's and the engine's; its rate compares with nothing.
        names = (systems.FLOOR, *peers) if metric in (P50, P99) and peers else peers
        beside = [
            peer(other, list(map(metric.of, loads)), target=TIMES.get(other) if compared else None)
            for other in names
            if (loads := results.of(work.name, other, callers))
        ]
        rows.append(
            figure(
                f"{name}, {load_name(callers)}: {metric.name}",
                list(map(metric.of, seen)),
                metric.unit,
                better=metric.better,
                backend=backend,
                target=bounds.get((metric, callers)),
                peers=beside,
            )
        )
    return rows


def load_name(callers: int) -> str:
    """Return the words for a load."""
    if callers == OPEN:
        return "half of the rate"
    return f"{callers} caller{'s' if callers > 1 else ''}"


BARE: Mapping[BackendName, str] = {
    "userns": "six namespaces by `unshare`, a fresh /proc, `true` (floor)",
    "apptainer": "`apptainer exec` with the same options, `true` (floor)",
}


def floor_rows(floors: Floors) -> list[Figure]:
    """Return what a sandbox costs alone."""
    rows: list[Figure] = []
    for backend, starts in floors.starts.items():
        bare = peer(BARE[backend], starts.bare_ms)
        for name, runs in (
            ("a sandbox, started and closed: CPU", starts.sandbox_ms),
            ("the same with python's first cell: CPU", starts.python_ms),
        ):
            rows.append(figure(name, runs, "ms", better="lower", backend=backend, peers=[bare]))
    memory = "a sandbox with a python worker: memory, PSS"
    rows += [figure(memory, [mb], "MB", better="lower", backend="userns", target=MEMORY_MB) for mb in floors.memory_mb]
    return rows


async def measure(directory: Path) -> list[Figure]:
    """Measure everything that is installed."""
    known = all_systems()
    for name, why in left_out(known).items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    async with running_engine(directory) as (engine, pid):
        floors = await measure_floors(Machine(engine, pid), directory)
        results = await measure_all(known, Site(engine, directory), pid)
    rows = [row for work in WORKS for row in work_rows(results, work)]
    return [*rows, *floor_rows(floors)]


def peer_versions() -> dict[str, str]:
    """Return the versions of the peers in environments of their own, and of the programs they use."""
    found: dict[str, str] = {}
    for name, package in PEER_PACKAGES.items():
        python = peer_environment(name) / "bin" / "python"
        found[name] = _versions.versions_in(python, package).get(package, "not installed")
    return {**found, **_versions.program_version("bwrap"), **_versions.program_version("apptainer")}


def run() -> Report:
    """Wait for an idle machine, measure, report.

    Raises:
        BenchRefusedError: a reward is not 1, or the engine counted other calls than expected. The logs are kept.
    """
    wait_for_idle_machine()
    begun = StartConditions.capture()
    print(f"load average {begun.load_average:.2f}", file=sys.stderr)
    # /var/tmp is on a disk where /tmp may be memory.
    directory = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="prorl-bench-"))
    directory.chmod(0o711)  # sandboxes have another uid when this is root
    try:
        figures = asyncio.run(measure(directory))
    except BenchRefusedError as refusal:
        raise BenchRefusedError(refusal.what, f"{refusal.fix} Logs: {directory}") from refusal
    shutil.rmtree(directory)
    made = report("peers", figures, "nemo-gym", "ipython", begun=begun, also=peer_versions())
    print(f"load average {made['load_average_after']:.2f} at the end", file=sys.stderr)
    return made


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
