"""The adapter for vLLM's ``POST /v1/completions``: token ids in, token ids and log-probs out.

Written for 0.33 and 0.32. Release 0.32 ignores ``return_weight_versions`` and lacks ``/is_paused`` without its
development routes; neither is an error. Every answer is checked before it is used.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from prorl_gym.errors import EngineError
from prorl_gym.inference.engines.answer_stream import AnswerStream
from prorl_gym.inference.engines.dialect import (
    MAX_METRICS_BYTES,
    AnsweredCall,
    Dialect,
    HttpEngineOptions,
    call_headers,
    unsupported_error,
)
from prorl_gym.inference.engines.http_engine import HttpEngine
from prorl_gym.inference.engines.http_exchange import HttpRequest, HttpResponse
from prorl_gym.inference.engines.logprob_rule import LogprobKind
from prorl_gym.inference.engines.prometheus_page import PrometheusPage, parse_count
from prorl_gym.inference.engines.prompt_json import encode_prompt_ids
from prorl_gym.inference.engines.response_validator import (
    FinishReason,
    ResponseValidator,
    get_nested,
    names_policy_versions,
    read_cached_tokens,
)
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.records import EngineLoad

REPETITION = "repetition"
"""vLLM's guard against loops: the turn is over, without its terminator."""

FINISH_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    REPETITION: "stop",
}

_METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:generation_tokens_total",
)

_ROUTED_EXPERTS_BYTES = 8 << 10
"""Per token of prompt and answer: some hundred layers times experts as JSON numbers."""

_ECHO_FIX = "Switch off prompt truncation and rewriting before it."


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions(HttpEngineOptions):
    """How to talk to a vLLM server."""

    logprob_kind: LogprobKind = "raw"
    """What the server's ``--logprobs-mode`` gives: ``raw`` is its default."""
    priority_scheduling: bool = False
    """The server was started with ``--scheduling-policy priority``."""
    record_routed_experts: bool = False
    """Keep which experts each token met, from a server that was started to return them."""


class VllmEngine(HttpEngine):
    """One vLLM server, or anything that speaks its completions route, at a URL like ``http://127.0.0.1:8000/v1``."""

    def __init__(self, name: str, base_url: str, options: VllmOptions, *, version: int = 0) -> None:
        super().__init__(name, VllmDialect(base_url, options), options, version=version)


