"""The workloads of ``bench balance``, and their replay on simulated engines with the real policy and admission.

A discrete-event simulation: clients start sessions in the trace's order, each session sends its turns one after the
other with tool time between them, the policy under test places every call. The admission under test is either a fixed
number of live sessions, or the package's own book and AIMD fed by what simulated engines show as metrics.

Workloads are recorded nowhere, drawn once per seed, the same for every arm: multi-turn agents in groups, whose samples
share system and task prompt, then go their own ways. Lengths are log-normal, as agents' are: most sessions are short
and a few are ten times as long. The shape (groups of 8, median 14 turns, outputs and observations of a few hundred
tokens, tools of about a second) and the engines' figures are those of the vllm-router's published fit and of public
traces of SWE agents. They were committed before the first measurement; what is measured does not choose them. Since
then only the seeds of ``ROOMY`` have changed: five left open which of the sticky policies is the best, forty do not.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from simulation.engine import Call, Hardware, SimEngine, model_call
from simulation.planned_rollouts import Turn

from prorl_gym.inference.balance.admission_state import AdmissionState, AimdShare
from prorl_gym.inference.balance.cache_estimate import PrefixReuse
from prorl_gym.inference.protocol import BalancePolicy, CallOutcome, GenerationRequest

SEEDS = (1, 2, 3, 4, 5)
MANY_SEEDS = tuple(range(101, 141))
"""Where systems differ by less than seeds do. Nothing was tuned on these."""


@dataclass(frozen=True, slots=True)
class Session:
    id: str
    group: str
    turns: tuple[Turn, ...]

    @property
    def output(self) -> int:
        return sum(turn.output for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions in the order in which they want to start."""

    sessions: tuple[Session, ...]
    system_tokens: int = 2048
    group_tokens: int = 2048
    """Shared by a group, after the system prompt."""

    @property
    def prompt_tokens(self) -> int:
        return self.system_tokens + self.group_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace's shape and the fleet it meets."""

    name: str
    engines: int
    kv_tokens: int
    groups: int
    live: int
    """Sessions that the client keeps live at once, where nothing cleverer decides."""
    group_size: int = 8
    seeds: tuple[int, ...] = SEEDS


TIGHT = Workload("tight", engines=4, kv_tokens=200_000, groups=24, live=96)
ROOMY = Workload("roomy", engines=4, kv_tokens=400_000, groups=24, live=64, seeds=MANY_SEEDS)
CAPS = (16, 24, 32, 40, 48, 64, 96)
"""Caps at which every policy is also tried, for its own best one."""


def draw(workload: Workload, seed: int) -> Trace:
    rng = random.Random(f"{workload.name}/{seed}")
    sessions = tuple(
        Session(f"g{group}-{sample}", f"g{group}", _turns(rng))
        for group in range(workload.groups)
        for sample in range(workload.group_size)
    )
    return Trace(sessions)


def _turns(rng: random.Random) -> tuple[Turn, ...]:
    count = min(99, max(1, round(_around(rng, 14, 0.8))))
    return tuple(
        Turn(
            output=_tokens(_around(rng, 180, 0.6), 2000),
            observation=_tokens(_around(rng, 450, 0.8), 6000),
            tool_seconds=min(60.0, _around(rng, 1.0, 1.0)),
        )
        for _ in range(count)
    )


def _around(rng: random.Random, median: float, sigma: float) -> float:
    return median * rng.lognormvariate(0.0, sigma)


def _tokens(value: float, largest: int) -> int:
    return min(largest, max(1, round(value)))


SCRAPE_SECONDS = 5.0
"""Between two looks at the engines' metrics."""


