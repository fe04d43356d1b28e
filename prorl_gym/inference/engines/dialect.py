"""Differences between servers: which routes there are, how requests are written and answers read.

A dialect is plain data in and out; ``HttpEngine`` makes the calls. What a server cannot do is refused by default, so
that a dialect only implements what its server can. The parts that dialects share are here too: prompts as JSON,
model lists and error answers.
"""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Generic, TypeVar, cast

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engines.http_exchange import ConnectionOptions, HttpRequest, HttpResponse
from prorl_gym.inference.engines.response_validator import (
    AnsweredCall,
    FinishReason,
    JsonObject,
    ResponseValidator,
    get_nested,
    names_policy_versions,
    printable,
)
from prorl_gym.inference.protocol import (
    ContextExceeded,
    Conversation,
    EngineHealth,
    EngineOverloaded,
    GenerationRequest,
    GenerationResult,
    LogprobKind,
    ModelMissing,
    TextTurn,
)
from prorl_gym.left_out import count_left_out, unknown_fields
from prorl_gym.records import EngineLoad

MAX_METRICS_BYTES = 16 << 20
"""Longest metrics page in bytes: histograms of many engines behind one server."""

ANSWER_FIELDS = frozenset(
    {"id", "object", "created", "model", "choices", "usage", "service_tier", "system_fingerprint"}
    | {"prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics"}
)
"""Of OpenAI's API and vLLM's releases 0.32 and 0.33 (entrypoints/openai, ``protocol.py``), as the choice's below."""

