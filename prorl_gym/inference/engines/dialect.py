"""What differs from server to server: which routes there are, how requests are written and answers read.

A dialect is plain data in and out; ``HttpEngine`` makes the calls. What a server cannot do is refused by default, so
that a dialect only implements what its server can. Here too: what dialects share, the reading of model lists and of
error answers.
"""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engine_errors import ContextExceeded, EngineOverloaded, ModelMissing
from prorl_gym.inference.engines.answer_stream import AnswerStream
from prorl_gym.inference.engines.http_exchange import ConnectionOptions, HttpRequest, HttpResponse
from prorl_gym.inference.engines.logprob_rule import LogprobKind, LogprobRule
from prorl_gym.inference.engines.prompt_json import strip_prompt_echo
from prorl_gym.inference.engines.response_validator import CallExpectation, ResponseValidator, get_nested, printable
from prorl_gym.inference.protocol import Conversation, EngineHealth, GenerationRequest, GenerationResult
from prorl_gym.records import EngineLoad

MAX_METRICS_BYTES = 16 << 20
"""Longest metrics page in bytes: histograms of many engines behind one server."""

_CONTEXT_EXCEEDED = re.compile(
    r"maximum context length|context_length_exceeded|(longer than|exceeds) the model's context length"
    r"|cannot be greater than max_model_len"
    # vLLM 0.32 reduces max_tokens to the room that the prompt leaves; this is its message when that is none.
    r"|max_tokens must be at least 1, got 0"
)

_CONTEXT_LENGTH = re.compile(r"(?:context length (?:is |of |\()|max_model_len=)([1-9][0-9]{0,8})(?: tokens)?\b")

_MODEL_MISSING = re.compile(r"\bmodel\b.*(does not exist|not[ _]found|is not (served|loaded|available))", re.IGNORECASE)

_FIXES = {
    401: "Name the variable with its key in 'api_key_env'.",
    403: "Name the variable with its key in 'api_key_env'.",
    404: "Check 'engines' (they end in /v1), 'engine' (what kind they are), 'model' (their --served-model-name).",
}

log = logging.getLogger(__name__)

