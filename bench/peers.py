r"""End to end beside peers: whole rollouts of an agent, their rate, the CPU and the time that they cost.

Work 1, one question: a python call (``12345 * 6789``), then the answer in ``\boxed{}``. Work 2, a shell task: twenty
commands on a small project, three of them edits, then its hidden tests. One engine process, 20 ms per call, serves all
systems; its CPU is taken from that of the whole machine (/proc/stat), so clients count, as do sandboxes being removed.
Closed loops at 1, 32 and 128 callers (the shell task: 1 and 32), then an open loop at half of the system's own rate at
32, with starts at a fixed spacing. Each is warmed up. The runs are interleaved: every system once, then again. A run
begins when the load average is below 1; it is refused unless every reward is 1 and the engine counted the exact calls.

Peers live in environments of their own (``bench/peers-environment``); one that is missing is left out by name.
``--short`` measures a tenth, once, on a machine of any load.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles

import _rollout_systems as systems
import _versions
from _report import Better, Figure, Peer, Report, StartConditions, figure, peer, report
from _rollout_floors import Floors, measure_floors
from _rollout_measure import OPEN, Machine, Measured, Results, left_out, measure_all, wait_for_idle_machine
from _rollout_systems import Site, all_systems, peer_environment, running_engine
from _rollout_work import CALLERS, QUESTION_WORK, SHELL_WORK, Work

from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

CPU_MS: Mapping[BackendName, float] = {"userns": 35.0, "apptainer": 60.0}
"""Wanted at 32 callers, for one question."""
BEYOND_MS, MEMORY_MB = 30.0, 8.0
TIMES = {systems.GYM: 1.2, systems.TOOL_ENV: 0.7, systems.TOOL_ENV_BWRAP: 2.0}
"""How many times the rate of a peer is wanted at 32 callers."""
PEERS = {
    QUESTION_WORK.name: (
        *(systems.FLOOR, systems.GYM, systems.TOOL_ENV, systems.TOOL_ENV_BWRAP, systems.BASH_HARNESS),
    ),
    SHELL_WORK.name: (systems.MINI, systems.MINI_BWRAP),
}
PEER_PACKAGES = {"verifiers-0.1": "verifiers", "verifiers-0.4": "verifiers", "mini-swe-agent": "mini-swe-agent"}
"""Package of each peer's own environment."""


class Rows:
    """Makes the figures of one work out of the results.

    Args:
        results: of all arms.
        work: of which kind of rollout.
    """

    def __init__(self, results: Results, work: Work) -> None:
        self._results = results
        self._work = work

    def all(self) -> list[Figure]:
        """Return the figures: ours on each backend beside the peers, ours warm, and ours through Gym beside Gym's."""
        name, question = self._work.name, self._work is QUESTION_WORK
        rows: list[Figure] = []
        for backend, arm in systems.OURS.items():
            rows += self._arm(name, arm, backend, PEERS[name], bounded=question)
        if question:
            rows += self._arm(f"{name}, 32 sandboxes warm", systems.WARM, "userns", ())
            rows += self._arm(f"{name}, through Gym", systems.THROUGH_GYM, "userns", (systems.GYM,))
        return rows

    def _arm(
        self, name: str, arm: str, backend: BackendName, peers: Sequence[str], *, bounded: bool = False
    ) -> list[Figure]:
        rows: list[Figure] = []
        for callers in self._work.sizes.closed:
            if not (seen := self._seen(arm, callers)):
                continue
            at = f"{callers} caller{'s' if callers > 1 else ''}"
            compared = bounded and callers == CALLERS
            times = TIMES if compared and backend == "userns" else {}
            cpu = CPU_MS[backend] if compared else None
            rates = self._peers(peers, callers, lambda each: each.per_second, times)
            costs = self._peers(peers, callers, lambda each: each.cpu_ms, {})
            rows += [
                _figure(f"{name}: rollouts, {at}", [each.per_second for each in seen], "1/s", "higher", backend, rates),
                _figure(
                    f"{name}: CPU per rollout, {at}",
                    [each.cpu_ms for each in seen],
                    "ms",
                    "lower",
                    backend,
                    costs,
                    target=cpu,
                ),
            ]
        wanted = BEYOND_MS if bounded and backend == "userns" else None
        rows += self._latency(f"{name}: beyond the engine, 1 caller", arm, 1, backend, peers, wanted)
        rows += self._latency(f"{name}: beyond the engine, half of its rate", arm, OPEN, backend, peers, None)
        return rows

    def _latency(
        self, name: str, arm: str, callers: int, backend: BackendName, peers: Sequence[str], wanted: float | None
    ) -> list[Figure]:
        if not (seen := self._seen(arm, callers)):
            return []
        rows: list[Figure] = []
        for what, of, target in (("p50", median, wanted), ("p99", _p99, None)):
            beside = self._peers(peers, callers, lambda each, of=of: of(each.beyond_ms), {})
            runs = [of(each.beyond_ms) for each in seen]
            rows.append(_figure(f"{name}, {what}", runs, "ms", "lower", backend, beside, target=target))
        return rows

    def _peers(
        self,
        names: Sequence[str],
        callers: int,
        of: Callable[[Measured], float],
        times: Mapping[str, float],
    ) -> list[Peer]:
        return [
            peer(name, [of(each) for each in seen], target=times.get(name))
            for name in names
            if (seen := self._seen(name, callers))
        ]

    def _seen(self, arm: str, callers: int) -> Sequence[Measured]:
        return self._results.of(self._work.name, arm, callers)


def _figure(
    name: str,
    runs: Sequence[float],
    unit: str,
    better: Better,
    backend: BackendName,
    peers: Sequence[Peer],
    *,
    target: float | None = None,
) -> Figure:
    return figure(name, runs, unit, better=better, backend=backend, target=target, peers=peers)


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[98]


def floor_rows(floors: Floors) -> list[Figure]:
    """Return what a sandbox costs alone."""
    bare = peer("six namespaces by `unshare`, a fresh /proc, `true` (floor)", floors.unshare_ms)
    return [
        _figure("a sandbox, started and closed: CPU", floors.sandbox_ms, "ms", "lower", "userns", [bare]),
        _figure("the same with python's first cell: CPU", floors.python_ms, "ms", "lower", "userns", [bare]),
        _figure(
            *("a sandbox with a python worker: memory, PSS", [floors.memory_mb], "MB", "lower", "userns", ()),
            target=MEMORY_MB,
        ),
    ]


async def measure(directory: Path) -> list[Figure]:
    """Measure everything that is installed."""
    known = all_systems()
    for name, why in left_out(known).items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    async with running_engine(directory) as (engine, pid):
        floors = await measure_floors(Machine(engine, pid))
        results = await measure_all(known, Site(engine, directory), pid)
    rows = [row for work in (QUESTION_WORK, SHELL_WORK) for row in Rows(results, work).all()]
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
        BenchRefusedError: a reward is not 1, or the engine counted other calls than expected.
    """
    wait_for_idle_machine()
    begun = StartConditions.capture()
    print(f"load average {begun.load_average:.2f}", file=sys.stderr)
    # /var/tmp is on a disk where /tmp may be memory.
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="prorl-bench-") as name:
        directory = Path(name)
        directory.chmod(0o711)  # sandboxes have another uid when this is root
        figures = asyncio.run(measure(directory))
    made = report("peers", figures, "nemo-gym", "ipython", begun=begun, also=peer_versions())
    print(f"load average {made['load_average_after']:.2f} at the end", file=sys.stderr)
    return made


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
