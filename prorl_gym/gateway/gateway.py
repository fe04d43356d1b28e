"""The way of one model call, whatever its wire: read, prompt, sample, parse, remember, answer.

Every failure has an HTTP status. Clients retry differently: between Gym's own servers a status is final, its OpenAI
client retries 404, 408, 429 and 5xx (without end, when the server is Gym's own), those of OpenAI and LiteLLM 408, 409,
429 and 5xx. So what may pass by itself is 503 or 504 with ``Retry-After``; what would fail again is 400 (the caller's
fault) or 424 (the engines').
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol
from uuid import uuid4

from fastapi import HTTPException
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from prorl_gym.errors import ConfigError, EngineError, FailureKind, LimitReached
from prorl_gym.gateway.answer import AnswerFormat, CompletedTurn
from prorl_gym.gateway.model_call import GatewayOptions, ModelCall, SamplingParams
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.protocol import EngineOverloaded, GenerationRequest, GenerationResult
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.prompt_builder import BuiltPrompt, PromptBuilder, PromptOrigin
from prorl_gym.inference.tokens.segment_cache import SegmentCache
from prorl_gym.inference.tokens.transcript import ThinkingMode
from prorl_gym.inference.tokens.turn import ParsedTurn, SampledTurn, derive_seed, read_turn, sample_turn
from prorl_gym.left_out import left_out_counts
from prorl_gym.logs import redact

log = logging.getLogger(__name__)

MAX_IDLE = 10_000
"""Idle sessions kept at once, however recent their last call."""

RETRY_SECONDS = 1
"""Where no engine named a time: the pool has waited already."""

_MAX_RETRY_SECONDS = 60
"""OpenAI's client ignores longer times."""

_STATUS = {
    FailureKind.ENGINE_UNREACHABLE: 503,
    FailureKind.ENGINE_OVERLOADED: 503,
    FailureKind.ENGINE_TIMEOUT: 504,
    FailureKind.ENGINE_REFUSED: 424,
    FailureKind.ENGINE_CONTRACT: 424,
    FailureKind.TEMPLATE_UNSAFE: 400,  # the template passed the check at the start: it refuses this conversation
}

_BUCKETS = (0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800)


