"""The adapter for vLLM's ``POST /v1/completions``: token ids in, token ids and log-probs out.

Written for 0.33 and 0.32. Release 0.32 ignores ``return_weight_versions`` and lacks ``/is_paused`` without its
development routes; neither is an error. Every answer is checked before it is used.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from prorl_gym.inference.engines.dialect import (
    ANSWER_FIELDS,
    CHOICE_FIELDS,
    MAX_METRICS_BYTES,
    Dialect,
    HttpEngineOptions,
    call_headers,
    encode_prompt_ids,
    error_from_response,
    unsupported_error,
)
from prorl_gym.inference.engines.http_engine import HttpEngine
from prorl_gym.inference.engines.http_exchange import HttpRequest, HttpResponse
from prorl_gym.inference.engines.prometheus_page import PrometheusPage, parse_count
from prorl_gym.inference.engines.response_validator import (
    AnsweredCall,
    FinishReason,
    JsonObject,
    get_nested,
    read_cached_tokens,
)
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult, LogprobKind
from prorl_gym.records import EngineLoad

REPETITION = "repetition"
"""vLLM's guard against loops: the turn is over, without its terminator."""

FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", REPETITION: "stop"}

_CACHE_USAGE, _CACHE_INFO = "vllm:kv_cache_usage_perc", "vllm:cache_config_info"

_TOTALS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "preemptions": "vllm:num_preemptions_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "generated": "vllm:generation_tokens_total",
}
"""Metrics by the field of ``EngineLoad``."""

_ROUTED_EXPERTS_BYTES = 8 << 10
"""Per token of prompt and answer: some hundred layers times experts as JSON numbers."""

_ECHO_FIX = "Switch off prompt truncation and rewriting before it."


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions(HttpEngineOptions):
    logprob_kind: LogprobKind | None = "raw"
    """The server's ``--logprobs-mode``: ``raw`` is its default."""


class VllmEngine(HttpEngine):
    """One vLLM server, or anything that speaks its completions route, at a URL like ``http://127.0.0.1:8000/v1``."""

    def __init__(self, name: str, base_url: str, options: VllmOptions, *, version: int = 0) -> None:
        super().__init__(name, VllmDialect(base_url, options), options, version=version)