class VllmDialect(Dialect):
    """vLLM's routes.

    Args:
        base_url: ends in ``/v1``.
        options: see there.
    """

    def __init__(self, base_url: str, options: VllmOptions) -> None:
        self._options = options
        fix = "Serve the model with vLLM 0.10.2 or newer, unmodified."
        super().__init__(base_url, options, server_kind="a vLLM server", fix=fix, logprob_kind=options.logprob_kind)

    def sample_request(self, request: GenerationRequest) -> HttpRequest:
        """Write a call of the completions route."""
        body = request_body(request, self._model, send_priority=self._options.priority_scheduling)
        if self._may_stream(request):
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return HttpRequest(
            "POST",
            f"{self._base}/completions",
            body,
            call_headers(request),
            ("prompt", encode_prompt_ids(request)),
            max_response_bytes(request, routed_experts=self._options.record_routed_experts),
        )

    def open_stream(self, request: GenerationRequest) -> AnswerStream | None:
        """Return what joins the events of a streamed call."""
        return VllmStream(self.validator, request) if self._may_stream(request) else None

    def read_answer(
        self,
        answer: Mapping[str, object],
        request: GenerationRequest,
        answered: AnsweredCall,
        *,
        is_prompt_checked: bool,
    ) -> GenerationResult:
        """See ``Dialect.read_answer``."""
        checks = self.validator
        checks.check_model_name(answer.get("model"), self._models.aliases)
        choice = checks.only_choice(answer)
        finish = checks.translate_finish_reason(choice.get("finish_reason"), FINISH_REASONS)
        if choice.get("token_ids") is None:
            raise checks.contract_error(
                "does not return token ids", "Serve the model with vLLM 0.10.2 or newer (return_token_ids)."
            )
        expected = answered.expectation(stopped_by_guard=choice.get("finish_reason") == REPETITION)
        ids = checks.check_sampled_ids(choice["token_ids"], "token_ids", request, finish, expected)
        if not is_prompt_checked:
            checks.check_prompt_echo(choice.get("prompt_token_ids"), request, _ECHO_FIX)
        spans = choice.get("weight_versions")
        return GenerationResult(
            token_ids=ids,
            logprobs=self._logprobs(choice, ids),
            finish_reason=finish,
            logprob_kind=self._options.logprob_kind,
            engine=answered.engine,
            versions=checks.token_versions(spans, len(ids), answered.version),
            versions_reported=names_policy_versions(spans),
            seconds=answered.seconds,
            cached_tokens=read_cached_tokens(answer, len(request.prompt_ids)),
            routed_experts=checks.check_routed_experts(choice.get("routed_experts"))
            if self._options.record_routed_experts
            else None,
        )

    def abort_request(self, request_id: str) -> HttpRequest:
        """Return the request that ends one call. Its id there has the route's prefix and the prompt's index."""
        return HttpRequest("POST", f"{self._root}/abort_requests", {"request_ids": [f"cmpl-{request_id}-0"]})

    def paused_request(self) -> HttpRequest:
        """Return the request for whether it is paused (a development route); 0.32 then answers nothing, 0.33 503."""
        return HttpRequest("GET", f"{self._root}/is_paused")

    def read_paused(self, response: HttpResponse) -> bool:
        """Read whether it is."""
        return response.status == 200 and _is_flag_set(response.payload, "is_paused")

    def metrics_request(self) -> HttpRequest:
        """Return the request for the metrics page."""
        return HttpRequest("GET", f"{self._root}/metrics", max_bytes=MAX_METRICS_BYTES)

    def read_load(self, payload: bytes) -> EngineLoad | None:
        """Read the metrics page."""
        return parse_load(payload)

    def probe_request(self, token_ids: Sequence[int]) -> HttpRequest:
        """Return the request for the log-probs of a prompt; one token has to be sampled with it."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 1,
            "cache_salt": uuid4().hex,  # keeps cached work of older weights out of it
        }
        return HttpRequest("POST", f"{self._base}/completions", body, max_bytes=(1 << 20) + 1024 * len(token_ids))

    def read_probe(self, payload: bytes, token_ids: Sequence[int]) -> list[float]:
        """Read the log-probs: objects by token id, the prompt's own token always among them."""
        checks = self.validator
        choice = checks.only_choice(checks.parse_object(payload))
        entries = checks.require_array(choice.get("prompt_logprobs"), "prompt_logprobs")
        if len(entries) != len(token_ids):
            raise checks.contract_error(
                f"returned log-probs of {len(entries)} prompt tokens, {len(token_ids)} were sent"
            )
        pairs = zip(token_ids[1:], entries[1:], strict=True)
        return [checks.check_logprob(get_nested(entry, str(token), "logprob")) for token, entry in pairs]

    def cache_reset_request(self) -> HttpRequest:
        """Return the request to drop the prefix cache (a development route)."""
        return HttpRequest("POST", f"{self._root}/reset_prefix_cache")

    def read_cache_reset(self, response: HttpResponse) -> bool:
        """Read whether it was dropped: not while blocks are held, and older servers do not report it."""
        if response.status in (404, 405):
            raise unsupported_error(
                self.address,
                "has no /reset_prefix_cache",
                "Start vLLM with VLLM_SERVER_DEV_MODE=1, on a private address.",
            )
        if response.status != 200:
            raise self.error_from_response(response)
        return _is_flag_set(response.payload, "success")

    def _may_stream(self, request: GenerationRequest) -> bool:
        """Whether a call is streamed: the server's streams have no routed experts."""
        return request.on_tokens is not None and not self._options.record_routed_experts

    def _logprobs(self, choice: Mapping[str, object], ids: Sequence[int]) -> list[float]:
        values, names = get_nested(choice, "logprobs", "token_logprobs"), get_nested(choice, "logprobs", "tokens")
        if not ids and not values:
            return []
        if not isinstance(values, list):
            raise self._missing_logprobs_error()
        if None in cast("list[object]", values):
            raise self._missing_logprobs_error()
        logprobs = self.validator.check_logprobs(cast("list[object]", values), len(ids))
        # The tokens come a second time with the log-probs, which must belong to the ids.
        if isinstance(names, list) and names and names != [f"token_id:{token}" for token in ids]:
            raise self.validator.contract_error("returned log-probs of other tokens than it sampled")
        return logprobs

    def _missing_logprobs_error(self) -> EngineError:
        return self.validator.contract_error(
            "does not return log-probs of the sampled tokens",
            "Do not start it with --max-logprobs 0; for NeMo-RL's server set 'engine: chat_prefix'.",
        )