class Wire(Protocol):
    """How one API spells calls and answers; its module implements it."""

    def normalize_body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a body whose history holds only fields that ``read_call`` reads. Raises ``ConfigError``."""
        ...

    def read_call(
        self, params: Mapping[str, Any], options: GatewayOptions, template_options: Mapping[str, Any]
    ) -> ModelCall:
        """Read the parameters of a call. Raises ``ConfigError`` for what this server does not do."""
        ...

    def write_answer(self, turn: CompletedTurn, params: Mapping[str, Any], form: AnswerFormat) -> dict[str, Any]: ...


class Gateway:
    """Answers model calls from one pool of engines, which ``running`` opens. ``thinking``: see ``transcript``."""

    def __init__(
        self, pool: EnginePool, codec: ChatCodec, options: GatewayOptions, thinking: ThinkingMode = "keep"
    ) -> None:
        self._pool = pool
        self._codec = codec
        self._options = options
        self._form = AnswerFormat(
            options.model, codec, options.return_token_id_information, options.uses_reasoning_parser
        )
        self._cache = SegmentCache(options.memory_tokens)
        self._prompt_builder = PromptBuilder(codec, self._cache, thinking)
        self._sessions = SessionTracker(pool.forget_session, options.session_idle_seconds)
        self._metrics = _Metrics()
        self._stop_token_ids = tuple(sorted(codec.end_ids))

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Hold the pool open. Engines may still be loading: their health is checked in the background."""
        async with self._pool, asyncio.TaskGroup() as tasks:
            health_check = tasks.create_task(self._pool.check_health())
            yield
            health_check.cancel()
            self._sessions.close()

    @contextmanager
    def answering(self, route: str) -> Generator[None]:
        """Count one call of a route and turn its errors into an ``HTTPException`` each, without keys in its text."""
        with self._metrics.track_call(route):
            try:
                yield
            except ConfigError as error:
                raise HTTPException(400, redact(str(error))) from None
            except EngineError as error:
                status = _STATUS.get(error.kind, 500)
                named = error.retry_after if isinstance(error, EngineOverloaded) else None
                seconds = min(max(ceil(named or 0.0), RETRY_SECONDS), _MAX_RETRY_SECONDS)
                headers = {"Retry-After": str(seconds)} if status in (503, 504) else None
                raise HTTPException(status, redact(str(error)), headers) from None

    async def answer(self, wire: Wire, params: Mapping[str, Any], session_id: str) -> dict[str, Any]:
        """Make one model call; return its answer. To be awaited within ``answering``.

        Calls of one session meet the same engine. Raises ``ConfigError``: the call needs something that is not
        supported; ``EngineError``: no engine could answer, or the template refuses the conversation;
        ``HTTPException``: the call took too long, or the context is full, where that is to be an error.
        """
        call = wire.read_call(params, self._options, self._codec.template_options)
        limit = self._options.call_seconds
        try:
            async with asyncio.timeout(limit):
                turn = await self._make_turn(call, session_id)
        except TimeoutError:
            reason = f"the call took longer than {limit:g} s (waits for engines included)."
            retry = {"Retry-After": str(RETRY_SECONDS)}
            raise HTTPException(504, f"{reason}\nAdd engines, or raise 'call_seconds'.", retry) from None
        return wire.write_answer(turn, params, self._form)

    async def tokenize(self, wire: Wire, params: Mapping[str, Any], session_id: str) -> dict[str, Any]:
        """Return the ids that the next call with these parameters would send. Raises as ``answer``."""
        call = wire.read_call(params, self._options, self._codec.template_options)
        return self._tokens((await self._build_prompt(call, session_id)).ids)

    def tokenize_text(self, text: str) -> dict[str, Any]:
        """Return the ids of a text, as in the answer to ``tokenize``."""
        return self._tokens(self._codec.tokenizer.encode_untrusted(text))

    def metrics_page(self) -> bytes:
        return self._metrics.render_page(self._pool, sessions=len(self._sessions), memory_tokens=self._cache.tokens)

    async def _make_turn(self, call: ModelCall, caller: str) -> CompletedTurn:
        prompt = await self._build_prompt(call, caller)
        self._metrics.prompts.labels(prompt.origin.value).inc()
        if prompt.origin.starts_segment:
            log.warning(
                "a conversation of %d messages is rendered again (%s): trainers see a new segment.\n"
                "Send items back as they came, with their token fields.",
                *(len(call.entries), prompt.origin.value),
            )
        session_id = prompt.session_id or caller
        try:
            sampled = await self._sample(session_id, prompt, call.sampling)
        except LimitReached:
            if self._options.propagate_context_overflow_errors:
                # Harnesses recognize a full context by this text.
                context, count = self._pool.max_model_len, len(prompt.ids)
                known = f" is {context} tokens" if context else " is exceeded"
                reason = f"This model's maximum context length{known}; the messages have {count} tokens."
                raise HTTPException(400, reason) from None
            # Agents end on an empty answer with the reason "length".
            return CompletedTurn(call, prompt, SampledTurn(), ParsedTurn("", ""))
        parsed = read_turn(
            *(self._codec, sampled, call.tools),
            may_call_tools=call.may_call_tools,
            single_tool_call=call.single_tool_call,
        )
        self._metrics.count_tokens(prompt=len(prompt.ids), cached=sampled.cached_tokens, sampled=len(sampled.token_ids))
        self._prompt_builder.remember_turn(prompt, session_id, parsed.as_message(), sampled.token_ids)
        return CompletedTurn(call, prompt, sampled, parsed)

    async def _build_prompt(self, call: ModelCall, caller: str) -> BuiltPrompt:
        return await self._prompt_builder.build_prompt(
            call.entries, call.tools, caller, single_tool_call=call.single_tool_call
        )

    async def _sample(self, session_id: str, prompt: BuiltPrompt, sampling: SamplingParams) -> SampledTurn:
        """Sample one turn. Raises ``LimitReached``: the context has no room for a single token; ``EngineError``."""
        turn = SampledTurn(prompt_ids=prompt.ids)

        def tokens_left() -> int:
            wanted, context = sampling.max_tokens - len(turn.token_ids), self._pool.max_model_len
            return wanted if context is None else min(wanted, context - len(prompt.ids) - len(turn.token_ids))

        async def call(max_tokens: int) -> GenerationResult:
            request = GenerationRequest(
                request_id=uuid4().hex,
                session_id=session_id,
                prompt_ids=[*prompt.ids, *turn.token_ids],
                max_tokens=max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop_token_ids=self._stop_token_ids,
                # A call that continues a turn must not draw the same numbers again.
                seed=derive_seed(sampling.seed, 0, 0, len(turn.token_ids)) if turn.token_ids else sampling.seed,
                group_id=prompt.group_id,
                conversation=self._codec.rewrite_conversation(prompt.conversation),
            )
            result = await self._pool.generate(request)
            turn.append_result(result)
            return result

        with self._sessions.track_call(session_id):
            try:
                turn.finish_reason = await sample_turn(call, turn.token_ids, tokens_left, self._stop_token_ids)
            except LimitReached:
                if not turn.token_ids:
                    raise
        return turn

    def _tokens(self, ids: list[int]) -> dict[str, Any]:
        return {"count": len(ids), "max_model_len": self._pool.max_model_len, "tokens": ids}


