"""The adapter for SGLang's ``POST /generate``: token ids in, token ids and log-probs out. Written for 0.5.23.

It differs from vLLM's in three ways that matter: log-probs are taken *after* temperature by default, they come as
``[log-prob, id, text]``, and an abort by id also ends every call whose id begins with that one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from prorl_gym.inference.engines.answer_stream import AnswerStream
from prorl_gym.inference.engines.dialect import (
    MAX_METRICS_BYTES,
    AnsweredCall,
    Dialect,
    HttpEngineOptions,
    session_header_value,
    unsupported_error,
)
from prorl_gym.inference.engines.http_engine import HttpEngine
from prorl_gym.inference.engines.http_exchange import HttpRequest, HttpResponse
from prorl_gym.inference.engines.logprob_rule import LogprobKind
from prorl_gym.inference.engines.prometheus_page import PrometheusPage
from prorl_gym.inference.engines.prompt_json import encode_prompt_ids
from prorl_gym.inference.engines.response_validator import (
    FinishReason,
    ResponseValidator,
    check_cached_tokens,
    get_nested,
    names_policy_versions,
)
from prorl_gym.inference.engines.vllm import max_response_bytes
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.records import EngineLoad

_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}

_METRICS = (
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:max_total_num_tokens",
    "sglang:num_retracted_requests_total",
    "sglang:prompt_tokens_total",
    "sglang:cached_tokens_total",
    "sglang:generation_tokens_total",
)

_STREAM_INTERVAL = 16
"""Tokens between two events: by default each event repeats everything before it."""

_FIRST_RANK = {"tp_rank": "0", "pp_rank": "0"}
"""All ranks of one replica may report the same figures; replicas (``dp_rank``) are summed."""

_FIX = "Serve the model with SGLang 0.5.20 or newer, unmodified."

_ECHO_FIX = "Start it without --allow-auto-truncate, and with nothing before it that rewrites prompts."

_LOGPROB_FIX = "Check that 'engines' names the server itself and not a router."


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions(HttpEngineOptions):
    """How to talk to an SGLang server."""

    logprob_kind: LogprobKind = "processed"
    """``raw`` only for a server that was started with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``."""
    priority_scheduling: bool = False
    """The server was started with ``--enable-priority-scheduling``, where higher values go first."""
    record_routed_experts: bool = False
    """Request the experts that each token met."""


class SglangEngine(HttpEngine):
    """One SGLang server, at a URL like ``http://127.0.0.1:30000/v1``; its own routes lie above ``/v1``."""

    def __init__(self, name: str, base_url: str, options: SglangOptions, *, version: int = 0) -> None:
        super().__init__(name, SglangDialect(base_url, options), options, version=version)