_OTHER_ENGINE_FIX = "Serve the model with vLLM or SGLang, unmodified, if updates have to be verified."


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpEngineOptions(ConnectionOptions):
    """How to talk to a server, whatever its dialect. Times in seconds."""

    model: str
    vocab_size: int
    request_seconds: float = 900.0
    """Longest time one call may take, waiting in the engine's queue included."""
    control_ids: frozenset[int] = frozenset()
    """Control tokens of the vocabulary: a model may end its turn with one that is no stop id."""
    logprob_rule: LogprobRule | None = None
    """Shared by the engines of a pool; an engine without a pool has its own, which only logs a warning."""


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call that was answered, for its result."""

    engine: str
    version: int
    """Policy version that the pool had set when the call was made."""
    seconds: float
    context_length: int | None = None
    """Of the engine in tokens, if known."""
    is_trial: bool = False
    """It was a trial of whether the engine samples."""

    def expectation(self, *, stopped_by_guard: bool = False) -> CallExpectation:
        """Return what its tokens are checked against."""
        return CallExpectation(self.context_length, stopped_by_guard, self.is_trial)


class Dialect(ABC):
    """One kind of server.

    Args:
        base_url: mostly ends in ``/v1``; a server's own routes lie above it.
        options: see there.
        server_kind: what should listen there, for messages: ``a vLLM server``.
        fix: what to do when it breaks its contract.
        logprob_kind: of its log-probs; ``None``: its answers carry no usable ones.
    """

    def __init__(
        self,
        base_url: str,
        options: HttpEngineOptions,
        *,
        server_kind: str,
        fix: str,
        logprob_kind: LogprobKind | None,
    ) -> None:
        self._base = base_url.rstrip("/")
        self._root = self._base.removesuffix("/v1")
        self._model = options.model
        self._models = ModelList(self._base, options.model)
        self.validator = ResponseValidator(
            self._base, options.vocab_size, server_kind, fix, model=options.model, control_ids=options.control_ids
        )
        self.logprob_kind: LogprobKind | None = logprob_kind

    @property
    def address(self) -> str:
        """Name of the server in messages."""
        return self.validator.address

    @abstractmethod
    def sample_request(self, request: GenerationRequest) -> HttpRequest:
        """Return the request of a call.

        Raises:
            EngineError: ``ENGINE_REFUSED``, when this server cannot make such a call.
        """

    def open_stream(self, request: GenerationRequest) -> AnswerStream | None:
        """Return what joins the events of a streamed call; ``None``: this call is not streamed."""
        return None

    def read_sample(self, payload: bytes, request: GenerationRequest, answered: AnsweredCall) -> GenerationResult:
        """Read the answer of a call.

        Raises:
            EngineError: ``ENGINE_CONTRACT``, or what an answer of status 200 hides.
        """
        payload, echoed = strip_prompt_echo(payload, request)
        return self.read_answer(self.validator.parse_object(payload), request, answered, is_prompt_checked=echoed)

    @abstractmethod
    def read_answer(
        self,
        answer: Mapping[str, object],
        request: GenerationRequest,
        answered: AnsweredCall,
        *,
        is_prompt_checked: bool,
    ) -> GenerationResult:
        """Check an answer of status 200 and return what was sampled.

        Args:
            answer: parsed, or joined from a stream.
            request: the call.
            answered: what is known of the call beside it.
            is_prompt_checked: an echo of the prompt was there, and is what was sent.

        Raises:
            EngineError: as ``read_sample``.
        """

    def health_request(self) -> HttpRequest:
        """Return the request for the server's health: its model list, which has the context length too."""
        return HttpRequest("GET", f"{self._base}/models")

    def read_health(self, payload: bytes) -> EngineHealth:
        """Read the health from an answer of status 200."""
        return self._models.read_health(payload)

    def error_from_response(self, response: HttpResponse) -> Exception:
        """Return what an answer other than 200 means."""
        return error_from_response(self.address, response)

    def abort_request(self, request_id: str) -> HttpRequest | None:
        """Return the request that ends a call early with what it has; ``None``: only closing the connection ends it."""
        return None

    def paused_request(self) -> HttpRequest | None:
        """Return the request for whether the server is paused; ``None``: it has no such route."""
        return None

    def read_paused(self, response: HttpResponse) -> bool:
        """Read whether it is paused, from an answer of any status but 404 and 405."""
        return False

    def metrics_request(self) -> HttpRequest | None:
        """Return the request for the metrics page; ``None``: it has none that can be read."""
        return None

    def read_load(self, payload: bytes) -> EngineLoad | None:
        """Read the metrics page; ``None`` for any other page."""
        return None

    def probe_request(self, token_ids: Sequence[int]) -> HttpRequest:
        """Return the request for the log-probs of given ids.

        Raises:
            EngineError: ``ENGINE_REFUSED``, when the server cannot return them.
        """
        raise unsupported_error(self.address, "cannot return log-probs of a given text", _OTHER_ENGINE_FIX)

    def read_probe(self, payload: bytes, token_ids: Sequence[int]) -> list[float]:
        """Read the log-probs of the given ids but the first."""
        raise NotImplementedError

    def cache_reset_request(self) -> HttpRequest:
        """Return the request to drop the prefix cache.

        Raises:
            EngineError: ``ENGINE_REFUSED``, when the server has no such route.
        """
        raise unsupported_error(self.address, "has no route that drops its prefix cache", _OTHER_ENGINE_FIX)

    def read_cache_reset(self, response: HttpResponse) -> bool:
        """Read whether the server dropped it.

        Raises:
            EngineError: it refused or broke.
        """
        raise NotImplementedError

    def require_conversation(self, request: GenerationRequest) -> Conversation:
        """Return the messages of a call.

        Raises:
            EngineError: ``ENGINE_REFUSED``, when the call has only token ids.
        """
        if request.conversation is None:
            raise unsupported_error(
                self.address, "takes messages, and this call has only token ids", "Set another 'engine'."
            )
        return request.conversation


def call_headers(request: GenerationRequest) -> dict[str, str]:
    """Return headers by which routers and logs recognize a call."""
    return {"X-Request-Id": request.request_id, "X-Session-ID": session_header_value(request.session_id)}


