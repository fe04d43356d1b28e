"""An engine behind HTTP, in whatever dialect its server speaks."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from uuid import uuid4

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.behaviour import BehaviourRule
from prorl_gym.inference.checks import AnswerCutShort
from prorl_gym.inference.dialect import Call, Dialect, HttpOptions
from prorl_gym.inference.faults import ContextExceeded, EngineOverloaded, ModelMissing
from prorl_gym.inference.http import Answer, Ask, Transport
from prorl_gym.inference.protocol import (
    Conversation,
    EngineHealth,
    EngineLoad,
    GenerationRequest,
    GenerationResult,
)
from prorl_gym.records import Message

log = logging.getLogger(__name__)

_HEALTH_SECONDS = 5.0
_ABORT_SECONDS = 2.0
_PROBE_SECONDS = 60.0
_TRIAL_PROMPT = (5, 6, 7)
_TRIAL_TOKENS = 16
_Sampling = tuple[float, float, int, tuple[int, ...]]
"""Temperature, top-p, top-k, stop ids."""

_NO_SUCH_ROUTE = (404, 405)


class HttpEngine:
    """One server.

    Args:
        name: for records and metrics.
        dialect: of the server.
        options: see there.
        version: policy version that its tokens are labelled with.
    """

    def __init__(self, name: str, dialect: Dialect, options: HttpOptions, *, version: int = 0) -> None:
        self.version = version
        self._name = name
        self._dialect = dialect
        self._options = options
        self._rule = options.rule or BehaviourRule(name)
        self._transport = Transport(dialect.address, options.link)
        self._running: dict[str, asyncio.Task[GenerationResult]] = {}
        self._context: int | None = None
        """In tokens; ``None`` until the server has reported it."""
        self._sampling: _Sampling = (1.0, 1.0, -1, ())
        """Of the last call: some servers refuse any other."""
        self._can_abort = True
        self._tells_pause = True

    @property
    def name(self) -> str:
        """Short name for records and metrics."""
        return self._name

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample a continuation. Cancelling the await closes the connection, which makes the server stop.

        Raises:
            EngineError: ``ENGINE_UNREACHABLE``, ``ENGINE_TIMEOUT``, ``ENGINE_OVERLOADED``, ``ENGINE_REFUSED`` or
                ``ENGINE_CONTRACT``.
            ContextExceeded: prompt and answer do not fit.
        """
        if self._dialect.logprob_kind is not None:
            self._rule.check(request, self._dialect.logprob_kind, self._dialect.address)
        self._sampling = (request.temperature, request.top_p, request.top_k, request.stop_token_ids)
        # A task of its own, so that ``cancel`` can close this connection while the caller waits for what is salvaged.
        call = asyncio.create_task(
            self._sample(request, self._options.request_seconds), name=f"call {request.request_id}"
        )
        self._running[request.request_id] = call
        try:
            await asyncio.wait({call})
        finally:
            del self._running[request.request_id]
            if not call.done():
                call.cancel()
                await asyncio.wait({call})  # the connection is closed when the cancellation goes on
        return self._aborted() if call.cancelled() else call.result()

    async def cancel(self, request_id: str) -> None:
        """Stop one call. The server then returns what it has sampled; where it cannot, the connection is closed."""
        call = self._running.get(request_id)
        if call is None:
            return
        if not (self._can_abort and await self._abort(request_id)):
            call.cancel()

    async def health(self) -> EngineHealth:
        """Ask the server how it is; one that is paused is not well. Never raises."""
        try:
            answer = await self._transport.exchange(self._dialect.health(), _HEALTH_SECONDS)
            if answer.status != 200:
                error = self._dialect.refusal(answer)
                missing = error.what if isinstance(error, ModelMissing) else ""
                return EngineHealth(ok=False, detail=str(error), unlisted=missing)
            if await self._is_paused():
                return EngineHealth(ok=False, detail=f"engine {self._dialect.address}: is paused or not ready.")
            health = self._dialect.healthy(answer.payload)
            self._context = health.max_model_len or self._context
            return health
        except EngineError as error:
            return EngineHealth(ok=False, detail=str(error))

    async def sample_some(self, seconds: float) -> float:
        """Sample a few tokens for a short prompt of its own; return the seconds that each of them took.

        Raises:
            EngineError: as ``generate``.
        """
        vocab_size = self._dialect.checks.vocab_size
        temperature, top_p, top_k, stop_token_ids = self._sampling
        request = GenerationRequest(
            request_id=uuid4().hex,
            session_id="trial",
            prompt_ids=[token % vocab_size for token in _TRIAL_PROMPT],
            max_tokens=_TRIAL_TOKENS,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_token_ids=stop_token_ids,
            priority=1,  # the answer decides about calls that wait
            conversation=Conversation((Message(role="user", content="Say a word."),), ()),
        )
        try:
            result = await self._sample(request, min(seconds, self._options.request_seconds), trial=True)
        except ContextExceeded as error:  # of a few tokens
            raise EngineError(
                FailureKind.ENGINE_CONTRACT, f"engine {self._dialect.address}: has no room for a word."
            ) from error
        if not result.token_ids:
            raise EngineError(FailureKind.ENGINE_OVERLOADED, f"engine {self._dialect.address}: aborts what it samples.")
        return result.seconds / len(result.token_ids)

    async def load(self) -> EngineLoad | None:
        """Read the server's metrics; ``None`` when it shows none. Never raises."""
        ask = self._dialect.metrics()
        if ask is None:
            return None
        try:
            answer = await self._transport.exchange(ask, _HEALTH_SECONDS)
        except EngineError as error:
            log.debug("engine %s: no metrics: %s", self._name, error)
            return None
        return self._dialect.load(answer.payload) if answer.status == 200 else None

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each id but the first, given those before it: a fingerprint of the weights.

        Raises:
            EngineError: as ``generate``; ``ENGINE_REFUSED`` where the server has no way to tell.
        """
        answer = await self._transport.exchange(self._dialect.probe(token_ids), self._bounded(_PROBE_SECONDS))
        if answer.status != 200:
            raise self._dialect.refusal(answer)
        return self._dialect.probed(answer.payload, token_ids)

    async def reset_prefix_cache(self) -> bool:
        """Drop what was computed with older weights; whether the server confirmed it.

        Raises:
            EngineError: as ``generate``; ``ENGINE_REFUSED`` where the server has no such route.
        """
        answer = await self._transport.exchange(self._dialect.reset(), self._bounded(_PROBE_SECONDS))
        return self._dialect.confirmed(answer)

    async def close(self) -> None:
        """Close connections. Idempotent; calls in flight end as unreachable."""
        await self._transport.close()

    async def _sample(self, request: GenerationRequest, seconds: float, *, trial: bool = False) -> GenerationResult:
        started, version = monotonic(), self.version
        ask = self._dialect.sample(request)
        answer = await self._exchange_unless_paused(ask, seconds)
        if answer.status != 200:
            raise self._dialect.refusal(answer)
        call = Call(self._name, version, monotonic() - started, self._context, trial)
        try:
            return self._dialect.sampled(answer.payload, request, call)
        except AnswerCutShort:
            if self._context is not None:
                raise
            await self.health()  # its context may be full: it was not asked for its length yet
            return self._dialect.sampled(answer.payload, request, replace(call, context=self._context))

    async def _exchange_unless_paused(self, ask: Ask, seconds: float) -> Answer:
        """Some servers answer nothing while they are paused: then a lost wait is no sign of a broken engine."""
        try:
            return await self._transport.exchange(ask, seconds)
        except EngineError as error:
            if error.kind is FailureKind.ENGINE_TIMEOUT and await self._is_paused():
                raise EngineOverloaded(self._dialect.address, None, None) from None
            raise

    async def _is_paused(self) -> bool:
        ask = self._dialect.paused()
        if ask is None or not self._tells_pause:
            return False
        try:
            answer = await self._transport.exchange(ask, _ABORT_SECONDS)
        except EngineError as error:
            log.debug("engine %s: does not tell whether it is paused: %s", self._name, error)
            return False
        self._tells_pause = answer.status not in _NO_SUCH_ROUTE
        return self._tells_pause and self._dialect.is_paused(answer)

    async def _abort(self, request_id: str) -> bool:
        """Ask the server to end a call early and hand out what it has; whether it knows how."""
        ask = self._dialect.abort(request_id)
        if ask is None:
            return False
        try:
            answer = await self._transport.exchange(ask, _ABORT_SECONDS)
        except EngineError as error:
            log.debug("engine %s: abort failed: %s", self._name, error)
            return False
        self._can_abort = answer.status not in _NO_SUCH_ROUTE  # an older server: do not ask again
        return answer.status == 200

    def _aborted(self) -> GenerationResult:
        """The result of a call whose tokens could not be salvaged."""
        return GenerationResult(
            token_ids=[],
            logprobs=[],
            finish_reason="abort",
            logprob_kind=self._dialect.logprob_kind or "raw",
            engine=self._name,
            versions=[],
            seconds=0.0,
        )

    def _bounded(self, seconds: float) -> float:
        return min(seconds, self._options.request_seconds)
