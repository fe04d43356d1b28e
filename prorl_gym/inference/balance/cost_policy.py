"""The ``cost`` policy: every call goes to the engine where it adds the fewest seconds of work to the fleet.

For each engine, it estimates the seconds that the call would add to the fleet:

- waiting until prefill of earlier calls is done, and its own prefill: only of what the engine has not cached;
- its decode steps at the size that the batch then has, and the slowing of the other calls in that batch;
- the tokens of live rollouts that it would push out of the cache: they have to be computed again.

A rollout stays on the engine of its last call, its home, unless another one is cheaper by more than ``hysteresis``, a
share of the cost at home: of many engines, one seems much cheaper at any moment. After the design studies named in
docs/engines.md: LMetric's uncached prefill times load, in seconds instead of a product of counts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from prorl_gym.inference.balance.cache_estimate import CacheEstimate, GroupPrompts
from prorl_gym.inference.protocol import CallOutcome, GenerationRequest
from prorl_gym.records import EngineLoad

_AVERAGING_CALLS = 32
"""Calls over which the learned values are averaged."""

_PACE_AVERAGING_CALLS = 128
"""The same for an engine's pace, of which single calls are a poor measure."""

_MAX_PACE_RATIO = 16.0
"""Clamp the learned pace to 1/16x..16x of the model."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of an engine's work. The defaults are a published fit of one GPU serving a mid-sized model.

    Only their proportions matter to the choice, and those little: +-30 % on each costs a few percent.
    """

    prefill_rate: float = 8000.0
    """Tokens per second."""
    step_base: float = 10.6e-3
    """Seconds of a decode step of an empty batch."""
    step_per_call: float = 0.42e-3
    """More, for each call in the batch."""
    step_per_token: float = 0.142e-6
    """More, for each token of their contexts."""
    hysteresis: float = 0.3
    """Share of the cost at home by which another engine must be cheaper."""
    initial_output_tokens: float = 200.0
    """Tokens that a call samples, until calls have shown what they do."""


@dataclass(slots=True)
class _EngineState:
    cache: CacheEstimate = field(default_factory=CacheEstimate)
    calls: int = 0
    context_tokens: int = 0
    prefill_done_at: float = 0.0
    """When the prefill of our calls will be done."""
    pace: float = 1.0
    """Seconds that its calls take for each estimated second: above 1 on an engine slower than the model."""
    per_output: float = 0.0
    """Seconds of one more call per token sampled: its own, and by slowing the others in the batch."""
    per_prompt_token: float = 0.0
    """The same, for each token of its prompt."""
    per_uncached: float = 0.0
    """Seconds for each token to be computed first, the calls that it holds up included."""
    per_displaced: float = 0.0
    """Seconds for each token of others that is evicted, and computed again."""


@dataclass(frozen=True, slots=True)
class _Reservation:
    prompt_tokens: int
    started_at: float
    prefill_seconds: float
    """Until its first token, the wait for earlier prefills included."""
    step_seconds: float
    """For each token sampled."""


