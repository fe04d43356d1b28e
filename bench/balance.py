"""How well calls are placed and rollouts admitted, in simulation: the real classes on engines counted exactly.

Five seeds (forty with roomy caches), each the same trace for every arm; a ratio is of two makespans of one seed, and
its interval is that of their mean (Student's t, 95 %). Workloads, hardware fit and caps stand in ``balance_sim.py``
and were committed before the first measurement; admission and policy were tuned on other seeds. Nothing here depends
on how busy this machine is, but the time of one decision.
"""

import bisect
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from statistics import mean

from _arm_cache import ArmCache
from _report import SHORT, Figure, Report, figure, interval, peer, report
from balance_sim import CAPS, ROOMY, TIGHT, Arm, Clock, Incidents, Result, Session, Trace, Workload, draw, replay
from simulation.engine import Hardware, model_call

from prorl_gym.inference.balance import CostPolicy, make_balance_policy
from prorl_gym.inference.balance.cache_estimate import CacheEstimate
from prorl_gym.inference.balance.cost_policy import CostModel
from prorl_gym.inference.balance.simple_policies import PerCallPolicy
from prorl_gym.inference.protocol import BalancePolicy, CallOutcome, GenerationRequest
from prorl_gym.records import EngineLoad


class ConsistentHash(PerCallPolicy):
    """A ring of 160 virtual nodes per engine, by rollout: vllm-router's and SkyRL's, blind to load."""

    def __init__(self) -> None:
        super().__init__()
        self._rings: dict[tuple[str, ...], list[tuple[int, str]]] = {}

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        ring = self._rings.get(tuple(healthy))
        if ring is None:
            ring = sorted((_hash(f"{name}/{node}"), name) for name in healthy for node in range(160))
            self._rings[tuple(healthy)] = ring
        place = bisect.bisect(ring, (_hash(request.session_id), ""))
        engine = ring[place % len(ring)][1]
        self.reservations[engine] += 1
        return engine


