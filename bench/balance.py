"""How well calls are placed and rollouts admitted, in simulation: the real classes on engines counted exactly.

Five seeds (forty with roomy caches), each the same trace for every arm; a ratio is of two makespans of one seed, and
its interval is that of their mean (Student's t, 95 %). Workloads, hardware fit and caps stand in ``_sim_workload.py``,
which was committed before the first measurement; admission and policy were tuned on other seeds. Nothing here depends
on how busy this machine is, but the time of one decision.
"""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from statistics import mean

from _report import Figure, Report, figure, interval, peer, report
from _sim_arms import PEERS, WRONG, Bound, Run, execute_all
from _sim_workload import CAPS, ROOMY, TIGHT, Workload
from balance_sim import Incidents, Result

from prorl_gym.inference.balance import CostPolicy
from prorl_gym.inference.protocol import CallOutcome, GenerationRequest
from prorl_gym.records import EngineLoad

MOVES = 40
"""Replays that the search for the clairvoyant placement spends on improving it."""
INCIDENT_AT = 250.0
"""Simulated seconds; undisturbed runs take about a thousand."""
EPOCHS = (200.0, 400.0, 600.0, 800.0)


class ArmCache:
    """Runs arms once and remembers them."""

    def __init__(self) -> None:
        self._done: dict[Run | Bound, list[Result]] = {}

    def prepare(self, arms: Sequence[Run | Bound]) -> None:
        """Run what is not there yet, all seeds of all arms beside each other."""
        new = [arm for arm in dict.fromkeys(arms) if arm not in self._done]
        results = iter(execute_all([replace(arm, seed=seed) for arm in new for seed in arm.workload.seeds]))
        for arm in new:
            self._done[arm] = list(islice(results, len(arm.workload.seeds)))

    def __getitem__(self, arm: Run | Bound) -> list[Result]:
        return self._done[arm]

    def speedups(self, ours: Run | Bound, theirs: Run | Bound) -> list[float]:
        """Return, per seed, how many times sooner ``ours`` is done."""
        return [b.makespan / a.makespan for a, b in zip(self[ours], self[theirs], strict=True)]


def arm(workload: Workload, policy: str, live: int | None = None, **changes: object) -> Run:
    """Return an arm, its seed left open."""
    return replace(Run(workload, 0, policy, live or workload.live), **changes)  # pyright: ignore[reportArgumentType]


def tight(arms: ArmCache) -> list[Figure]:
    """Caches far too small for the rollouts that the client would keep live."""
    base, ours, admitted = arm(TIGHT, "published"), arm(TIGHT, "cost"), arm(TIGHT, "cost", aimd=True)
    alone = arm(TIGHT, "published", aimd=True)
    bound = Bound(TIGHT, 0, CAPS, MOVES)
    capped = {(name, cap): arm(TIGHT, name, cap) for name in (*PEERS, "cost") for cap in CAPS}
    wrong = {name: arm(TIGHT, "cost", aimd=True, model=factors) for name, factors in WRONG.items()}
    arms.prepare([base, ours, admitted, alone, bound, *capped.values(), *wrong.values()])

    def values_of(name: str) -> list[float]:
        return arms.speedups(arm(TIGHT, name), base)

    others = [peer(f"`{name}`", values_of(name)) for name in PEERS[1:]]
    rows = [
        _ratio("tight KV, 96 live: `cost` over `published`", arms.speedups(ours, base), 1.15, others),
        _ratio("tight KV: `published` with AIMD over `published`", arms.speedups(alone, base), 1.5),
        _ratio("tight KV: `cost` with AIMD over `published`", arms.speedups(admitted, base), 2.0),
    ]
    for name in (*PEERS, "cost"):
        cap = min(CAPS, key=lambda one: mean(run.makespan for run in arms[capped[name, one]]))
        label = f"tight KV: ours over `{name}` at its own best cap ({cap} live)"
        rows.append(_ratio(label, arms.speedups(admitted, capped[name, cap])))
    rows.append(_distance("tight KV: distance to the clairvoyant placement", arms, admitted, bound, 0.10))
    for name, run in wrong.items():
        rows.append(_distance(f"the same, {name}", arms, run, bound, 0.15))
    rows.append(figure("tight KV, ours: prompt tokens found in caches", _hits(arms[admitted]), "%", better="higher"))
    return rows