class VllmStream(AnswerStream):
    """A stream of the completions route: each event has the new ids, and only the last one why sampling ended."""

    def __init__(self, validator: ResponseValidator, request: GenerationRequest) -> None:
        super().__init__(validator, request)
        self._names: list[object] = []
        self._logprobs: list[object] = []
        self._choice: dict[str, object] = {}
        self._answer: dict[str, object] = {}

    def joined(self) -> Mapping[str, object]:
        """See ``AnswerStream.joined``."""
        finish = self._choice.get("finish_reason")
        if self._is_cut_short or (finish is None and self._ids):
            finish = "abort"
        count = len(self._ids)  # of an event that was refused, something may be here
        logprobs = {"tokens": self._names[:count], "token_logprobs": self._logprobs[:count]}
        choice = self._choice | {"finish_reason": finish, "token_ids": self._ids, "logprobs": logprobs}
        return self._answer | {"choices": [choice]}

    def _join(self, event: Mapping[str, object]) -> Sequence[object]:
        checks = self._validator
        if event.get("choices") == []:  # the usage, after all choices
            self._answer |= event
            return []
        choice = checks.only_choice(event)
        if not self.is_prompt_checked and choice.get("prompt_token_ids") is not None:
            checks.check_prompt_echo(choice["prompt_token_ids"], self._request, _ECHO_FIX)
            self.is_prompt_checked = True
        if choice.get("finish_reason") is not None:
            self._answer["model"], self._choice = event.get("model"), dict(choice)
        ids = checks.require_array(choice.get("token_ids") or [], "token_ids")
        names, values = get_nested(choice, "logprobs", "tokens"), get_nested(choice, "logprobs", "token_logprobs")
        if ids and values is None:
            raise checks.missing_logprobs_error()
        logprobs = checks.require_array(values or [], "token_logprobs")
        checks.check_logprobs(logprobs, len(ids))
        self._names += checks.require_array(names or [], "tokens")
        self._logprobs += logprobs
        return ids


def request_body(request: GenerationRequest, model: str, *, send_priority: bool = False) -> dict[str, Any]:
    """Return the JSON body of a call without its prompt; it requests ids and log-probs of the sampled tokens.

    Args:
        request: the call.
        model: the name that the server serves it under.
        send_priority: the server runs vLLM's priority scheduler; any other refuses a priority.
    """
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_tokens,  # never left out: vLLM's default is 16
        "logprobs": 0,  # no alternatives, only the sampled token's
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "return_weight_versions": True,
        **sampling_fields(request),
    }
    if send_priority and request.priority:
        body["priority"] = -request.priority  # vLLM serves the lowest number first
    return body


def sampling_fields(request: GenerationRequest) -> dict[str, Any]:
    """Return the fields of a call's sampling settings, which all routes of vLLM share."""
    fields: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stop_token_ids": list(request.stop_token_ids),
    }
    if request.top_k > 0:
        fields["top_k"] = request.top_k
    if request.seed is not None:
        fields["seed"] = request.seed
    if request.cache_salt is not None:
        fields["cache_salt"] = request.cache_salt
    return fields


def max_response_bytes(request: GenerationRequest, *, routed_experts: bool = False) -> int:
    """Return the most bytes that a correct answer can have: generous per token, and still a bound."""
    bound = (1 << 20) + 1024 * request.max_tokens + 16 * len(request.prompt_ids)
    tokens = request.max_tokens + len(request.prompt_ids)
    return bound + _ROUTED_EXPERTS_BYTES * tokens if routed_experts else bound


def parse_load(payload: bytes) -> EngineLoad | None:
    """Read vLLM's metrics page, summed over the engines behind one server; ``None`` when it is another page."""
    page = PrometheusPage(payload, _METRICS)
    if not page.has("vllm:num_requests_running"):
        return None
    sizes = [
        (parse_count(sample.labels.get("num_gpu_blocks", "")), parse_count(sample.labels.get("block_size", "")))
        for sample in page.samples("vllm:cache_config_info")
    ]
    return EngineLoad(
        running=page.total("vllm:num_requests_running"),
        waiting=page.total("vllm:num_requests_waiting"),
        kv_usage=page.mean_share("vllm:kv_cache_usage_perc"),
        kv_capacity=sum(blocks * size for blocks, size in sizes if blocks and size) or None,
        preemptions=page.total("vllm:num_preemptions_total"),
        prefix_queries=page.total("vllm:prefix_cache_queries_total"),
        prefix_hits=page.total("vllm:prefix_cache_hits_total"),
        generated=page.total("vllm:generation_tokens_total"),
    )


def _is_flag_set(payload: bytes, key: str) -> bool:
    """Whether a flag is true in a small JSON answer; not in an empty one."""
    try:
        return get_nested(json.loads(payload), key) is True
    except (ValueError, RecursionError):
        return False
