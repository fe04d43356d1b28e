"""The adapter for SGLang's ``POST /generate``: token ids in, token ids and log-probs out. Written for 0.5.23.

It differs from vLLM's in three ways that matter: log-probs are taken *after* temperature by default, they come as
``[log-prob, id, text]``, and an abort by id also ends every call whose id begins with that one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from prorl_gym.inference.engines.dialect import (
    MAX_METRICS_BYTES,
    Dialect,
    HttpEngineOptions,
    encode_prompt_ids,
    error_from_response,
    session_header_value,
    unsupported_error,
)
from prorl_gym.inference.engines.http_engine import HttpEngine
from prorl_gym.inference.engines.http_exchange import HttpRequest, HttpResponse
from prorl_gym.inference.engines.prometheus_page import PrometheusPage
from prorl_gym.inference.engines.response_validator import (
    AnsweredCall,
    FinishReason,
    JsonObject,
    check_cached_tokens,
)
from prorl_gym.inference.engines.vllm import max_response_bytes
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult, LogprobKind
from prorl_gym.records import EngineLoad

_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}

_ANSWER_FIELDS = frozenset({"text", "output_ids", "meta_info", "prompt_token_ids", "index", "model"})

_META_FIELDS = frozenset(
    # managers/tokenizer_manager.py: what is read, and counts that say nothing about the tokens.
    {"id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "prompt_token_ids", "weight_version"}
    | {"weight_versions", "output_token_logprobs", "output_token_logprobs_length", "input_token_logprobs"}
    | {"routed_experts", "num_retractions", "cached_tokens_details", "reasoning_tokens", "dp_rank", "e2e_latency"}
    # observability/req_time_stats.py
    | {"request_received_ts", "first_token_latency", "api_server_dispatch_finish_ts", "response_sent_to_client_ts"}
    | {"request_finished_ts", "decode_throughput", "storage_prefetch_wait", "storage_staging_wait", "queue_time"}
    | {"forward_entry_time", "prefill_finished_time"}
    # Speculative decoding: drafts that were accepted were sampled from the model.
    | {"spec_accept_rate", "spec_accept_length", "spec_num_correct_drafts", "spec_num_proposed_drafts"}
    | {"spec_verify_ct", "spec_cap_length", "spec_block_accept_length", "spec_correct_drafts_histogram"}
    | {"spec_cap_lens_histogram"}
)

_CACHE_USAGE, _CACHE_SIZE = "sglang:token_usage", "sglang:max_total_num_tokens"

_TOTALS = {
    "running": "sglang:num_running_reqs",
    "waiting": "sglang:num_queue_reqs",
    "preemptions": "sglang:num_retracted_requests_total",
    "prefix_queries": "sglang:prompt_tokens_total",
    "prefix_hits": "sglang:cached_tokens_total",
    "generated": "sglang:generation_tokens_total",
}
"""Metrics by the field of ``EngineLoad``."""

_FIRST_RANK = {"tp_rank": "0", "pp_rank": "0"}
"""All ranks of one replica may report the same figures; replicas (``dp_rank``) are summed."""

_ECHO_FIX = "Start it without --allow-auto-truncate, and with nothing before it that rewrites prompts."

_LOGPROB_FIX = "Check that 'engines' names the server itself and not a router."


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions(HttpEngineOptions):
    logprob_kind: LogprobKind | None = "processed"
    """``raw`` only for a server that was started with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``."""


class SglangEngine(HttpEngine):
    """One SGLang server, at a URL like ``http://127.0.0.1:30000/v1``; its own routes lie above ``/v1``."""

    def __init__(self, name: str, base_url: str, options: SglangOptions, *, version: int = 0) -> None:
        super().__init__(name, SglangDialect(base_url, options), options, version=version)