CHOICE_FIELDS = frozenset(
    {"index", "text", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs"}
    | {"prompt_token_ids", "routed_experts", "weight_versions"}
)

MESSAGE_FIELDS = frozenset({"role", "content", "tool_calls", "annotations", "reasoning", "reasoning_content"})

_ECHO = b'"prompt_token_ids":['

_CONTEXT_EXCEEDED = re.compile(
    # vLLM 0.8 to 0.33 (renderers/params.py, v1/engine/input_processor.py, entrypoints), and OpenAI's API. Release 0.32
    # reduces max_tokens to the room that the prompt leaves, and its message when that is none names no length.
    r"maximum context length|model's context length is only|longer than the maximum model length"
    r"|exceeds the max_model_len|cannot be greater than max_model_len|too long to fit into the model"
    r"|max_tokens must be at least 1, got 0|context_length_exceeded"
    # SGLang 0.4 to 0.5.23 (managers/tokenizer_manager.py, managers/utils.py, managers/scheduler.py, disaggregation).
    r"|(?:longer than|exceeds) the model's context length|exceeds the maximum allowed length"
    r"|exceeds the maximum number of tokens: [0-9]+ > |prompt is too long after expanding"
    r"|exceeds the (?:KV memory|unified FULL/SWA KV byte) budget|requires too many SWA KV tokens"
)

_CONTEXT_LENGTH = re.compile(
    r"(?:(?:context|model|allowed) length (?:is (?:only )?|of |\()?|max_model_len[ =]|tokens: [0-9]+ > | >= )"
    r"([1-9][0-9]{0,8})\b"
)

_MODEL_MISSING = re.compile(r"\bmodel\b.*(does not exist|not[ _]found|is not (served|loaded|available))", re.IGNORECASE)

_FIXES = {
    401: "Name the variable with its key in 'api_key_env'.",
    403: "Name the variable with its key in 'api_key_env'.",
    404: "Check 'engines' (they end in /v1), 'engine' (what kind they are), 'model' (their --served-model-name).",
}

log = logging.getLogger(__name__)

_OTHER_ENGINE_FIX = "Serve the model with vLLM or SGLang, unmodified, if updates have to be verified."

_PROCESSED_FIX = (
    "Start it with --logprobs-mode processed_logprobs and set 'logprob_kind: processed', or sample at temperature 1."
)


_CERTAINTY_FIX = "Check its release and its log-prob settings: it does not return the log-probs of its sampling."

_MAX_CERTAIN_PROMPTS = 256


class LogprobRule:
    """Requires that log-probs are those of the distribution that was sampled from, for the engines of one pool.

    ``raw`` log-probs are taken before temperature, top-p and top-k. They are the behaviour policy's only where these
    are off (temperature 1, top-p 1, no top-k). Anywhere else an importance ratio made of them is wrong, silently.
    Evaluation (priority above 0) is exempt: it is not trained on. Such a call is refused with
    ``require_processed_logprobs``; otherwise one warning is logged.
    """

    def __init__(self, pool: str, *, require_processed_logprobs: bool = False) -> None:
        self._pool = pool
        self._require_processed_logprobs = require_processed_logprobs
        self._warned = False

    def check(self, request: GenerationRequest, kind: LogprobKind, address: str) -> None:
        """Check one call. Raises ``EngineError`` (``ENGINE_REFUSED``)."""
        plain = request.temperature == 1.0 and request.top_p == 1.0 and request.top_k <= 0
        if kind == "processed" or plain or request.priority > 0:
            return
        what = (
            "its raw log-probs are not those of sampling at "
            f"temperature {request.temperature:g}, top_p {request.top_p:g}, top_k {request.top_k}"
        )
        if self._require_processed_logprobs:
            raise EngineError(FailureKind.ENGINE_REFUSED, f"engine {address}: {what}.", _PROCESSED_FIX)
        if not self._warned:
            self._warned = True
            log.warning("pool %s, engine %s: %s.\n%s", self._pool, address, what, _PROCESSED_FIX)


class CertaintyRule:
    """Refuses log-probs that are all exactly 0 from an engine that has shown that it samples.

    A model that is certain of every token has such log-probs. It answers one prompt in one way: two answers that differ
    contradict each other, since at their first difference both tokens had probability 1. From then on the engine's
    log-probs that are all 0 are not those of its sampling (vllm-project/vllm#17876).
    """

    def __init__(self) -> None:
        self._answers: dict[bytes, Sequence[int]] = {}
        """By prompt and policy version: ids that were sampled with log-prob 0 each."""
        self._is_contradicted = False

    def check(self, request: GenerationRequest, result: GenerationResult, validator: ResponseValidator) -> None:
        """Check one answer. Raises ``EngineError`` (``ENGINE_CONTRACT``)."""
        plain = request.temperature == 1.0 and request.top_p == 1.0 and request.top_k <= 0
        if not plain or any(result.logprobs) or not result.token_ids:
            return
        prompt = blake2b(encode_prompt_ids(request)).digest() + f"{set(result.versions)}".encode()
        known = self._answers.setdefault(prompt, result.token_ids)
        self._is_contradicted |= any(one != other for one, other in zip(known, result.token_ids, strict=False))
        if self._is_contradicted:
            raise validator.contract_error(
                "gave every token the log-prob 0 and sampled different tokens after one prompt", _CERTAINTY_FIX
            )
        if len(self._answers) > _MAX_CERTAIN_PROMPTS:
            del self._answers[next(iter(self._answers))]


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
    logprob_kind: LogprobKind | None = None
    """Kind of the server's log-probs; ``None``: it reports none that can be used."""
    priority_scheduling: bool = False
    """The server was started to serve calls by priority."""
    record_routed_experts: bool = False
    """Keep which experts each token met, from a server that returns them."""


OptionsT = TypeVar("OptionsT", bound=HttpEngineOptions)


class Dialect(ABC, Generic[OptionsT]):
    """One kind of server, at a URL that mostly ends in ``/v1``; a server's own routes lie above it."""

    server_kind: str
    """Kind of server that should listen there, for messages: ``a vLLM server``."""
    fix: str
    """Advice for a server that breaks its contract."""

    def __init__(self, base_url: str, options: OptionsT) -> None:
        self.address = base_url.rstrip("/")
        """Also the name of the server in messages."""
        self.logprob_kind: LogprobKind | None = options.logprob_kind
        self._root = self.address.removesuffix("/v1")
        self._options = options
        self._models = ModelList(self.address, options.model)
        self.validator = ResponseValidator(
            self.address,
            options.vocab_size,
            self.server_kind,
            self.fix,
            model=options.model,
            control_ids=options.control_ids,
        )

    @abstractmethod
    def sample_request(self, request: GenerationRequest) -> HttpRequest:
        """Return the request of a call. Raises ``EngineError`` (``ENGINE_REFUSED``): not with this server."""

    def read_sample(self, payload: bytes, request: GenerationRequest, answered: AnsweredCall) -> GenerationResult:
        """Read the answer of a call. Raises ``EngineError``: ``ENGINE_CONTRACT``, or what a status of 200 hides."""
        payload, echoed = strip_prompt_echo(payload, request)
        answer = self.validator.parse_object(payload)
        return self.read_answer(answer, request, replace(answered, is_prompt_checked=echoed))

    def count_unknown(self, part: JsonObject, known: frozenset[str], prefix: str = "") -> None:
        """Count fields of an answer that this adapter neither reads nor knows to mean nothing to it."""
        count_left_out("engine", self.address, unknown_fields(part, known, prefix))

    @abstractmethod
    def read_answer(self, answer: JsonObject, request: GenerationRequest, answered: AnsweredCall) -> GenerationResult:
        """Check an answer of status 200. Raises as ``read_sample``."""

    def make_result(
        self,
        answered: AnsweredCall,
        ids: list[int],
        logprobs: list[float],
        finish: FinishReason,
        *,
        cached_tokens: int | None,
        version_spans: object = None,
        routed_experts: object = None,
        text_turn: TextTurn | None = None,
    ) -> GenerationResult:
        """Return the result of a call, whose version spans and routed experts are not checked yet."""
        checks = self.validator
        return GenerationResult(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=finish,
            logprob_kind=self.logprob_kind or "raw",
            engine=answered.engine,
            versions=checks.token_versions(version_spans, len(ids), answered.version),
            seconds=answered.seconds,
            cached_tokens=cached_tokens,
            routed_experts=checks.check_routed_experts(routed_experts) if self._options.record_routed_experts else None,
            versions_reported=names_policy_versions(version_spans),
            text_turn=text_turn,
        )

    def health_request(self) -> HttpRequest:
        """Return the request for the server's health: its model list, which has the context length too."""
        return HttpRequest("GET", f"{self.address}/models")

    def read_health(self, payload: bytes) -> EngineHealth:
        """Read the health from an answer of status 200."""
        return self._models.read_health(payload)

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
        """Return the request for the log-probs of given ids. Raises ``EngineError`` (``ENGINE_REFUSED``)."""
        raise unsupported_error(self.address, "cannot return log-probs of a given text", _OTHER_ENGINE_FIX)

    def read_probe(self, payload: bytes, token_ids: Sequence[int]) -> list[float]:
        """Read the log-probs of the given ids but the first."""
        raise NotImplementedError

    def cache_reset_request(self) -> HttpRequest:
        """Return the request to drop the prefix cache. Raises ``EngineError`` (``ENGINE_REFUSED``)."""
        raise unsupported_error(self.address, "has no route that drops its prefix cache", _OTHER_ENGINE_FIX)

    def read_cache_reset(self, response: HttpResponse) -> bool:
        """Read whether the server dropped it. Raises ``EngineError``: it refused or broke."""
        raise NotImplementedError

    def require_conversation(self, request: GenerationRequest) -> Conversation:
        """Return the messages of a call. Raises ``EngineError`` (``ENGINE_REFUSED``) if it has only token ids."""
        if request.conversation is None:
            raise unsupported_error(
                self.address, "takes messages, and this call has only token ids", "Set another 'engine'."
            )
        return request.conversation


def encode_prompt_ids(request: GenerationRequest) -> bytes:
    """Return the prompt ids as JSON without brackets: ``5,6,7``.

    A prompt of 64,000 ids takes some 4 ms to write as JSON and as long to read back where a server echoes it. A caller
    that keeps the text (``prompt_ids_json``) saves both, so that the work of a turn does not grow with the turns before
    it. Its text is checked at both ends only: counting its ids would cost as much as a short turn. Raises
    ``ValueError``: the text is of other ids, a defect that would be drift.
    """
    kept, ids = request.prompt_ids_json, request.prompt_ids
    if kept is None:
        return json.dumps(list(ids), separators=(",", ":"))[1:-1].encode()
    first, last = (str(ids[0]).encode(), str(ids[-1]).encode()) if ids else (b"", b"")
    if len(ids) < 2:
        belongs = kept == first
    else:
        belongs = kept.startswith(first + b",") and kept.endswith(b"," + last) and len(kept) >= 2 * len(ids) - 1
    if not belongs:
        raise ValueError("prompt_ids_json does not belong to prompt_ids")
    return kept


def strip_prompt_echo(payload: bytes, request: GenerationRequest) -> tuple[bytes, bool]:
    """Take an echo of the prompt out of an answer, if it is there in the very bytes that were sent, and whether it was.

    Any other echo is still there, to be read and compared. No string inside the answer can contain it: there, quotes
    are escaped. The key is searched and what follows it compared: searching the whole prompt would cost more than the
    rest of a turn.
    """
    if request.prompt_ids_json is None:
        return payload, False
    sent = encode_prompt_ids(request) + b"]"
    place = payload.find(_ECHO)
    while place >= 0:
        begin = place + len(_ECHO)
        if payload.startswith(sent, begin):
            return payload[: begin - 1] + b"null" + payload[begin + len(sent) :], True
        place = payload.find(_ECHO, begin)
    return payload, False


def call_headers(request: GenerationRequest) -> dict[str, str]:
    """Return headers by which routers and logs recognize a call."""
    return {"X-Request-Id": request.request_id, "X-Session-ID": session_header_value(request.session_id)}


def session_header_value(session_id: str) -> str:
    """Return a session id as a header can carry it: callers choose them, so one that is no plain word is digested."""
    if re.fullmatch(r"[!-~]{1,256}", session_id):
        return session_id
    return blake2b(session_id.encode("utf-8", "replace"), digest_size=16).hexdigest()


class ModelList:
    """Reads ``GET /v1/models`` of one server: whether it is there, what it serves, how long its context is."""

    def __init__(self, address: str, model: str) -> None:
        self.aliases: frozenset[str] = frozenset()
        """Names that the server lists the same weights under: vLLM answers with its first name for all of them."""
        self._address = address
        self._model = model
        self._warned_of: list[str] = []

    def read_health(self, payload: bytes) -> EngineHealth:
        """Return that the server is well: it answered. A model that it does not list may still be served."""
        listed: dict[str, dict[str, Any]] = {}
        with suppress(ValueError, RecursionError, AttributeError, TypeError, KeyError):
            listed = {str(model["id"]): model for model in cast("list[dict[str, Any]]", json.loads(payload)["data"])}
        names, ours = list(listed), listed.get(self._model, {})
        root = ours.get("root")
        same = [name for name, model in listed.items() if model.get("root") == root] if isinstance(root, str) else ()
        self.aliases = frozenset(same)
        if not names or self._model in names:
            return EngineHealth(ok=True, max_model_len=positive_int(ours.get("max_model_len")))
        unlisted = f"does not list model '{self._model}' but {printable(', '.join(names)[:300])}"
        if names != self._warned_of:
            self._warned_of = names  # probes read the list often; warn once for each list
            log.warning(
                "engine %s does not serve model '%s'.\nIt serves: %s. Set 'inference.model' to one of these.",
                *(self._address, self._model, printable(", ".join(names)[:300])),
            )
        return EngineHealth(ok=True, unlisted_model=f"engine {self._address}: {unlisted}.")


def positive_int(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


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