def session_header_value(session_id: str) -> str:
    """Return a session id as a header can carry it: callers choose them, so one that is no plain word is digested."""
    if re.fullmatch(r"[!-~]{1,256}", session_id):
        return session_id
    return blake2b(session_id.encode("utf-8", "replace"), digest_size=16).hexdigest()


class ModelList:
    """Reads ``GET /v1/models`` of one server: whether it is there, what it serves, how long its context is.

    Logs a warning when the name is wrong, once for each list.

    Args:
        address: of the server, for messages.
        model: the name it is expected to serve.
    """

    def __init__(self, address: str, model: str) -> None:
        self.aliases: frozenset[str] = frozenset()
        """Other names that the server lists the same model under."""
        self._address = address
        self._model = model
        self._warned_of: list[str] = []

    def read_health(self, payload: bytes) -> EngineHealth:
        """Return that the server is well: it answered. A model that it does not list may still be served."""
        listed = self._listed(payload)
        names = list(listed)
        self.aliases = self._aliases_of(listed)
        if not names or self._model in names:
            return EngineHealth(ok=True, max_model_len=_context_length(listed.get(self._model, {})))
        unlisted = f"does not list model '{self._model}' but {printable(', '.join(names)[:300])}"
        if names != self._warned_of:
            self._warned_of = names  # probes read the list often; warn once for each list
            log.warning(
                "engine %s does not serve model '%s'.\nIt serves: %s. Set 'inference.model' to one of these.",
                *(self._address, self._model, printable(", ".join(names)[:300])),
            )
        return EngineHealth(ok=True, unlisted_model=f"engine {self._address}: {unlisted}.")

    def _listed(self, payload: bytes) -> dict[str, dict[str, Any]]:
        """Read the models by name; none if the answer is no such list."""
        with suppress(ValueError, RecursionError, AttributeError, TypeError, KeyError):
            models = cast("list[dict[str, Any]]", json.loads(payload)["data"])
            return {str(model["id"]): model for model in models}
        return {}

    def _aliases_of(self, listed: dict[str, dict[str, Any]]) -> frozenset[str]:
        """Return the names of the same weights: vLLM answers with its first --served-model-name for all of them."""
        root = listed.get(self._model, {}).get("root")
        if not isinstance(root, str):
            return frozenset()
        return frozenset(name for name, model in listed.items() if model.get("root") == root)


def _context_length(model: dict[str, Any]) -> int | None:
    length = model.get("max_model_len")
    return length if type(length) is int and length > 0 else None


def error_from_response(address: str, response: HttpResponse) -> Exception:
    """Return what an answer other than 200 means: an ``EngineError``, or ``ContextExceeded``."""
    message = error_text(response.payload)
    if response.status in (429, 503):
        return EngineOverloaded(address, response.status, response.retry_after)
    if response.status == 400 and _CONTEXT_EXCEEDED.search(message):
        found = _CONTEXT_LENGTH.search(message)
        return ContextExceeded(int(found[1]) if found else None)
    if response.status == 404 and _MODEL_MISSING.search(message):
        return ModelMissing(address, message)
    if response.status >= 500:
        return EngineError(
            FailureKind.ENGINE_UNREACHABLE,
            f"engine {address}: broke on our request (HTTP {response.status}: {message}).",
            "Look into the engine's log.",
        )
    return EngineError(
        FailureKind.ENGINE_REFUSED,
        f"engine {address}: refused our request (HTTP {response.status}: {message}).",
        _FIXES.get(response.status, "Check 'model' and the sampling settings against the server's."),
    )


def unsupported_error(address: str, what: str, fix: str) -> EngineError:
    """Return the error of an adapter whose server has no way to do something."""
    return EngineError(FailureKind.ENGINE_REFUSED, f"engine {address}: {what}.", fix)


def error_text(payload: bytes) -> str:
    """Return the engine's own message, shortened: it ends up in records and logs."""
    text = payload[:4096].decode("utf-8", "replace")
    try:
        answer: Any = json.loads(payload[: 1 << 16])
    except (ValueError, RecursionError):
        answer = None  # no JSON: use the text itself
    for path in (("error", "message"), ("error",), ("message",), ("detail",)):
        found = get_nested(cast("object", answer), *path)
        if isinstance(found, str):
            text = found
            break
    return printable(text[:4096])[:200] or "no message"