class PowerOfTwo(PerCallPolicy):
    """The less busy of two engines drawn at random, for every call."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(0)

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        engine = min(self._random.sample(healthy, min(2, len(healthy))), key=lambda name: self.reservations[name])
        self.reservations[engine] += 1
        return engine


class CacheAware(PerCallPolicy):
    """Longest known prefix, unless loads differ too much: the rule and thresholds of vllm-router and SGLang's gateway.

    Their tree of characters is replaced by what it stands for, exact knowledge of which engine computed which prefix,
    which can only help them.
    """

    def __init__(self, threshold: float = 0.5, absolute: int = 32, relative: float = 1.1) -> None:
        super().__init__()
        self._threshold, self._absolute, self._relative = threshold, absolute, relative
        self._caches: dict[str, CacheEstimate] = {}

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        busiest = max(self.reservations[name] for name in healthy)
        idlest = min(healthy, key=lambda name: self.reservations[name])
        least, prompt = self.reservations[idlest], len(request.prompt_ids)
        engine = idlest
        if not (busiest - least > self._absolute and busiest > self._relative * least):
            known = max(healthy, key=lambda name: self._known(name, request, prompt))
            if self._known(known, request, prompt) > self._threshold * prompt:
                engine = known
        self._caches.setdefault(engine, CacheEstimate()).begin_call(request.session_id, request.group_id, prompt)
        self.reservations[engine] += 1
        return engine

    def release(self, request: GenerationRequest, engine: str, outcome: CallOutcome) -> None:
        super().release(request, engine, outcome)
        self._caches[engine].end_call(request.session_id, len(request.prompt_ids) + outcome.sampled_tokens)

    def forget_session(self, session_id: str) -> None:
        for cache in self._caches.values():
            cache.forget_session(session_id)

    def invalidate_cache(self, engine: str) -> None:
        self._caches.pop(engine, None)

    def _known(self, engine: str, request: GenerationRequest, prompt: int) -> int:
        cache = self._caches.get(engine)
        return cache.cached_tokens(request.session_id, request.group_id, prompt) if cache else 0


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class LeastRemainingWork:
    """Places each session, when it begins, on the engine with the least work left; work is known exactly.

    Sessions that have a place in ``homes`` stay there.
    """

    def __init__(self, trace: Trace, hardware: Hardware, homes: dict[str, str] | None = None) -> None:
        self.homes = dict(homes or {})
        self._work = {session.id: work(session, trace, hardware) for session in trace.sessions}
        self._turns = {session.id: len(session.turns) for session in trace.sessions}
        self._left: dict[str, float] = {}

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        session = request.session_id
        if session not in self.homes:
            self.homes[session] = min(healthy, key=lambda name: self._left.get(name, 0.0))
            home = self.homes[session]
            self._left[home] = self._left.get(home, 0.0) + self._work[session]
        return self.homes[session]

    def release(self, request: GenerationRequest, engine: str, outcome: CallOutcome) -> None:
        if engine in self._left:
            self._left[engine] -= self._work[request.session_id] / self._turns[request.session_id]

    def forget_session(self, session_id: str) -> None: ...

    def invalidate_cache(self, engine: str) -> None: ...

    def observe_load(self, engine: str, load: EngineLoad) -> None: ...


def work(session: Session, trace: Trace, hardware: Hardware) -> float:
    """Seconds of an engine that a session costs, in a batch of a common size."""
    context, seconds = trace.prompt_tokens, 0.0
    for turn in session.turns:
        seconds += turn.output * (hardware.step_base / 12 + hardware.step_per_call + hardware.step_per_token * context)
        seconds += turn.observation / hardware.prefill_rate
        context += turn.output + turn.observation
    return seconds


def clairvoyant(trace: Trace, hardware: Hardware, engines: int, caps: Sequence[int], moves: int) -> Result:
    """Return the best run that was found by one who knows every session's turns before the first has begun.

    No policy can know them, so nothing that is served online is expected to reach it. Sessions start in the trace's
    order under the same kind of cap. They are placed greedily by the work that engines will still have to do, the
    placement is improved by moving sessions from the engine that ends last (``moves`` replays), each move kept when a
    whole replay of the trace gets shorter, and the best over all caps counts. A true optimum may be better still; what
    is found is a placement that really exists, on the same engines.
    """
    best: tuple[Result, LeastRemainingWork, int] | None = None
    for cap in caps:
        foresight = LeastRemainingWork(trace, hardware)
        result = replay(trace, hardware, engines, Arm(lambda clock, one=foresight: one, cap))
        if best is None or result.makespan < best[0].makespan:
            best = (result, foresight, cap)
    assert best is not None
    result, foresight, cap = best
    homes = foresight.homes
    ranked = sorted(trace.sessions, key=lambda session: -work(session, trace, hardware))
    for number in range(moves):
        last = max(result.busy, key=result.busy.__getitem__)
        first = min(result.busy, key=result.busy.__getitem__)
        there = [session.id for session in ranked if homes[session.id] == last]
        trial = homes | {there[(number * 7) % len(there)]: first}
        fixed = LeastRemainingWork(trace, hardware, trial)
        tried = replay(trace, hardware, engines, Arm(lambda clock, one=fixed: one, cap))
        if tried.makespan < result.makespan:
            homes, result = trial, tried
    return result


MOVES = 40
"""Replays that the search for the clairvoyant placement spends on improving it."""
INCIDENT_AT = 250.0
"""Simulated seconds; undisturbed runs take about a thousand."""
EPOCHS = (200.0, 400.0, 600.0, 800.0)


NAMED = ("published", "min_heap", "sticky", "least_outstanding", "round_robin")

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
    trace = draw(job.workload, job.seed)
    hardware = Hardware(job.workload.kv_tokens)
    if isinstance(job, Bound):
        return clairvoyant(trace, hardware, job.workload.engines, job.caps, job.moves)
    arm = Arm(partial(_make_policy, job), job.live, job.aimd)
    return replay(trace, hardware, job.engines or job.workload.engines, arm, job.incidents)


def _make_policy(job: Run, clock: Clock) -> BalancePolicy:
    if job.policy == "cost":
        prefill, decode = job.model
        model = CostModel(
            prefill_rate=RIGHT.prefill_rate * prefill,
            step_base=RIGHT.step_base * decode,
            step_per_call=RIGHT.step_per_call * decode,
            step_per_token=RIGHT.step_per_token * decode,
        )
        return CostPolicy(model, clock=clock)
    if job.policy in _PEERS:
        return _PEERS[job.policy]()
    return make_balance_policy(job.policy)  # pyright: ignore[reportArgumentType]  # one of NAMED


Arms = ArmCache[Run | Bound, Result]


def speedups(arms: Arms, ours: Run | Bound, theirs: Run | Bound) -> list[float]:
    """Return, per seed, how many times sooner ``ours`` is done."""
    return [b.makespan / a.makespan for a, b in zip(arms[ours], arms[theirs], strict=True)]


def arm(workload: Workload, policy: str, live: int | None = None, **changes: object) -> Run:
    return replace(Run(workload, 0, policy, live or workload.live), **changes)  # pyright: ignore[reportArgumentType]


def tight(arms: Arms) -> list[Figure]:
    base, ours, admitted = arm(TIGHT, "published"), arm(TIGHT, "cost"), arm(TIGHT, "cost", aimd=True)
    alone = arm(TIGHT, "published", aimd=True)
    bound = Bound(TIGHT, 0, CAPS, MOVES)
    capped = {(name, cap): arm(TIGHT, name, cap) for name in (*PEERS, "cost") for cap in CAPS}
    wrong = {name: arm(TIGHT, "cost", aimd=True, model=factors) for name, factors in WRONG.items()}
    arms.prepare([base, ours, admitted, alone, bound, *capped.values(), *wrong.values()])

    others = [peer(f"`{name}`", speedups(arms, arm(TIGHT, name), base)) for name in PEERS[1:]]
    rows = [
        _ratio("tight KV, 96 live: `cost` over `published`", speedups(arms, ours, base), 1.15, others),
        _ratio("tight KV: `published` with AIMD over `published`", speedups(arms, alone, base), 1.5),
        _ratio("tight KV: `cost` with AIMD over `published`", speedups(arms, admitted, base), 2.0),
    ]
    for name in (*PEERS, "cost"):
        cap = min(CAPS, key=lambda one: mean(run.makespan for run in arms[capped[name, one]]))
        label = f"tight KV: ours over `{name}` at its own best cap ({cap} live)"
        rows.append(_ratio(label, speedups(arms, admitted, capped[name, cap])))
    rows.append(_distance("tight KV: distance to the clairvoyant placement", arms, admitted, bound, 0.10))
    for name, run in wrong.items():
        rows.append(_distance(f"the same, {name}", arms, run, bound, 0.15))
    return rows


def roomy(arms: Arms) -> list[Figure]:
    peers = {name: arm(ROOMY, name) for name in PEERS}
    ours = arm(ROOMY, "cost", aimd=True)
    arms.prepare([ours, *peers.values()])
    best = min(peers, key=lambda name: mean(run.makespan for run in arms[peers[name]]))
    others = [peer(f"`{name}`", speedups(arms, run, peers[best])) for name, run in peers.items() if name != best]
    return [
        _ratio(f"roomy KV: ours over the best peer (`{best}`)", speedups(arms, ours, peers[best]), 1.0, others),
        figure(
            "roomy KV, ours: prompt tokens found in caches",
            [100 * run.hit_rate for run in arms[ours]],
            "%",
            better="higher",
            target=94.0,
        ),
    ]


def incidents(arms: Arms) -> list[Figure]:
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
            target=20.0,
            peers=[peer("`published`", [abs(4 * run.late_share - 1) * 100 for run in arms[published]])],
        ),
        figure("engine killed: rollouts lost", lost, "", target=0.0),
        figure(
            "engine killed: makespan over that of 3 engines",
            [1 / ratio for ratio in speedups(arms, killed, three)],
            "x",
            target=1.15,
        ),
        *(
            _ratio(
                f"{what}: `cost` over `published`",
                speedups(arms, disturbed[3 * place], disturbed[3 * place + 1]),
                None,
                [peer("`sticky`", speedups(arms, disturbed[3 * place + 2], disturbed[3 * place + 1]))],
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
    calls = [
        model_call(str(number), f"session-{number}", rng.randint(2000, 40_000), group=f"group-{number // 8}")
        for number in range(sessions)
    ]
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
    arms = Arms(execute, lambda arm: arm.workload.seeds[:2] if SHORT else arm.workload.seeds)
    figures = [*tight(arms), *roomy(arms), *incidents(arms)]
    figures.append(figure("one decision, 64 engines, 10,000 rollouts", decision(), "us", target=50.0))
    return report("balance", figures)


def _ratio(name: str, ratios: list[float], target: float | None = None, peers: Sequence[object] = ()) -> Figure:
    return figure(name, ratios, "x", better="higher", target=target, peers=peers, interval=interval(ratios))  # pyright: ignore[reportArgumentType]


def _distance(name: str, arms: Arms, ours: Run, bound: Bound, target: float) -> Figure:
    distances = [100 * (ratio - 1) for ratio in speedups(arms, bound, ours)]
    return figure(name, distances, "%", target=100 * target, interval=interval(distances))