class VllmDialect(Dialect[VllmOptions]):
    server_kind = "a vLLM server"
    fix = "Serve the model with vLLM 0.10.2 or newer, unmodified."

    def sample_request(self, request: GenerationRequest) -> HttpRequest:
        body: dict[str, Any] = {
            "model": self._options.model,
            "max_tokens": request.max_tokens,  # never left out: vLLM's default is 16
            "logprobs": 0,  # no alternatives, only the sampled token's
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "return_weight_versions": True,
            **sampling_fields(request),
        }
        if self._options.priority_scheduling and request.priority:
            body["priority"] = -request.priority  # vLLM serves the lowest number first; any other server refuses it
        return HttpRequest(
            "POST",
            f"{self.address}/completions",
            body,
            call_headers(request),
            ("prompt", encode_prompt_ids(request)),
            max_response_bytes(request, routed_experts=self._options.record_routed_experts),
        )

    def read_answer(self, answer: JsonObject, request: GenerationRequest, answered: AnsweredCall) -> GenerationResult:
        checks = self.validator
        checks.check_model_name(answer.get("model"), self._models.aliases)
        choice = checks.only_choice(answer)
        self.count_unknown(answer, ANSWER_FIELDS)
        self.count_unknown(choice, CHOICE_FIELDS, "choice.")
        finish = checks.translate_finish_reason(choice.get("finish_reason"), FINISH_REASONS)
        if choice.get("token_ids") is None:
            raise checks.contract_error(
                "does not return token ids", "Serve the model with vLLM 0.10.2 or newer (return_token_ids)."
            )
        guarded = choice.get("finish_reason") == REPETITION
        ids = checks.check_sampled_ids(
            choice["token_ids"], "token_ids", request, finish, answered, stopped_by_guard=guarded
        )
        if not answered.is_prompt_checked:
            checks.check_prompt_echo(choice.get("prompt_token_ids"), request, _ECHO_FIX)
        return self.make_result(
            answered,
            ids,
            self._logprobs(choice, ids),
            finish,
            cached_tokens=read_cached_tokens(answer, len(request.prompt_ids)),
            version_spans=choice.get("weight_versions"),
            routed_experts=choice.get("routed_experts"),
        )

    def abort_request(self, request_id: str) -> HttpRequest:
        # Its id there has the route's prefix and the prompt's index.
        return HttpRequest("POST", f"{self._root}/abort_requests", {"request_ids": [f"cmpl-{request_id}-0"]})

    def paused_request(self) -> HttpRequest:
        # A development route. While it is paused, 0.32 answers nothing to calls, 0.33 answers 503.
        return HttpRequest("GET", f"{self._root}/is_paused")

    def read_paused(self, response: HttpResponse) -> bool:
        return response.status == 200 and _is_flag_set(response.payload, "is_paused")

    def metrics_request(self) -> HttpRequest:
        return HttpRequest("GET", f"{self._root}/metrics", max_bytes=MAX_METRICS_BYTES)

    def read_load(self, payload: bytes) -> EngineLoad | None:
        """Read vLLM's metrics page, summed over the engines behind one server; ``None`` when it is another page."""
        page = PrometheusPage(payload, [*_TOTALS.values(), _CACHE_USAGE, _CACHE_INFO])
        if not page.samples[_TOTALS["running"]]:
            return None
        sizes = [
            (parse_count(sample.labels.get("num_gpu_blocks", "")), parse_count(sample.labels.get("block_size", "")))
            for sample in page.samples[_CACHE_INFO]
        ]
        return EngineLoad(
            **{field: page.total(name) for field, name in _TOTALS.items()},
            kv_usage=page.mean_share(_CACHE_USAGE),
            kv_capacity=sum(blocks * size for blocks, size in sizes if blocks and size) or None,
        )

    def probe_request(self, token_ids: Sequence[int]) -> HttpRequest:
        body: dict[str, Any] = {
            "model": self._options.model,
            "prompt": list(token_ids),
            "max_tokens": 1,  # one has to be sampled
            "temperature": 1.0,
            "prompt_logprobs": 1,
            "cache_salt": uuid4().hex,  # keeps cached work of older weights out of it
        }
        return HttpRequest("POST", f"{self.address}/completions", body, max_bytes=(1 << 20) + 1024 * len(token_ids))

    def read_probe(self, payload: bytes, token_ids: Sequence[int]) -> list[float]:
        """Read the log-probs: objects by token id, the prompt's own token always among them."""
        checks = self.validator
        choice = checks.only_choice(checks.parse_object(payload))
        entries = checks.check_probe(choice.get("prompt_logprobs"), "prompt_logprobs", token_ids)
        pairs = zip(token_ids[1:], entries, strict=True)
        return [checks.check_logprob(get_nested(entry, str(token), "logprob")) for token, entry in pairs]

    def cache_reset_request(self) -> HttpRequest:  # a development route
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
            raise error_from_response(self.address, response)
        return _is_flag_set(response.payload, "success")

    def _logprobs(self, choice: JsonObject, ids: Sequence[int]) -> list[float]:
        values, names = get_nested(choice, "logprobs", "token_logprobs"), get_nested(choice, "logprobs", "tokens")
        if not ids and not values:
            return []
        if not isinstance(values, list) or None in cast("list[object]", values):
            raise self.validator.contract_error(
                "does not return log-probs of the sampled tokens",
                "Do not start it with --max-logprobs 0; for NeMo-RL's server set 'engine: chat_prefix'.",
            )
        logprobs = self.validator.check_logprobs(cast("list[object]", values), len(ids))
        # The tokens come a second time with the log-probs, which must belong to the ids.
        if isinstance(names, list) and names and names != [f"token_id:{token}" for token in ids]:
            raise self.validator.contract_error("returned log-probs of other tokens than it sampled")
        return logprobs


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


def _is_flag_set(payload: bytes, key: str) -> bool:
    """Whether a flag is true in a small JSON answer; not in an empty one."""
    try:
        return get_nested(json.loads(payload), key) is True
    except (ValueError, RecursionError):
        return False