class CostPolicy:
    """The ``cost`` policy; see the module. ``clock`` counts seconds."""

    def __init__(self, model: CostModel | None = None, clock: Callable[[], float] = monotonic) -> None:
        self._model = model or CostModel()
        self._clock = clock
        self._engines: dict[str, _EngineState] = {}
        self._home: dict[str, str] = {}
        self._mean_output = self._model.initial_output_tokens
        self._reservations: dict[str, _Reservation] = {}
        self._prompts = GroupPrompts()

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        """Pick the cheapest engine, or home if that costs little more, and reserve a place on it."""
        now = self._clock()
        costs = self._costs(request, healthy, now)
        best = min(costs, key=costs.__getitem__)
        home = self._home.get(request.session_id)
        if home in costs and costs[best] >= (1.0 - self._model.hysteresis) * costs[home]:
            best = home
        elif home is not None:
            self._engine(home).cache.forget_session(request.session_id)
        self._home[request.session_id] = best
        self._reserve(self._engine(best), request, now)
        return best

    def release(self, request: GenerationRequest, engine: str, outcome: CallOutcome) -> None:
        state = self._engine(engine)
        if state.calls < 1 or request.request_id not in self._reservations:
            raise ValueError(f"no reservation on engine {engine} to return")
        reservation = self._reservations.pop(request.request_id)
        state.calls -= 1
        state.context_tokens -= reservation.prompt_tokens
        self._update_prices(state)
        if outcome.failed:
            state.cache.forget_session(request.session_id)
            if self._home.get(request.session_id) == engine:
                del self._home[request.session_id]
            return
        state.cache.end_call(request.session_id, reservation.prompt_tokens + outcome.sampled_tokens)
        if outcome.sampled_tokens:
            expected = reservation.prefill_seconds + outcome.sampled_tokens * reservation.step_seconds
            ratio = (self._clock() - reservation.started_at) / expected
            state.pace += (min(_MAX_PACE_RATIO, max(1 / _MAX_PACE_RATIO, ratio)) - state.pace) / _PACE_AVERAGING_CALLS
            self._update_prices(state)
            self._mean_output += (outcome.sampled_tokens - self._mean_output) / _AVERAGING_CALLS

    def forget_session(self, session_id: str) -> None:
        home = self._home.pop(session_id, None)
        if home is not None:
            self._engine(home).cache.forget_session(session_id)
        self._prompts.forget_session(session_id)

    def invalidate_cache(self, engine: str) -> None:
        state = self._engine(engine)
        state.cache.clear()
        state.prefill_done_at = 0.0

    def in_flight(self, engine: str) -> int:
        return self._engine(engine).calls

    @property
    def tracked(self) -> int:
        return len(self._home) + self._prompts.tracked + len(self._reservations)

    def observe_load(self, engine: str, load: EngineLoad) -> None:
        self._engine(engine).cache.capacity = math.inf if load.kv_capacity is None else load.kv_capacity

    def _engine(self, name: str) -> _EngineState:
        try:
            return self._engines[name]
        except KeyError:
            state = self._engines[name] = _EngineState()
            self._update_prices(state)
            return state

    def _costs(self, request: GenerationRequest, healthy: Sequence[str], now: float) -> dict[str, float]:
        """Return the seconds that the call would add to the fleet on each engine.

        It runs before every call, over all engines, so it uses prices that were computed when an engine's load changed.
        """
        session, group, output = request.session_id, request.group_id, self._mean_output
        prompt_tokens = len(request.prompt_ids)
        engines, costs = self._engines, dict[str, float]()
        for name in healthy:
            engine = engines.get(name) or self._engine(name)
            cache = engine.cache
            uncached = prompt_tokens
            if group in cache.groups or session in cache.idle_sessions:
                uncached -= cache.cached_tokens(session, group, prompt_tokens)
            seconds = output * (engine.per_output + engine.per_prompt_token * prompt_tokens)
            seconds += engine.per_uncached * uncached
            if engine.prefill_done_at > now:
                seconds += engine.pace * (engine.prefill_done_at - now)
            overflow = cache.used + uncached + output - cache.capacity
            if overflow > 0:  # the call evicts tokens of others
                seconds += engine.per_displaced * min(uncached + output, overflow)
            costs[name] = seconds
        return costs

    def _update_prices(self, engine: _EngineState) -> None:
        """Compute the cost of a call on an engine after its load or its pace has changed."""
        model, calls = self._model, engine.calls
        step = model.step_base + model.step_per_call * (2 * calls + 1) + model.step_per_token * engine.context_tokens
        engine.per_output = engine.pace * step
        engine.per_prompt_token = engine.pace * model.step_per_token * (1 + calls)
        engine.per_displaced = engine.pace / model.prefill_rate
        engine.per_uncached = engine.per_displaced * (1 + calls)

    def _reserve(self, engine: _EngineState, request: GenerationRequest, now: float) -> None:
        model, session, group = self._model, request.session_id, request.group_id
        prompt_tokens = len(request.prompt_ids)
        uncached = prompt_tokens - engine.cache.cached_tokens(session, group, prompt_tokens)
        began = max(now, engine.prefill_done_at)
        engine.prefill_done_at = began + engine.pace * uncached / model.prefill_rate
        step = (
            model.step_base
            + model.step_per_call * (engine.calls + 1)
            + model.step_per_token * (engine.context_tokens + prompt_tokens)
        )
        prefill = began - now + uncached / model.prefill_rate
        self._reservations[request.request_id] = _Reservation(prompt_tokens, now, prefill, step)
        engine.calls += 1
        engine.context_tokens += prompt_tokens
        self._update_prices(engine)
        engine.cache.begin_call(
            session, group, prompt_tokens, self._prompts.observe_prompt(session, group, prompt_tokens)
        )
