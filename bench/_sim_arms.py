"""The arms of ``bench balance`` by name, and running many of them on all cores."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from _sim_clairvoyant import clairvoyant
from _sim_peers import CacheAware, ConsistentHash, PowerOfTwo
from _sim_workload import Workload, draw
from balance_sim import Arm, Clock, Incidents, Result, replay

from prorl_gym.inference.balance import CostPolicy, make_balance_policy
from prorl_gym.inference.balance.cost_policy import CostModel
from prorl_gym.inference.protocol import BalancePolicy
from prorl_gym.testing.inference.simulated_engine import Hardware

NAMED = ("published", "min_heap", "sticky", "least_outstanding", "round_robin")
"""Our other policies."""

_PEERS: dict[str, Callable[[], BalancePolicy]] = {
    "cache_aware": CacheAware,
    "consistent_hash": ConsistentHash,
    "power_of_two": PowerOfTwo,
}

PEERS = (*NAMED, *_PEERS)

RIGHT = CostModel()
WRONG = {
    "prefill 30 % too slow, decoding 30 % too fast": (0.7, 0.7),
    "prefill 30 % too fast, decoding 30 % too slow": (1.3, 1.3),
}
"""Cost models that are wrong in opposite directions: wrong in the same one they would choose the same."""


@dataclass(frozen=True, slots=True)
class Run:
    """One replay to make. ``model``: factors on prefill rate and decode times of the cost policy's model."""

    workload: Workload
    seed: int
    policy: str
    live: int
    aimd: bool = False
    engines: int | None = None
    model: tuple[float, float] = (1.0, 1.0)
    incidents: Incidents = field(default_factory=Incidents)


@dataclass(frozen=True, slots=True)
class Bound:
    """The clairvoyant placement to look for."""

    workload: Workload
    seed: int
    caps: tuple[int, ...]
    moves: int


def execute(job: Run | Bound) -> Result:
    """Make one run."""
    trace = draw(job.workload, job.seed)
    hardware = Hardware(job.workload.kv_tokens)
    if isinstance(job, Bound):
        return clairvoyant(trace, hardware, job.workload.engines, job.caps, job.moves)
    arm = Arm(_maker(job), job.live, job.aimd)
    return replay(trace, hardware, job.engines or job.workload.engines, arm, job.incidents)


def execute_all(jobs: Sequence[Run | Bound]) -> list[Result]:
    """Make many runs, in their order; each is deterministic, so cores only save time."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as workers:
        return list(workers.map(execute, jobs))


def _maker(job: Run) -> Callable[[Clock], BalancePolicy]:
    def make(clock: Clock) -> BalancePolicy:
        if job.policy == "cost":
            return CostPolicy(_wrong(*job.model), clock=clock)
        if job.policy in _PEERS:
            return _PEERS[job.policy]()
        return make_balance_policy(job.policy)  # pyright: ignore[reportArgumentType]  # one of NAMED

    return make


def _wrong(prefill: float, decode: float) -> CostModel:
    return CostModel(
        prefill_rate=RIGHT.prefill_rate * prefill,
        step_base=RIGHT.step_base * decode,
        step_per_call=RIGHT.step_per_call * decode,
        step_per_token=RIGHT.step_per_token * decode,
    )