@dataclass(slots=True)
class _Session:
    calls: int = 0
    idle_since: float = 0.0
    """End of its last call, on the loop's clock."""


class SessionTracker:
    """Counts the calls of sessions and expires those without one for ``idle_seconds``.

    A session holds a place near its cached prefix, and counts against what the engines' caches hold. A rollout of ours
    gives both up when it ends; other agents just stop calling. If an expired session was not over, it has lost only its
    place: its next call makes it a new session.
    """

    def __init__(self, on_expire: Callable[[str], None], idle_seconds: float) -> None:
        self._on_expire = on_expire
        self._idle_seconds = idle_seconds
        self._busy: dict[str, _Session] = {}
        self._idle: OrderedDict[str, _Session] = OrderedDict()
        """Longest idle first."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._busy) + len(self._idle)

    @contextmanager
    def track_call(self, session_id: str) -> Generator[None]:
        """Keep a session alive during a call."""
        session = self._busy.get(session_id) or self._idle.pop(session_id, None) or _Session()
        self._busy[session_id] = session
        session.calls += 1
        try:
            yield
        finally:
            session.calls -= 1
            if not session.calls:
                session.idle_since = asyncio.get_running_loop().time()
                self._idle[session_id] = self._busy.pop(session_id)
                if len(self._idle) > MAX_IDLE:
                    self._expire(next(iter(self._idle)))
                self._set_timer()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self, session_id: str) -> None:
        del self._idle[session_id]
        self._on_expire(session_id)

    def _set_timer(self) -> None:
        """Set the one timer to the moment at which the longest idle session expires."""
        if self._timer is None and self._idle:
            due = next(iter(self._idle.values())).idle_since + self._idle_seconds
            self._timer = asyncio.get_running_loop().call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for session_id, session in list(self._idle.items()):
            if session.idle_since + self._idle_seconds > now:
                break
            self._expire(session_id)
        self._set_timer()


class _Metrics:
    """The gateway's page of metrics, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = known = CollectorRegistry()
        self._calls = Counter("prorl_model_calls", "Calls answered.", ["route", "status"], registry=known)
        self._seconds = Histogram(
            "prorl_model_call_seconds", "Time of a call.", ["route"], buckets=_BUCKETS, registry=known
        )
        self._in_flight = Gauge("prorl_model_calls_in_flight", "Calls not answered yet.", registry=known)
        self.prompts = Counter(
            "prorl_model_prompts",
            "Prompts by origin: first and extended are exact, all others were rendered again.",
            ["origin"],
            registry=known,
        )
        self._tokens = Counter("prorl_model_tokens", "Tokens, by what they are.", ["kind"], registry=known)
        self._sessions = Gauge("prorl_model_sessions", "Sessions with a call not long ago.", registry=known)
        self._memory = Gauge("prorl_model_memory_tokens", "Token ids kept of recent turns.", registry=known)
        self._engines = Gauge("prorl_model_engines", "Engines.", ["state"], registry=known)
        self._failovers = Gauge("prorl_model_failovers_total", "Calls retried on another engine.", registry=known)
        left_out = Gauge("prorl_model_left_out_total", "Fields of calls that are not known.", registry=known)
        left_out.set_function(lambda: sum(left_out_counts().values()))
        for origin in PromptOrigin:
            self.prompts.labels(origin.value)  # so that the page shows 0 before the first of them

    @contextmanager
    def track_call(self, route: str) -> Generator[None]:
        status = 200
        with self._in_flight.track_inprogress(), self._seconds.labels(route).time():
            try:
                yield
            except BaseException as error:
                status = error.status_code if isinstance(error, HTTPException) else 500
                raise
            finally:
                self._calls.labels(route, str(status)).inc()

    def count_tokens(self, *, prompt: int, cached: int, sampled: int) -> None:
        for kind, count in (("prompt", prompt), ("cached", cached), ("sampled", sampled)):
            self._tokens.labels(kind).inc(count)

    def render_page(self, pool: EnginePool, *, sessions: int, memory_tokens: int) -> bytes:
        healthy = len(pool.healthy)
        self._sessions.set(sessions)
        self._memory.set(memory_tokens)
        self._engines.labels("well").set(healthy)
        self._engines.labels("not_well").set(len(pool.engines) - healthy)
        self._failovers.set(pool.failovers)
        return generate_latest(self._registry)
