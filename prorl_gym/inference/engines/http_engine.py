"""An engine behind HTTP, for any dialect."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any
from uuid import uuid4

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engines.dialect import (
    CertaintyRule,
    Dialect,
    HttpEngineOptions,
    LogprobRule,
    error_from_response,
)
from prorl_gym.inference.engines.http_exchange import EngineTransport, HttpRequest, HttpResponse
from prorl_gym.inference.engines.response_validator import AnsweredCall, PrematureLengthStop
from prorl_gym.inference.protocol import (
    CallTimedOut,
    ContextExceeded,
    Conversation,
    EngineHealth,
    EngineOverloaded,
    GenerationRequest,
    GenerationResult,
    LogprobKind,
    ModelMissing,
)
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
    """One server. Each kind of server has a subclass, which takes the server's ``base_url`` in place of the dialect."""

    def __init__(self, name: str, dialect: Dialect[Any], options: HttpEngineOptions, *, version: int = 0) -> None:
        self.name = name
        self.url = dialect.address
        self.logprob_kind: LogprobKind | None = dialect.logprob_kind
        self.version = version
        """Policy version that its tokens are labelled with."""
        self._dialect = dialect
        self._options = options
        self._logprob_rule = options.logprob_rule or LogprobRule(name)
        self._certainty_rule = CertaintyRule()
        self._transport = EngineTransport(dialect.address, options)
        self._calls: dict[str, asyncio.Task[GenerationResult]] = {}
        self._context_length: int | None = None
        """In tokens; ``None`` until the server has reported it."""
        self._last_sampling: _Sampling = (1.0, 1.0, -1, ())
        """Settings of the last call: some servers refuse any other."""
        self._can_abort = True
        self._reports_pause = True

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See ``Engine``. Cancelling the await closes the connection, which makes the server stop."""
        if self.logprob_kind is not None:
            self._logprob_rule.check(request, self.logprob_kind, self.url)
        self._last_sampling = (request.temperature, request.top_p, request.top_k, request.stop_token_ids)
        # A task of its own, so that ``cancel`` can close this connection while the caller waits for what is salvaged.
        call = asyncio.create_task(
            self._sample(request, self._options.request_seconds), name=f"call {request.request_id}"
        )
        self._calls[request.request_id] = call
        try:
            await asyncio.wait({call})
        finally:
            del self._calls[request.request_id]
            if not call.done():
                call.cancel()
                await asyncio.wait({call})  # until the connection is closed
        if call.cancelled():
            return GenerationResult([], [], "abort", self.logprob_kind or "raw", self.name, [], 0.0)
        return call.result()

    async def cancel(self, request_id: str) -> None:
        """Stop one call. The server then returns what it has sampled; where it cannot, the connection is closed."""
        call = self._calls.get(request_id)
        if call is not None and not (self._can_abort and await self._abort(request_id)):
            call.cancel()

    async def health(self) -> EngineHealth:
        try:
            answer = await self._transport.exchange(self._dialect.health_request(), _HEALTH_SECONDS)
            if answer.status != 200:
                error = error_from_response(self.url, answer)
                missing = error.what if isinstance(error, ModelMissing) else ""
                return EngineHealth(ok=False, detail=str(error), unlisted_model=missing)
            if await self._read_paused():
                return EngineHealth(ok=False, detail=f"engine {self.url}: is paused or not ready.")
            health = self._dialect.read_health(answer.payload)
            self._context_length = health.max_model_len or self._context_length
            return health
        except EngineError as error:
            return EngineHealth(ok=False, detail=str(error))

    async def sample_trial(self, seconds: float) -> float:
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
            raise EngineError(FailureKind.ENGINE_CONTRACT, f"engine {self.url}: has no room for a word.") from error
        if not result.token_ids:
            raise EngineError(FailureKind.ENGINE_OVERLOADED, f"engine {self.url}: aborts what it samples.")
        return result.seconds / len(result.token_ids)

    async def read_load(self) -> EngineLoad | None:
        answer = await self._try_exchange(self._dialect.metrics_request(), _HEALTH_SECONDS)
        return self._dialect.read_load(answer.payload) if answer is not None and answer.status == 200 else None

    async def probe_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        seconds = min(_PROBE_SECONDS, self._options.request_seconds)
        answer = await self._transport.exchange(self._dialect.probe_request(token_ids), seconds)
        if answer.status != 200:
            raise error_from_response(self.url, answer)
        return self._dialect.read_probe(answer.payload, token_ids)

    async def reset_prefix_cache(self) -> bool:
        seconds = min(_PROBE_SECONDS, self._options.request_seconds)
        return self._dialect.read_cache_reset(
            await self._transport.exchange(self._dialect.cache_reset_request(), seconds)
        )

    async def close(self) -> None:
        """Close connections. Calls in flight end as unreachable."""
        await self._transport.close()

    async def _sample(self, request: GenerationRequest, seconds: float, *, trial: bool = False) -> GenerationResult:
        started, version = monotonic(), self.version
        answer = await self._exchange(request, seconds)
        if answer.status != 200:
            raise error_from_response(self.url, answer)
        call = AnsweredCall(self.name, version, monotonic() - started, self._context_length, trial)

        read = partial(self._dialect.read_sample, answer.payload, request)
        try:
            result = read(call)
        except PrematureLengthStop:
            if self._context_length is not None:
                raise
            await self.health()  # its context may be full: learn its length
            result = read(replace(call, context_length=self._context_length))
        if self.logprob_kind is not None:
            self._certainty_rule.check(request, result, self._dialect.validator)
        return result

    async def _exchange(self, request: GenerationRequest, seconds: float) -> HttpResponse:
        try:
            return await self._transport.exchange(self._dialect.sample_request(request), seconds)
        except CallTimedOut:
            if await self._read_paused():  # some servers answer nothing while they are paused
                raise EngineOverloaded(self.url, None, None) from None
            raise

    async def _read_paused(self) -> bool:
        request = self._dialect.paused_request() if self._reports_pause else None
        if (answer := await self._try_exchange(request, _ABORT_SECONDS)) is None:
            return False
        self._reports_pause = answer.status not in _NO_SUCH_ROUTE
        return self._reports_pause and self._dialect.read_paused(answer)

    async def _abort(self, request_id: str) -> bool:
        """Have the server end a call early with what it has; whether it can."""
        answer = await self._try_exchange(self._dialect.abort_request(request_id), _ABORT_SECONDS)
        if answer is None:
            return False
        self._can_abort = answer.status not in _NO_SUCH_ROUTE  # an older server: do not try again
        return answer.status == 200

    async def _try_exchange(self, request: HttpRequest | None, seconds: float) -> HttpResponse | None:
        """Exchange on a route that a server may lack; ``None``: there is no such route, or no answer."""
        try:
            return None if request is None else await self._transport.exchange(request, seconds)
        except EngineError as error:
            log.debug("engine %s: no answer from %s: %s", self.name, request and request.url, error)
            return None