class SglangDialect(Dialect):
    """SGLang's routes.

    Args:
        base_url: with or without the final ``/v1``.
        options: see there.
    """

    def __init__(self, base_url: str, options: SglangOptions) -> None:
        self._options = options
        super().__init__(base_url, options, server_kind="an SGLang server", fix=_FIX, logprob_kind=options.logprob_kind)

    def sample_request(self, request: GenerationRequest) -> HttpRequest:
        """Write a call.

        Raises:
            EngineError: ``ENGINE_REFUSED``: an id that is not as long as all others could abort them, too.
        """
        if re.fullmatch(r"[0-9a-f]{32}", request.request_id) is None:
            raise unsupported_error(
                self.address, "aborts by the beginning of an id", "Give every call uuid4().hex as its request_id."
            )
        return HttpRequest(
            "POST",
            f"{self._root}/generate",
            self._body(request),
            {"X-Session-ID": session_header_value(request.session_id)},
            ("input_ids", encode_prompt_ids(request)),
            self._max_bytes(request),
        )

    def open_stream(self, request: GenerationRequest) -> AnswerStream | None:
        """Return what joins the events of a streamed call."""
        return SglangStream(self.validator, request) if self._may_stream(request) else None

    def read_answer(
        self,
        answer: Mapping[str, object],
        request: GenerationRequest,
        answered: AnsweredCall,
        *,
        is_prompt_checked: bool,
    ) -> GenerationResult:
        """See ``Dialect.read_answer``.

        Raises:
            EngineError: ``ENGINE_CONTRACT``, or the error of an abort with a status.
        """
        checks = self.validator
        checks.check_model_name(answer.get("model"), self._models.aliases)
        meta = checks.require_object(answer.get("meta_info"), "meta_info")
        reason = checks.require_object(meta.get("finish_reason"), "finish_reason")
        finish = checks.translate_finish_reason(reason.get("type"), _FINISH_REASONS)
        status = reason.get("status_code")
        if finish == "abort" and type(status) is int and 400 <= status < 600:
            message = reason.get("message")
            raise self.error_from_response(
                HttpResponse(status, message.encode(errors="replace") if isinstance(message, str) else b"")
            )
        if answer.get("output_ids") is None:
            raise checks.contract_error("does not return token ids (output_ids)")
        ids = checks.check_sampled_ids(answer["output_ids"], "output_ids", request, finish, answered.expectation())
        self._check_prompt(answer, meta, request, is_prompt_checked=is_prompt_checked)
        spans = _version_spans(meta, len(ids))
        return GenerationResult(
            token_ids=ids,
            logprobs=self._logprobs(meta.get("output_token_logprobs"), ids, "output_token_logprobs"),
            finish_reason=finish,
            logprob_kind=self._options.logprob_kind,
            engine=answered.engine,
            versions=checks.token_versions(spans, len(ids), answered.version),
            versions_reported=names_policy_versions(spans),
            seconds=answered.seconds,
            cached_tokens=check_cached_tokens(meta.get("cached_tokens"), len(request.prompt_ids)),
            routed_experts=checks.check_routed_experts(meta.get("routed_experts"))
            if self._options.record_routed_experts
            else None,
        )

    def health_request(self) -> HttpRequest:
        """Return the request for the model list."""
        return HttpRequest("GET", f"{self._root}/v1/models")

    def abort_request(self, request_id: str) -> HttpRequest:
        """Return the request that ends one call."""
        return HttpRequest("POST", f"{self._root}/abort_request", {"rid": request_id})

    def paused_request(self) -> HttpRequest:
        """Return the request for whether it takes calls: while it is paused it answers none of them."""
        return HttpRequest("GET", f"{self._root}/ready")

    def read_paused(self, response: HttpResponse) -> bool:
        """Read whether it takes none."""
        return response.status == 503

    def metrics_request(self) -> HttpRequest:
        """Return the request for the metrics page, which needs ``--enable-metrics``."""
        return HttpRequest("GET", f"{self._root}/metrics", max_bytes=MAX_METRICS_BYTES)

    def read_load(self, payload: bytes) -> EngineLoad | None:
        """Read the metrics page."""
        page = PrometheusPage(payload, _METRICS, _FIRST_RANK)
        if not page.has("sglang:num_running_reqs"):
            return None
        queries = page.total("sglang:prompt_tokens_total")
        return EngineLoad(
            running=page.total("sglang:num_running_reqs"),
            waiting=page.total("sglang:num_queue_reqs"),
            kv_usage=page.mean_share("sglang:token_usage"),
            kv_capacity=page.total("sglang:max_total_num_tokens") or None,
            preemptions=page.total("sglang:num_retracted_requests_total"),
            prefix_queries=queries,
            prefix_hits=min(queries, page.total("sglang:cached_tokens_total")),
            generated=page.total("sglang:generation_tokens_total"),
        )

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
        """Read the log-probs; the first token's is null, since nothing comes before it."""
        meta = self.validator.require_object(self.validator.parse_object(payload).get("meta_info"), "meta_info")
        entries = self.validator.require_array(meta.get("input_token_logprobs"), "input_token_logprobs")
        if len(entries) != len(token_ids):
            raise self.validator.contract_error(
                f"returned log-probs of {len(entries)} prompt tokens, {len(token_ids)} were sent"
            )
        return self._logprobs(list(entries[1:]), token_ids[1:], "input_token_logprobs")

    def cache_reset_request(self) -> HttpRequest:
        """Return the request to drop the prefix cache."""
        return HttpRequest("POST", f"{self._root}/flush_cache")

    def read_cache_reset(self, response: HttpResponse) -> bool:
        """Read whether it was dropped: 400 means that calls are running."""
        if response.status in (200, 400):
            return response.status == 200
        raise self.error_from_response(response)

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
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
        if self._may_stream(request):
            sampling["stream_interval"] = _STREAM_INTERVAL
        body: dict[str, Any] = {
            "rid": request.request_id,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,  # the prompt's log-probs would cost the reuse of its prefix
            "top_logprobs_num": 0,
            "return_prompt_token_ids": True,
            "stream": self._may_stream(request),
        }
        if request.cache_salt is not None:
            body["extra_key"] = request.cache_salt  # the salt of its prefix cache, under its oldest name
        if self._options.priority_scheduling and request.priority:
            body["priority"] = request.priority
        if self._options.record_routed_experts:
            body["return_routed_experts"] = True
        return body

    def _may_stream(self, request: GenerationRequest) -> bool:
        """Whether a call is streamed: every event of the server would repeat all routed experts."""
        return request.on_tokens is not None and not self._options.record_routed_experts

    def _max_bytes(self, request: GenerationRequest) -> int:
        whole = max_response_bytes(request, routed_experts=self._options.record_routed_experts)
        return whole * (2 + request.max_tokens // _STREAM_INTERVAL) if self._may_stream(request) else whole

    def _check_prompt(
        self,
        answer: Mapping[str, object],
        meta: Mapping[str, object],
        request: GenerationRequest,
        *,
        is_prompt_checked: bool,
    ) -> None:
        if not is_prompt_checked:
            self.validator.check_prompt_echo(
                answer.get("prompt_token_ids", meta.get("prompt_token_ids")), request, _ECHO_FIX
            )
        count = meta.get("prompt_tokens")
        if count is not None and count != len(request.prompt_ids):
            raise self.validator.contract_error("worked on a prompt of another length than it was sent", _ECHO_FIX)

    def _logprobs(self, entries: object, ids: Sequence[int], where: str) -> list[float]:
        if not ids and not entries:
            return []
        if not isinstance(entries, list):
            raise self.validator.contract_error(f"does not return log-probs ({where})", _LOGPROB_FIX)
        pairs = [self._logprob_and_id(entry, where) for entry in self.validator.require_array(entries, where)]  # pyright: ignore[reportUnknownArgumentType]
        logprobs = self.validator.check_logprobs([value for value, _ in pairs], len(ids))
        if [token for _, token in pairs] != list(ids):
            raise self.validator.contract_error(f"returned log-probs of other tokens than it sampled ({where})")
        return logprobs

    def _logprob_and_id(self, entry: object, where: str) -> tuple[object, object]:
        """An entry is ``[log-prob, id, text or null]``."""
        parts = self.validator.require_array(entry, f"an entry of {where}")
        if len(parts) < 2:
            raise self.validator.contract_error(f"returned an entry of {where} without its token")
        return parts[0], parts[1]


class SglangStream(AnswerStream):
    """A stream of ``/generate``: each event has all ids so far, or, as the server was started, the new ones only."""

    def __init__(self, validator: ResponseValidator, request: GenerationRequest) -> None:
        super().__init__(validator, request)
        self._logprobs: list[object] = []
        self._last: dict[str, object] = {}

    def joined(self) -> Mapping[str, object]:
        """See ``AnswerStream.joined``."""
        meta = self._validator.require_object(self._last.get("meta_info"), "meta_info")
        finish = meta.get("finish_reason")
        if self._is_cut_short or (finish is None and self._ids):
            finish = {"type": "abort"}
        whole = {**meta, "finish_reason": finish, "output_token_logprobs": self._logprobs[: len(self._ids)]}
        return self._last | {"output_ids": self._ids, "meta_info": whole}

    def _join(self, event: Mapping[str, object]) -> Sequence[object]:
        checks = self._validator
        meta = checks.require_object(event.get("meta_info"), "meta_info")
        self._last |= event
        self._check_prompt_once(event, meta)
        ids = checks.require_array(event.get("output_ids") or [], "output_ids")
        logprobs = checks.require_array(meta.get("output_token_logprobs") or [], "output_token_logprobs")
        if len(logprobs) != len(ids):
            raise checks.contract_error(f"returned {len(logprobs)} log-probs for {len(ids)} tokens")
        if len(ids) == meta.get("completion_tokens"):  # all so far
            ids, logprobs = ids[len(self._ids) :], logprobs[len(self._ids) :]
        values = [(*checks.require_array(entry, "an entry of output_token_logprobs"), None)[0] for entry in logprobs]
        checks.check_logprobs(values, len(ids))
        self._logprobs += logprobs
        return ids

    def _check_prompt_once(self, event: Mapping[str, object], meta: Mapping[str, object]) -> None:
        echo = event.get("prompt_token_ids", meta.get("prompt_token_ids"))
        if not self.is_prompt_checked and echo is not None:
            self._validator.check_prompt_echo(echo, self._request, _ECHO_FIX)
            self.is_prompt_checked = True


def _version_spans(meta: Mapping[str, object], count: int) -> object:
    """Return spans of weight versions: those of a call that met an update, or one for the whole call."""
    spans = meta.get("weight_versions")
    if spans is not None or get_nested(meta, "weight_version") is None:
        return spans
    return [{"version": meta["weight_version"], "start": 0, "end": count}]
