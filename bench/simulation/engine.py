"""A simulated engine: continuous batching, a prefix cache counted exactly, preemption. No time passes but simulated.

Contexts only ever grow, so what an engine has cached of a session is a number: so many tokens of its private tail,
behind the prompts that it shares with its group and with all. Decode steps between two events are taken at once, in
closed form, which makes a run of some thousand calls a matter of a second.
"""

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass, field

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.protocol import EngineHealth, GenerationRequest, GenerationResult
from prorl_gym.records import EngineLoad

BLOCK = 16
"""Tokens per block of the KV cache."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One engine. Seconds and tokens; the decode figures are a published fit of a real one."""

    kv_tokens: int
    prefill_rate: float = 8000.0
    prefill_chunk: int = 2048
    """Prompt tokens that one step takes in at most."""
    step_base: float = 10.6e-3
    step_per_call: float = 0.42e-3
    step_per_token: float = 0.142e-6
    max_running: int = 256


@dataclass(slots=True, eq=False)
class Call:
    """One model call on its way through an engine."""

    session: str
    group: str
    prompt: int
    output: int
    asked: float
    cached: int = 0
    to_prefill: int = 0
    sampled: int = 0
    counted: bool = False
    """Whether its prompt has been counted as looked up: a preempted call is not counted twice."""

    @property
    def context(self) -> int:
        return self.prompt + self.sampled


def model_call(
    name: str, session: str, prompt: int, *, output: int = 2048, group: str = "", priority: int = 0
) -> GenerationRequest:
    """Return a call with a prompt of so many tokens, whose ids mean nothing."""
    return GenerationRequest(
        request_id=name,
        session_id=session,
        prompt_ids=range(prompt),
        max_tokens=output,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        stop_token_ids=(),
        priority=priority,
        group_id=group,
    )


@dataclass(slots=True)
class EngineStats:
    queried: int = 0
    hit: int = 0
    prefilled: int = 0
    sampled: int = 0
    preemptions: int = 0
    calls: int = 0
    busy: float = 0.0


@dataclass(slots=True)
class _Steps:
    """Steps that are under way: ``count`` equal ones, growing by ``slope`` each."""

    began: float
    count: int
    first: float
    slope: float
    prefill: list[tuple[Call, int]] = field(default_factory=list[tuple[Call, int]])

    def until(self, count: int) -> float:
        return count * self.first + self.slope * count * (count - 1) / 2

    @property
    def end(self) -> float:
        return self.began + self.until(self.count)

    def cut(self, now: float) -> None:
        """Keep only what has begun by now: a new call is taken in at the next step."""
        passed = now - self.began
        low, high = 1, self.count
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.until(middle) >= passed else (middle + 1, high)
        self.count = low


