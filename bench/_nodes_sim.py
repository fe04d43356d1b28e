"""The simulated part of ``bench nodes``: a service over 1 to 256 nodes on a virtual clock.

Everything that decides is real (service, ledger, placement, channel, engine pool with its balancer and admission, the
nodes' runners); engines, commands, the network and time are simulated (``simulation``). The head's own work takes no
virtual time.

Work per node is constant: its slots, one engine, and ``GROUPS`` groups of ``SIZE`` rollouts, all submitted at once.
Throughput is that between the ends of the first and the last quarter of the rollouts, so that neither filling nor the
longest rollouts decide. Small installations are run with several seeds, so that each point has as many rollouts as 16
nodes, and all points together have 100,000.

This file was committed before the first measurement; what is measured does not choose its workload.
"""

import asyncio
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from _report import SHORT
from simulation.cluster import Cluster, ClusterConfig
from simulation.planned_rollouts import Shape
from simulation.virtual_clock import run_deterministically

from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.scheduling.runner import RunnerConfig

SIZE = 8
GROUPS = 4 if SHORT else 29
POINTS = (1, 2, 4, 8) if SHORT else (1, 2, 4, 8, 16, 32, 64, 256)
SEEDED = 2 if SHORT else 16
"""Nodes that the seeds of a point have together, at least."""
NODE = RunnerConfig(queue=8, init=8, run=32, eval=16)
KV_TOKENS = 400_000
SHAPE = Shape(turns_per_call=5)
"""Turns, tokens and commands of ``balance_sim.py``."""
COMMIT_SECONDS = 0.002
"""Shortest time to and from the ledger's writer, doubled at random: a commit on a solid-state disk."""


@dataclass(frozen=True, slots=True)
class Point:
    nodes: int
    seed: int


@dataclass(frozen=True, slots=True)
class PointResult:
    throughput: float
    """Rollouts per virtual second in the middle half."""
    virtual_seconds: float
    rollouts: int


def points() -> list[Point]:
    return [Point(nodes, seed) for nodes in reversed(POINTS) for seed in range(max(1, SEEDED // nodes))]


def execute(point: Point) -> PointResult:
    """Make a run. Raises ``RuntimeError`` if an invariant of the simulation was violated."""
    delays = random.Random(f"{point.seed}/threads")
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:

        async def work() -> PointResult:
            return await _run(point, Path(folder) / "ledger.db")

        return run_deterministically(work, point.seed, lambda: COMMIT_SECONDS * (1 + delays.random()))


async def _run(point: Point, ledger: Path) -> PointResult:
    loop, dice = asyncio.get_running_loop(), random.Random(f"{point.nodes}/{point.seed}")
    config = ClusterConfig(nodes=point.nodes, engines=point.nodes, runner=NODE, kv_tokens=KV_TOKENS, shape=SHAPE)
    cluster = Cluster(config, ledger, point.seed)
    await cluster.start_head()
    life = cluster.life
    assert life is not None
    total, ends, done = point.nodes * GROUPS * SIZE, list[float](), asyncio.Event()

    def on_record(rollout: Rollout) -> None:
        if rollout.outcome.status != "completed":
            cluster.complaints.append(f"{rollout.rollout_id}: {rollout.outcome}")
        ends.append(loop.time())
        if len(ends) == total:
            done.set()

    life.service.record_observers.append(on_record)
    began = loop.time()
    for group in range(point.nodes * GROUPS):
        requests = [
            RolloutRequest(
                rollout_id=f"g{group}-{replica}",
                run_id="bench",
                group_id=f"g{group}",
                group_size=SIZE,
                replica=replica,
                environment="planned",
                task={"seed": dice.randrange(2**40)},
            )
            for replica in range(SIZE)
        ]
        await life.process.spawn(life.service.submit(requests))
    await done.wait()
    seconds = loop.time() - began
    await cluster.stop_head()
    if cluster.complaints:
        raise RuntimeError(f"{len(cluster.complaints)} violations: {cluster.complaints[:3]}")
    middle = ends[3 * total // 4] - ends[total // 4]
    return PointResult(total / 2 / middle, seconds, total)
