"""An engine behind HTTP, for any dialect."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from uuid import uuid4

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engine_errors import ContextExceeded, EngineOverloaded, ModelMissing
from prorl_gym.inference.engines.answer_stream import AnswerStream
from prorl_gym.inference.engines.dialect import AnsweredCall, Dialect, HttpEngineOptions
from prorl_gym.inference.engines.http_exchange import EngineTransport, HttpRequest, HttpResponse
from prorl_gym.inference.engines.logprob_rule import LogprobKind, LogprobRule
from prorl_gym.inference.engines.response_validator import PrematureLengthStop
from prorl_gym.inference.protocol import Conversation, EngineHealth, GenerationRequest, GenerationResult
from prorl_gym.records import EngineLoad, Message

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
    """One server. Each kind of server has a subclass, which takes the server's ``base_url`` in place of the dialect.

    Args:
        name: for records and metrics.
        dialect: of the server.
        options: see there.
        version: policy version that its tokens are labelled with.
    """

    def __init__(self, name: str, dialect: Dialect, options: HttpEngineOptions, *, version: int = 0) -> None:
        self.version = version
        self._name = name
        self._dialect = dialect
        self._options = options
        self._logprob_rule = options.logprob_rule or LogprobRule(name)
        self._transport = EngineTransport(dialect.address, options)
        self._calls: dict[str, asyncio.Task[GenerationResult]] = {}
        self._context_length: int | None = None
        """In tokens; ``None`` until the server has reported it."""
        self._last_sampling: _Sampling = (1.0, 1.0, -1, ())
        """Of the last call: some servers refuse any other."""
        self._can_abort = True
        self._reports_pause = True

    @property
    def name(self) -> str:
        """Short name for records and metrics."""
        return self._name

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return self._dialect.address

    @property
    def logprob_kind(self) -> LogprobKind | None:
        """Kind of the server's log-probs; ``None``: it reports none that can be used."""
        return self._dialect.logprob_kind

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample a continuation. Cancelling the await closes the connection, which makes the server stop.

        Raises:
            EngineError: ``ENGINE_UNREACHABLE``, ``ENGINE_TIMEOUT``, ``ENGINE_OVERLOADED``, ``ENGINE_REFUSED`` or
                ``ENGINE_CONTRACT``.
            ContextExceeded: prompt and answer do not fit.
        """
        if self.logprob_kind is not None:
            self._logprob_rule.check(request, self.logprob_kind, self._dialect.address)
        self._last_sampling = (request.temperature, request.top_p, request.top_k, request.stop_token_ids)
        # A task of its own, so that ``cancel`` can close this connection while the caller waits for what is salvaged.
        stream = self._dialect.open_stream(request)
        call = asyncio.create_task(
            self._sample(request, self._options.request_seconds, stream), name=f"call {request.request_id}"
        )
        self._calls[request.request_id] = call
        try:
            await asyncio.wait({call})
        finally:
            del self._calls[request.request_id]
            if not call.done():
                call.cancel()
                await asyncio.wait({call})  # until the connection is closed
        if not call.cancelled():
            return call.result()
        if stream is None or not stream.has_tokens:
            return self._aborted_result()
        stream.cut_short()
        return self._read_stream(stream, request, AnsweredCall(self._name, self.version, 0.0))

    async def cancel(self, request_id: str) -> None:
        """Stop one call. The server then returns what it has sampled; where it cannot, the connection is closed."""
        call = self._calls.get(request_id)
        if call is None:
            return
        if not (self._can_abort and await self._abort(request_id)):
            call.cancel()

    async def health(self) -> EngineHealth:
        """Return the server's health; a paused one is not well. Never raises."""
        try:
            answer = await self._transport.exchange(self._dialect.health_request(), _HEALTH_SECONDS)
            if answer.status != 200:
                error = self._dialect.error_from_response(answer)
                missing = error.what if isinstance(error, ModelMissing) else ""
                return EngineHealth(ok=False, detail=str(error), unlisted_model=missing)
            if await self._read_paused():
                return EngineHealth(ok=False, detail=f"engine {self._dialect.address}: is paused or not ready.")
            health = self._dialect.read_health(answer.payload)
            self._context_length = health.max_model_len or self._context_length
            return health
        except EngineError as error:
            return EngineHealth(ok=False, detail=str(error))

    async def sample_trial(self, seconds: float) -> float:
        """Sample a few tokens for a short prompt of its own; return the seconds that each of them took.

        Raises:
            EngineError: as ``generate``.
        """
        vocab_size = self._dialect.validator.vocab_size
        temperature, top_p, top_k, stop_token_ids = self._last_sampling
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

    async def read_load(self) -> EngineLoad | None:
        """Read the server's metrics; ``None`` when it shows none. Never raises."""
        request = self._dialect.metrics_request()
        if request is None:
            return None
        try:
            answer = await self._transport.exchange(request, _HEALTH_SECONDS)
        except EngineError as error:
            log.debug("engine %s: no metrics: %s", self._name, error)
            return None
        return self._dialect.read_load(answer.payload) if answer.status == 200 else None

    async def probe_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each id but the first, given those before it: a fingerprint of the weights.

        Raises:
            EngineError: as ``generate``; ``ENGINE_REFUSED`` where the server cannot return them.
        """
        answer = await self._transport.exchange(
            self._dialect.probe_request(token_ids), self._clamp_seconds(_PROBE_SECONDS)
        )
        if answer.status != 200:
            raise self._dialect.error_from_response(answer)
        return self._dialect.read_probe(answer.payload, token_ids)

    async def reset_prefix_cache(self) -> bool:
        """Drop what was computed with older weights; whether the server confirmed it.

        Raises:
            EngineError: as ``generate``; ``ENGINE_REFUSED`` where the server has no such route.
        """
        answer = await self._transport.exchange(
            self._dialect.cache_reset_request(), self._clamp_seconds(_PROBE_SECONDS)
        )
        return self._dialect.read_cache_reset(answer)

    async def close(self) -> None:
        """Close connections. Idempotent; calls in flight end as unreachable."""
        await self._transport.close()

    async def _sample(
        self, request: GenerationRequest, seconds: float, stream: AnswerStream | None = None, *, trial: bool = False
    ) -> GenerationResult:
        started, version = monotonic(), self.version
        answer = await self._exchange_unless_broken(request, seconds, stream)
        if answer.status != 200:
            raise self._dialect.error_from_response(answer)
        call = AnsweredCall(self._name, version, monotonic() - started, self._context_length, trial)

        def read(call: AnsweredCall) -> GenerationResult:
            if stream is None or not answer.is_stream:
                return self._dialect.read_sample(answer.payload, request, call)
            return self._read_stream(stream, request, call)

        try:
            return read(call)
        except PrematureLengthStop:
            if self._context_length is not None:
                raise
            await self.health()  # its context may be full: learn its length
            return read(replace(call, context_length=self._context_length))

    def _read_stream(self, stream: AnswerStream, request: GenerationRequest, call: AnsweredCall) -> GenerationResult:
        checked = stream.is_prompt_checked
        return self._dialect.read_answer(stream.joined(), request, call, is_prompt_checked=checked)

    async def _exchange_unless_broken(
        self, request: GenerationRequest, seconds: float, stream: AnswerStream | None
    ) -> HttpResponse:
        """Exchange; a stream that breaks after it had tokens ends as an abort: they may have been shown already."""
        sent, on_events = self._dialect.sample_request(request), None if stream is None else stream.add_events
        try:
            return await self._exchange_unless_paused(sent, seconds, on_events)
        except EngineError as error:
            if stream is None or not stream.has_tokens:
                raise
            log.warning("engine %s: a stream broke; its tokens so far are kept: %s", self._name, error.what)
            stream.cut_short()
            return HttpResponse(200, b"", is_stream=True)

    async def _exchange_unless_paused(
        self, request: HttpRequest, seconds: float, on_events: Callable[[Sequence[bytes]], None] | None
    ) -> HttpResponse:
        """Exchange; a time-out of a paused server is an overload: some answer nothing while they are paused."""
        try:
            return await self._transport.exchange(request, seconds, on_events)
        except EngineError as error:
            if error.kind is FailureKind.ENGINE_TIMEOUT and await self._read_paused():
                raise EngineOverloaded(self._dialect.address, None, None) from None
            raise

    async def _read_paused(self) -> bool:
        request = self._dialect.paused_request()
        if request is None or not self._reports_pause:
            return False
        try:
            answer = await self._transport.exchange(request, _ABORT_SECONDS)
        except EngineError as error:
            log.debug("engine %s: does not report whether it is paused: %s", self._name, error)
            return False
        self._reports_pause = answer.status not in _NO_SUCH_ROUTE
        return self._reports_pause and self._dialect.read_paused(answer)

    async def _abort(self, request_id: str) -> bool:
        """Have the server end a call early with what it has; whether it can."""
        request = self._dialect.abort_request(request_id)
        if request is None:
            return False
        try:
            answer = await self._transport.exchange(request, _ABORT_SECONDS)
        except EngineError as error:
            log.debug("engine %s: abort failed: %s", self._name, error)
            return False
        self._can_abort = answer.status not in _NO_SUCH_ROUTE  # an older server: do not try again
        return answer.status == 200

    def _aborted_result(self) -> GenerationResult:
        """Return the result of a call whose tokens could not be salvaged."""
        return GenerationResult(
            token_ids=[],
            logprobs=[],
            finish_reason="abort",
            logprob_kind=self.logprob_kind or "raw",
            engine=self._name,
            versions=[],
            seconds=0.0,
        )

    def _clamp_seconds(self, seconds: float) -> float:
        return min(seconds, self._options.request_seconds)