class SimEngine:
    def __init__(self, name: str, hardware: Hardware, system_tokens: int, group_tokens: int) -> None:
        self.name = name
        self.tally = EngineStats()
        self._hardware = hardware
        self._system, self._group = system_tokens, group_tokens
        self._waiting: deque[Call] = deque()
        self._prefilling: list[Call] = []
        self._decoding: list[Call] = []
        self._steps: _Steps | None = None
        self.clear()

    def clear(self) -> None:
        """Forget everything that is cached and not in use: the weights have changed."""
        self._tails: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        """Sessions with something resident, per group whose prompt is."""
        self._idle: OrderedDict[str, str] = OrderedDict()
        """Sessions that are resident and not in use, the least recently used first, with their groups."""
        self._system_resident = False
        self._used = 0
        for call in (*self._prefilling, *self._decoding):
            self._hold(call)

    @property
    def next_event(self) -> float:
        """When something happens next, if nothing is asked before."""
        return math.inf if self._steps is None else self._steps.end

    def load(self) -> EngineLoad:
        pinned = self._used - sum(self._tails[session] for session in self._idle)
        return EngineLoad(
            running=len(self._prefilling) + len(self._decoding),
            waiting=len(self._waiting),
            kv_usage=min(1.0, pinned / self._hardware.kv_tokens) if self._in_use else 0.0,
            kv_capacity=self._hardware.kv_tokens,
            preemptions=self.tally.preemptions,
            prefix_queries=self.tally.queried,
            prefix_hits=self.tally.hit,
        )

    def submit(self, call: Call, now: float) -> None:
        self.tally.calls += 1
        self._waiting.append(call)
        if self._steps is None:
            self._plan(now)
        else:
            self._steps.cut(now)

    def advance(self) -> list[Call]:
        """Do what happens at ``next_event``; return the calls that are done."""
        steps = self._steps
        assert steps is not None
        now = steps.end
        self.tally.busy += now - steps.began
        for call, tokens in steps.prefill:
            call.to_prefill -= tokens
            self.tally.prefilled += tokens
        for call in self._decoding:
            call.sampled += steps.count
            self._grow(call, steps.count)
        self.tally.sampled += steps.count * len(self._decoding)
        done = [call for call in self._decoding if call.sampled >= call.output]
        self._decoding = [call for call in self._decoding if call.sampled < call.output]
        for call in done:
            self._idle[call.session] = call.group
        ready = [call for call in self._prefilling if call.to_prefill == 0]
        self._prefilling = [call for call in self._prefilling if call.to_prefill > 0]
        self._decoding += ready
        self._plan(now)
        return done

    def fail(self) -> list[Call]:
        lost = [*self._decoding, *self._prefilling, *self._waiting]
        self._decoding, self._prefilling, self._steps = [], [], None
        self._waiting.clear()
        self.clear()
        return lost

    @property
    def _in_use(self) -> bool:
        return bool(self._prefilling or self._decoding)

    def _plan(self, now: float) -> None:
        self._admit()
        self._make_room(len(self._decoding))
        self._admit()  # a preemption may have emptied the engine
        if not self._in_use:
            self._steps = None
            return
        batch, tokens = len(self._decoding), sum(call.context for call in self._decoding)
        hardware = self._hardware
        first = hardware.step_base + hardware.step_per_call * batch + hardware.step_per_token * tokens
        if self._prefilling:
            chunk = self._chunk()
            seconds = sum(amount for _, amount in chunk) / hardware.prefill_rate
            self._steps = _Steps(now, 1, (first if batch else 0.0) + seconds, 0.0, chunk)
            return
        room = hardware.kv_tokens - self._used + sum(self._tails[session] for session in self._idle)
        count = min(min(call.output - call.sampled for call in self._decoding), max(1, room // batch))
        self._make_room(count * batch)
        self._steps = _Steps(now, count, first, hardware.step_per_token * batch)

    def _chunk(self) -> list[tuple[Call, int]]:
        budget, chunk = self._hardware.prefill_chunk, list[tuple[Call, int]]()
        for call in self._prefilling:
            amount = min(budget, call.to_prefill)
            chunk.append((call, amount))
            budget -= amount
            if not budget:
                break
        return chunk

    def _admit(self) -> None:
        """Start waiting calls in their order, while there is room for the whole prompt of the next one."""
        while self._waiting and len(self._prefilling) + len(self._decoding) < self._hardware.max_running:
            call = self._waiting[0]
            cached = self._cached(call)
            self._idle.pop(call.session, None)  # its own tail is not to be evicted for it
            if not self._evict_for(self._new_tokens(call)) and self._in_use:
                if self._tails.get(call.session):
                    self._idle[call.session] = call.group
                    self._idle.move_to_end(call.session, last=False)
                return
            self._waiting.popleft()
            call.cached = cached
            call.to_prefill = max(1, call.context - cached)  # the last token is always computed
            if not call.counted:
                call.counted = True
                self.tally.queried += call.prompt
                self.tally.hit += min(cached, call.prompt)
            self._hold(call)
            self._prefilling.append(call)

    def _cached(self, call: Call) -> int:
        """Tokens of the call's context that are resident, in whole blocks."""
        if call.group in self._groups:
            found = self._system + self._group + self._tails.get(call.session, 0)
        else:
            found = self._system if self._system_resident else 0
        return min(found, call.context) // BLOCK * BLOCK

    def _new_tokens(self, call: Call) -> int:
        shared = 0 if call.group in self._groups else self._group
        shared += 0 if self._system_resident else self._system
        return shared + call.context - self._system - self._group - self._tails.get(call.session, 0)

    def _hold(self, call: Call) -> None:
        if not self._system_resident:
            self._system_resident = True
            self._used += self._system
        tail = call.context - self._system - self._group
        if call.session not in self._tails:
            if call.group not in self._groups:
                self._groups[call.group] = 0
                self._used += self._group
            self._groups[call.group] += 1
            self._tails[call.session] = 0
        self._used += tail - self._tails[call.session]
        self._tails[call.session] = tail
        self._idle.pop(call.session, None)

    def _grow(self, call: Call, tokens: int) -> None:
        self._tails[call.session] += tokens
        self._used += tokens

    def _make_room(self, tokens: int) -> None:
        """Evict idle tails; when that is not enough, throw out the call that came last."""
        while not self._evict_for(tokens) and len(self._decoding) > 1:
            call = max(self._decoding, key=lambda one: one.asked)
            self._decoding.remove(call)
            self._release(call.session, call.group)
            self._waiting.appendleft(call)
            self.tally.preemptions += 1

    def _evict_for(self, tokens: int) -> bool:
        """Drop tails of idle sessions, least recently used first and from their ends; whether there is room now."""
        missing = self._used + tokens - self._hardware.kv_tokens
        while missing > 0 and self._idle:
            session, group = next(iter(self._idle.items()))
            cut = min(self._tails[session], -(-missing // BLOCK) * BLOCK)
            self._tails[session] -= cut
            self._used -= cut
            if not self._tails[session]:
                del self._idle[session]
                self._release(session, group)
            missing = self._used + tokens - self._hardware.kv_tokens
        return missing <= 0

    def _release(self, session: str, group: str) -> None:
        self._used -= self._tails.pop(session)
        self._groups[group] -= 1
        if not self._groups[group]:
            del self._groups[group]
            self._used -= self._group


class LoopEngine:
    """Implements ``PoolEngine``: a simulated engine that lives on the running event loop's clock.

    A call that is cancelled is sampled to its end all the same, for nobody: a real engine frees it earlier.
    """

    def __init__(self, sim: SimEngine) -> None:
        self.version = 0
        self.is_down = False
        """Calls and health checks fail."""
        self.sim = sim
        self._calls: dict[Call, asyncio.Future[bool]] = {}
        """Calls in hand; the result says whether it was sampled to its end."""
        self._sessions: dict[str, asyncio.Future[None]] = {}
        """Ends of the calls in hand, also of abandoned ones, by session."""
        self._by_request: dict[str, Call] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._context = copy_context()  # its timers are its own, not those of the caller of the moment

    @property
    def name(self) -> str:
        return self.sim.name

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See ``Engine.generate``: exactly ``max_tokens`` are sampled, none of a call that is cancelled."""
        loop = asyncio.get_running_loop()
        self._require_up()
        self._catch_up()
        while (earlier := self._sessions.get(request.session_id)) is not None:  # its caller has gone
            await asyncio.wait({earlier})
            self._require_up()
        self._sessions[request.session_id] = loop.create_future()
        call = Call(request.session_id, request.group_id, len(request.prompt_ids), request.max_tokens, loop.time())
        done = self._calls[call] = loop.create_future()
        self._by_request[request.request_id] = call
        self.sim.submit(call, loop.time())
        self._arm()
        try:
            sampled = call.output if await done else 0
        finally:
            self._by_request.pop(request.request_id, None)
        return GenerationResult(
            token_ids=[0] * sampled,
            logprobs=[0.0] * sampled,
            finish_reason="stop" if sampled else "abort",
            logprob_kind="raw",
            engine=self.name,
            versions=[self.version] * sampled,
            seconds=loop.time() - call.asked,
            cached_tokens=min(call.cached, call.prompt),
        )

    async def cancel(self, request_id: str) -> None:
        call = self._by_request.get(request_id)
        if call is not None and not self._calls[call].done():
            self._calls[call].set_result(False)

    def fail(self) -> None:
        self.is_down = True
        for call in self.sim.fail():
            if not (done := self._pop_call(call)).done():
                done.set_exception(self._down_error())
        self._arm()

    def restart(self) -> None:
        self.is_down = False

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=not self.is_down, detail="it is down" if self.is_down else "")

    async def close(self) -> None:
        """See ``Engine.close``; the engine itself goes on."""

    async def sample_trial(self, seconds: float) -> float:
        self._require_up()
        return 0.0

    async def read_load(self) -> EngineLoad | None:
        return None if self.is_down else self.sim.load()

    async def probe_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return [0.0] * (len(token_ids) - 1)

    async def reset_prefix_cache(self) -> bool:
        self.sim.clear()
        return True

    def _require_up(self) -> None:
        if self.is_down:
            raise self._down_error()

    def _down_error(self) -> EngineError:
        return EngineError(FailureKind.ENGINE_UNREACHABLE, f"engine {self.name}: it is down.")

    def _catch_up(self) -> None:
        now = asyncio.get_running_loop().time()
        while self.sim.next_event <= now:
            for call in self.sim.advance():
                if not (done := self._pop_call(call)).done():
                    done.set_result(True)

    def _pop_call(self, call: Call) -> asyncio.Future[bool]:
        self._sessions.pop(call.session).set_result(None)
        return self._calls.pop(call)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        when, self._timer = self.sim.next_event, None
        if not math.isinf(when):
            self._timer = asyncio.get_running_loop().call_at(when, self._on_time, context=self._context)

    def _on_time(self) -> None:
        self._catch_up()
        self._arm()