class Clock:
    """Simulated time, in seconds: what policies are given instead of the wall clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


MakePolicy = Callable[[Clock], BalancePolicy]


@dataclass(frozen=True, slots=True)
class Arm:
    policy: MakePolicy
    live: int
    aimd: bool = False
    """``live`` is only the most, and the AIMD decides."""


@dataclass(frozen=True, slots=True)
class Incidents:
    """What befalls the fleet. Times in simulated seconds."""

    slow: tuple[int, float] | None = None
    """Which engine needs how many times as long for everything."""
    kill: tuple[float, int] | None = None
    """When which engine dies for good."""
    join: float | None = None
    epochs: tuple[float, ...] = ()
    """When weights change: caches are worthless then."""


@dataclass(slots=True)
class Result:
    makespan: float
    sampled: int
    prompt_tokens: int
    hit_tokens: int
    finished: int
    busy: dict[str, float]
    late_share: float = math.nan
    """Share of the tokens sampled after it joined that the late engine sampled."""

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


@dataclass(slots=True, eq=False)
class _Life:
    session: Session
    turn: int = 0
    context: int = 0


class Simulation:
    def __init__(
        self, trace: Trace, hardware: Hardware, engines: int, arm: Arm, incidents: Incidents | None = None
    ) -> None:
        self._trace, self._arm, self._incidents = trace, arm, incidents or Incidents()
        self._clock = Clock()
        self._policy = arm.policy(self._clock)
        self._engines = [
            SimEngine(
                f"engine-{index}",
                _slowed(hardware, index, self._incidents.slow),
                trace.system_tokens,
                trace.group_tokens,
            )
            for index in range(engines)
        ]
        self._alive = {engine.name: engine for engine in self._engines}
        self._pending = deque(trace.sessions)
        self._lives: dict[str, _Life] = {}
        self._placed: dict[str, tuple[str, GenerationRequest]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._homeless: list[_Life] = []
        self._waiting: dict[str, _Life] = {}
        self._share = AimdShare() if arm.aimd else None
        self._book = AdmissionState(math.inf)
        self._reuse = PrefixReuse()
        self._sampled = self._ended = 0
        self._late_from: dict[str, int] = {}

    def run(self) -> Result:
        self._arm_incidents()
        if self._share is not None:
            self._look()
        self._start_sessions()
        while self._lives or self._pending:
            engine = min(self._alive.values(), key=lambda one: one.next_event)
            timer = self._timers[0][0] if self._timers else math.inf
            if math.isinf(min(engine.next_event, timer)):
                raise RuntimeError(f"stuck at {self._clock.now:.1f} s with {len(self._lives)} sessions open")
            if timer <= engine.next_event:
                self._clock.now, _, act = heapq.heappop(self._timers)
                act()
            else:
                self._clock.now = engine.next_event
                for call in engine.advance():
                    self._finished(call)
        return self._result()

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._timers, (self._clock.now + seconds, self._count, act))

    def _arm_incidents(self) -> None:
        incidents = self._incidents
        if incidents.kill is not None:
            when, index = incidents.kill
            self._after(when, lambda: self._kill(self._engines[index]))
        if incidents.join is not None:
            late = self._engines[-1]
            del self._alive[late.name]
            self._after(incidents.join, lambda: self._join(late))
        for when in incidents.epochs:
            self._after(when, self._new_weights)

    def _start_sessions(self) -> None:
        while self._pending and len(self._lives) < self._arm.live:
            session = self._pending.popleft()
            life = self._lives[session.id] = _Life(session, context=self._trace.prompt_tokens)
            self._ask(life)
        self._admit()

    def _ask(self, life: _Life) -> None:
        if self._share is None:
            self._send(life)
            return
        private = life.context - self._trace.prompt_tokens
        if self._book.request_turn(life.session.id, private, group=life.session.group, shared=self._trace.group_tokens):
            self._send(life)
        else:
            self._waiting[life.session.id] = life

    def _admit(self) -> None:
        if self._share is not None:
            for session in self._book.admit():
                self._reuse.forget_context(session)  # as the pool does for who had to wait
                self._send(self._waiting.pop(session))

    def _send(self, life: _Life) -> None:
        if not self._alive:
            self._homeless.append(life)
            return
        session, turn = life.session, life.session.turns[life.turn]
        request = model_call(f"{session.id}/{life.turn}", session.id, life.context, group=session.group)
        name = self._policy.choose(request, list(self._alive))
        self._placed[session.id] = (name, request)
        self._reuse.begin_call(request, name)
        self._alive[name].submit(
            Call(session.id, session.group, life.context, turn.output, self._clock.now), self._clock.now
        )

    def _finished(self, call: Call) -> None:
        life = self._lives[call.session]
        name, request = self._placed.pop(call.session)
        self._policy.release(
            request, name, CallOutcome(sampled_tokens=call.output, cached_tokens=min(call.cached, call.prompt))
        )
        turn = life.session.turns[life.turn]
        self._reuse.end_call(request, name, call.output)
        self._sampled += call.output
        life.context += turn.output + turn.observation
        life.turn += 1
        if life.turn < len(life.session.turns):
            self._after(turn.tool_seconds, lambda: (self._ask(life), self._admit())[0])
            return
        self._policy.forget_session(call.session)
        self._reuse.forget_session(call.session)
        self._ended += 1
        del self._lives[call.session]
        self._book.remove_session(call.session)
        self._start_sessions()

    def _look(self) -> None:
        assert self._share is not None
        loads = {engine.name: engine.load() for engine in self._alive.values()}
        for name, load in loads.items():
            self._policy.observe_load(name, load)
        used_up = self._book.waiting > 0
        share = self._share.update_share(
            loads, self._reuse.reusable_tokens_on(loads), is_used_up=used_up, now=self._clock.now
        )
        self._book.budget = share * sum(load.kv_capacity or 0 for load in loads.values())
        self._admit()
        if self._lives or self._pending:
            self._after(SCRAPE_SECONDS, self._look)

    def _kill(self, engine: SimEngine) -> None:
        del self._alive[engine.name]
        lost = engine.fail()
        for call in lost:
            name, request = self._placed.pop(call.session)
            self._policy.release(request, name, CallOutcome(failed=True))
        self._policy.invalidate_cache(engine.name)
        self._reuse.invalidate_cache(engine.name)
        for call in lost:
            self._send(self._lives[call.session])

    def _join(self, engine: SimEngine) -> None:
        self._alive[engine.name] = engine
        self._late_from = {one.name: one.tally.sampled for one in self._engines}
        self._after(0.0, self._wake)

    def _wake(self) -> None:
        homeless, self._homeless = self._homeless, []
        for life in homeless:
            self._send(life)

    def _new_weights(self) -> None:
        for engine in self._alive.values():
            engine.clear()
            self._policy.invalidate_cache(engine.name)
        self._reuse.invalidate_all()

    def _result(self) -> Result:
        tallies = {engine.name: engine.tally for engine in self._engines}
        late = math.nan
        if self._late_from:
            since = {name: tally.sampled - self._late_from[name] for name, tally in tallies.items()}
            late = since[self._engines[-1].name] / sum(since.values())
        return Result(
            makespan=self._clock.now,
            sampled=self._sampled,
            prompt_tokens=sum(tally.queried for tally in tallies.values()),
            hit_tokens=sum(tally.hit for tally in tallies.values()),
            finished=self._ended,
            busy={name: tally.busy for name, tally in tallies.items()},
            late_share=late,
        )


def replay(trace: Trace, hardware: Hardware, engines: int, arm: Arm, incidents: Incidents | None = None) -> Result:
    return Simulation(trace, hardware, engines, arm, incidents).run()


def _slowed(hardware: Hardware, index: int, slow: tuple[int, float] | None) -> Hardware:
    if slow is None or slow[0] != index:
        return hardware
    factor = slow[1]
    return replace(
        hardware,
        prefill_rate=hardware.prefill_rate / factor,
        step_base=hardware.step_base * factor,
        step_per_call=hardware.step_per_call * factor,
        step_per_token=hardware.step_per_token * factor,
    )
