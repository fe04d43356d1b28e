"""The way of one model call, whatever its wire: read, prompt, sample, parse, remember, answer."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol
from uuid import uuid4

from prorl_gym.errors import ConfigError, EngineError, LimitReached
from prorl_gym.gateway.answer import AnswerFormat, CompletedTurn
from prorl_gym.gateway.http_errors import context_length_error, http_error, timeout_error
from prorl_gym.gateway.metrics import GatewayMetrics
from prorl_gym.gateway.model_call import GatewayOptions, ModelCall, SamplingParams
from prorl_gym.gateway.session_tracker import SessionTracker
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.prompt_builder import BuiltPrompt, PromptBuilder
from prorl_gym.inference.tokens.segment_cache import SegmentCache
from prorl_gym.inference.tokens.transcript import ThinkingMode
from prorl_gym.inference.tokens.turn import (
    ParsedTurn,
    SampledTurn,
    derive_seed,
    from_text_turn,
    parse_sampled,
    parse_without_calls,
    sample_turn,
)

log = logging.getLogger(__name__)


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

    def write_answer(self, turn: CompletedTurn, params: Mapping[str, Any], form: AnswerFormat) -> dict[str, Any]:
        """Return the body of the answer."""
        ...


class Gateway:
    """Answers model calls from one pool of engines.

    Args:
        pool: engines of the policy, opened by ``running``.
        codec: tokenizer and chat template that these engines serve.
        options: see there.
        thinking: what happens to earlier thoughts at a new user turn. See ``transcript``.
    """

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
        self._metrics = GatewayMetrics()
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
        """Count one call of a route and turn its errors into an ``HTTPException`` each."""
        with self._metrics.track_call(route):
            try:
                yield
            except (ConfigError, EngineError) as error:
                raise http_error(error) from None

    async def answer(self, wire: Wire, params: Mapping[str, Any], session_id: str) -> dict[str, Any]:
        """Make one model call; return its answer. To be awaited within ``answering``.

        Args:
            wire: of the call.
            params: its parameters, without what was left out.
            session_id: of the caller; calls of one session meet the same engine.

        Raises:
            ConfigError: the call needs something that is not supported.
            EngineError: no engine could answer, or the template refuses the conversation.
            HTTPException: the call took too long; the context is full, where that is to be an error.
        """
        call = wire.read_call(params, self._options, self._codec.template_options)
        try:
            async with asyncio.timeout(self._options.call_seconds):
                turn = await self._make_turn(call, session_id)
        except TimeoutError:
            raise timeout_error(self._options.call_seconds) from None
        return wire.write_answer(turn, params, self._form)

    async def tokenize(self, wire: Wire, params: Mapping[str, Any], session_id: str) -> dict[str, Any]:
        """Return the ids that the next call with these parameters would send. Raises as ``answer``."""
        call = wire.read_call(params, self._options, self._codec.template_options)
        return self._tokens((await self._build_prompt(call, session_id)).ids)

    def tokenize_text(self, text: str) -> dict[str, Any]:
        """Return the ids of a text, as in the answer to ``tokenize``."""
        return self._tokens(self._codec.tokenizer.encode_untrusted(text))

    def metrics_page(self) -> bytes:
        """Return the metrics in Prometheus' text form."""
        return self._metrics.render_page(self._pool, sessions=len(self._sessions), memory_tokens=self._cache.tokens)

    async def _make_turn(self, call: ModelCall, caller: str) -> CompletedTurn:
        prompt = await self._build_prompt(call, caller)
        self._metrics.count_prompt(prompt.origin)
        if prompt.origin.starts_segment:
            log.warning(
                "a conversation of %d messages is rendered anew (%s): trainers see a new segment.\n"
                "Send items back as they came, with their token fields.",
                *(len(call.entries), prompt.origin.value),
            )
        session_id = prompt.session_id or caller
        try:
            sampled = await self._sample(session_id, prompt, call.sampling)
        except LimitReached:
            if self._options.propagate_context_overflow_errors:
                raise context_length_error(len(prompt.ids), self._pool.max_model_len) from None
            # Agents end on an empty answer with the reason "length".
            return CompletedTurn(call, prompt, SampledTurn(), ParsedTurn("", ""))
        parsed = self._parse(call, sampled)
        self._metrics.count_tokens(prompt=len(prompt.ids), cached=sampled.cached_tokens, sampled=len(sampled.token_ids))
        self._prompt_builder.remember_turn(prompt, session_id, parsed.as_message(), sampled.token_ids)
        return CompletedTurn(call, prompt, sampled, parsed)

    async def _build_prompt(self, call: ModelCall, caller: str) -> BuiltPrompt:
        return await self._prompt_builder.build_prompt(
            call.entries, call.tools, caller, single_tool_call=call.single_tool_call
        )

    async def _sample(self, session_id: str, prompt: BuiltPrompt, sampling: SamplingParams) -> SampledTurn:
        """Sample one turn.

        Raises:
            LimitReached: the context has no room for a single token.
            EngineError: no engine could answer.
        """
        turn = SampledTurn()

        def tokens_left() -> int:
            wanted, context = sampling.max_tokens - len(turn.token_ids), self._pool.max_model_len
            return wanted if context is None else min(wanted, context - len(prompt.ids) - len(turn.token_ids))

        async def call(max_tokens: int) -> GenerationResult:
            result = await self._pool.generate(self._request(session_id, prompt, sampling, turn, max_tokens))
            turn.append_result(result)
            return result

        with self._sessions.track_call(session_id):
            try:
                turn.finish_reason = await sample_turn(call, turn.token_ids, tokens_left, self._stop_token_ids)
            except LimitReached:
                if not turn.token_ids:
                    raise
        return turn

    def _request(
        self, session_id: str, prompt: BuiltPrompt, sampling: SamplingParams, turn: SampledTurn, max_tokens: int
    ) -> GenerationRequest:
        return GenerationRequest(
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
            conversation=prompt.conversation,
        )

    def _parse(self, call: ModelCall, sampled: SampledTurn) -> ParsedTurn:
        if sampled.text_turn is not None:
            parsed = from_text_turn(sampled.text_turn)
        elif call.may_call_tools:
            parsed = parse_sampled(self._codec, sampled.token_ids, call.tools)
        else:
            parsed = parse_without_calls(self._codec, sampled.token_ids)
        return parsed.with_first_call() if call.single_tool_call else parsed

    def _tokens(self, ids: list[int]) -> dict[str, Any]:
        return {"count": len(ids), "max_model_len": self._pool.max_model_len, "tokens": ids}