class SglangDialect(Dialect[SglangOptions]):
    server_kind = "an SGLang server"
    fix = "Serve the model with SGLang 0.5.20 or newer, unmodified."

    def sample_request(self, request: GenerationRequest) -> HttpRequest:
        # An id that is not as long as all others could abort them, too.
        if re.fullmatch(r"[0-9a-f]{32}", request.request_id) is None:
            raise unsupported_error(
                self.address, "aborts by the beginning of an id", "Give every call uuid4().hex as its request_id."
            )
        sampling: dict[str, Any] = {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stop_token_ids": list(request.stop_token_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if request.top_k > 0:
            sampling["top_k"] = request.top_k
        if request.seed is not None:
            sampling["sampling_seed"] = request.seed
        body: dict[str, Any] = {
            "rid": request.request_id,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,  # the prompt's log-probs would cost the reuse of its prefix
            "top_logprobs_num": 0,
            "return_prompt_token_ids": True,
            "stream": False,
        }
        if request.cache_salt is not None:
            body["extra_key"] = request.cache_salt  # the salt of its prefix cache, under its oldest name
        if self._options.priority_scheduling and request.priority:
            body["priority"] = request.priority
        if self._options.record_routed_experts:
            body["return_routed_experts"] = True
        return HttpRequest(
            "POST",
            f"{self._root}/generate",
            body,
            {"X-Session-ID": session_header_value(request.session_id)},
            ("input_ids", encode_prompt_ids(request)),
            max_response_bytes(request, routed_experts=self._options.record_routed_experts),
        )

    def read_answer(self, answer: JsonObject, request: GenerationRequest, answered: AnsweredCall) -> GenerationResult:
        """Check an answer. Raises also the error of an abort with a status."""
        checks = self.validator
        checks.check_model_name(answer.get("model"), self._models.aliases)
        meta = checks.require_object(answer.get("meta_info"), "meta_info")
        self.count_unknown(answer, _ANSWER_FIELDS)
        self.count_unknown(meta, _META_FIELDS, "meta_info.")
        reason = checks.require_object(meta.get("finish_reason"), "finish_reason")
        finish = checks.translate_finish_reason(reason.get("type"), _FINISH_REASONS)
        status = reason.get("status_code")
        if finish == "abort" and type(status) is int and 400 <= status < 600:
            message = reason.get("message")
            payload = message.encode(errors="replace") if isinstance(message, str) else b""
            raise error_from_response(self.address, HttpResponse(status, payload))
        if answer.get("output_ids") is None:
            raise checks.contract_error("does not return token ids (output_ids)")
        ids = checks.check_sampled_ids(answer["output_ids"], "output_ids", request, finish, answered)
        if not answered.is_prompt_checked:
            checks.check_prompt_echo(answer.get("prompt_token_ids", meta.get("prompt_token_ids")), request, _ECHO_FIX)
        count = meta.get("prompt_tokens")
        if count is not None and count != len(request.prompt_ids):
            raise checks.contract_error("worked on a prompt of another length than it was sent", _ECHO_FIX)
        spans = meta.get("weight_versions")  # of a call that met an update; otherwise there is one for the whole call
        if spans is None and meta.get("weight_version") is not None:
            spans = [{"version": meta["weight_version"], "start": 0, "end": len(ids)}]
        return self.make_result(
            answered,
            ids,
            self._logprobs(meta.get("output_token_logprobs"), ids, "output_token_logprobs"),
            finish,
            cached_tokens=check_cached_tokens(meta.get("cached_tokens"), len(request.prompt_ids)),
            version_spans=spans,
            routed_experts=meta.get("routed_experts"),
        )

    def health_request(self) -> HttpRequest:
        return HttpRequest("GET", f"{self._root}/v1/models")

    def abort_request(self, request_id: str) -> HttpRequest:
        return HttpRequest("POST", f"{self._root}/abort_request", {"rid": request_id})

    def paused_request(self) -> HttpRequest:  # while it is paused it answers no call
        return HttpRequest("GET", f"{self._root}/ready")

    def read_paused(self, response: HttpResponse) -> bool:
        return response.status == 503

    def metrics_request(self) -> HttpRequest:  # needs ``--enable-metrics``
        return HttpRequest("GET", f"{self._root}/metrics", max_bytes=MAX_METRICS_BYTES)

    def read_load(self, payload: bytes) -> EngineLoad | None:
        page = PrometheusPage(payload, [*_TOTALS.values(), _CACHE_USAGE, _CACHE_SIZE], _FIRST_RANK)
        if not page.samples[_TOTALS["running"]]:
            return None
        totals = {field: page.total(name) for field, name in _TOTALS.items()}
        totals["prefix_hits"] = min(totals["prefix_queries"], totals["prefix_hits"])
        usage, capacity = page.mean_share(_CACHE_USAGE), page.total(_CACHE_SIZE) or None
        return EngineLoad(**totals, kv_usage=usage, kv_capacity=capacity)

    def probe_request(self, token_ids: Sequence[int]) -> HttpRequest:
        """Return the request for the log-probs of a prompt from its start, which also bypasses the prefix cache."""
        body: dict[str, Any] = {
            "rid": uuid4().hex,
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
            "extra_key": uuid4().hex,
        }
        return HttpRequest("POST", f"{self._root}/generate", body, max_bytes=(1 << 20) + 1024 * len(token_ids))

    def read_probe(self, payload: bytes, token_ids: Sequence[int]) -> list[float]:
        checks = self.validator
        meta = checks.require_object(checks.parse_object(payload).get("meta_info"), "meta_info")
        entries = checks.check_probe(meta.get("input_token_logprobs"), "input_token_logprobs", token_ids)
        return self._logprobs(entries, token_ids[1:], "input_token_logprobs")

    def cache_reset_request(self) -> HttpRequest:
        return HttpRequest("POST", f"{self._root}/flush_cache")

    def read_cache_reset(self, response: HttpResponse) -> bool:
        if response.status in (200, 400):  # 400: calls are running
            return response.status == 200
        raise error_from_response(self.address, response)

    def _logprobs(self, entries: object, ids: Sequence[int], where: str) -> list[float]:
        if not ids and not entries:
            return []
        if not isinstance(entries, list):
            raise self.validator.contract_error(f"does not return log-probs ({where})", _LOGPROB_FIX)
        items = cast("list[object]", entries)
        pairs = [self.validator.require_array(item, f"an entry of {where}") for item in items]
        if any(len(pair) < 2 for pair in pairs):  # an entry is ``[log-prob, id, text or null]``
            raise self.validator.contract_error(f"returned an entry of {where} without its token")
        logprobs = self.validator.check_logprobs([pair[0] for pair in pairs], len(ids))
        if [pair[1] for pair in pairs] != list(ids):
            raise self.validator.contract_error(f"returned log-probs of other tokens than it sampled ({where})")
        return logprobs