def roomy(arms: ArmCache) -> list[Figure]:
    """Caches that hold what is live."""
    peers = {name: arm(ROOMY, name) for name in PEERS}
    ours = arm(ROOMY, "cost", aimd=True)
    arms.prepare([ours, *peers.values()])
    best = min(peers, key=lambda name: mean(run.makespan for run in arms[peers[name]]))
    others = [peer(f"`{name}`", arms.speedups(run, peers[best])) for name, run in peers.items() if name != best]
    return [
        _ratio(f"roomy KV: ours over the best peer (`{best}`)", arms.speedups(ours, peers[best]), 1.0, others),
        figure("roomy KV, ours: prompt tokens found in caches", _hits(arms[ours]), "%", better="higher", target=94.0),
    ]


def incidents(arms: ArmCache) -> list[Figure]:
    """Engines that join, die, are slow; weights that change."""
    late = Incidents(join=INCIDENT_AT)
    joined, published = arm(ROOMY, "cost", incidents=late), arm(ROOMY, "published", incidents=late)
    killed = arm(ROOMY, "cost", incidents=Incidents(kill=(INCIDENT_AT, 1)))
    three = arm(ROOMY, "cost", engines=3)
    slow, epochs = Incidents(slow=(1, 2.0)), Incidents(epochs=EPOCHS)
    disturbed = [arm(ROOMY, name, incidents=one) for one in (slow, epochs) for name in ("cost", "published", "sticky")]
    arms.prepare([joined, published, killed, three, *disturbed])
    sessions = ROOMY.groups * ROOMY.group_size
    lost = [float(sessions - run.finished) for run in arms[killed]]
    return [
        figure(
            "late joiner of 4: its share of the work, away from a fair one",
            [abs(4 * run.late_share - 1) * 100 for run in arms[joined]],
            "%",
            better="lower",
            target=20.0,
            peers=[peer("`published`", [abs(4 * run.late_share - 1) * 100 for run in arms[published]])],
        ),
        figure("engine killed: rollouts lost", lost, "", better="lower", target=0.0),
        figure(
            "engine killed: makespan over that of 3 engines",
            [1 / ratio for ratio in arms.speedups(killed, three)],
            "x",
            better="lower",
            target=1.15,
        ),
        *(
            _ratio(
                f"{what}: `cost` over `published`",
                arms.speedups(disturbed[3 * place], disturbed[3 * place + 1]),
                None,
                [peer("`sticky`", arms.speedups(disturbed[3 * place + 2], disturbed[3 * place + 1]))],
            )
            for place, what in enumerate(("one engine at half speed", "weights change every 200 s"))
        ),
    ]


def decision(engines: int = 64, sessions: int = 10_000, looks: int = 3000) -> list[float]:
    """Return microseconds of one choice of the ``cost`` policy among many engines, with many rollouts known."""
    names = [f"engine-{number}" for number in range(engines)]
    policy, rng = CostPolicy(), random.Random(0)
    for name in names:
        policy.observe_load(name, EngineLoad(running=0, waiting=0, kv_usage=0.0, kv_capacity=2_000_000))
    calls = [_call(number, rng.randint(2000, 40_000)) for number in range(sessions)]
    for number, call in enumerate(calls):
        engine = policy.choose(call, names)
        if number % 5:  # a fifth stays in flight
            policy.release(call, engine, CallOutcome(sampled_tokens=100))
    taken: list[float] = []
    for call in rng.sample([call for number, call in enumerate(calls) if number % 5], looks):
        began = time.perf_counter()
        engine = policy.choose(call, names)
        taken.append((time.perf_counter() - began) * 1e6)
        policy.release(call, engine, CallOutcome(sampled_tokens=100))
    return taken


def run() -> Report:
    """Measure."""
    arms = ArmCache()
    figures = [*tight(arms), *roomy(arms), *incidents(arms)]
    figures.append(figure("one decision, 64 engines, 10,000 rollouts", decision(), "us", better="lower", target=50.0))
    return report("balance", figures)


def _call(number: int, prompt: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(number),
        session_id=f"session-{number}",
        prompt_ids=range(prompt),
        max_tokens=2048,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        stop_token_ids=(),
        group_id=f"group-{number // 8}",
    )


def _ratio(name: str, ratios: list[float], target: float | None = None, peers: Sequence[object] = ()) -> Figure:
    return figure(name, ratios, "x", better="higher", target=target, peers=peers, interval=interval(ratios))  # pyright: ignore[reportArgumentType]


def _distance(name: str, arms: ArmCache, ours: Run, bound: Bound, target: float) -> Figure:
    distances = [100 * (ratio - 1) for ratio in arms.speedups(bound, ours)]
    return figure(name, distances, "%", better="lower", target=100 * target, interval=interval(distances))


def _hits(results: Sequence[Result]) -> list[float]:
    return [100 * result.hit_rate for result in results]


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
