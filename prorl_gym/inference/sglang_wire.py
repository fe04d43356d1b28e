"""SGLang's native route as data: the request we write, and a suspicious reading of the answer. Written for 0.5.23.

It differs from vLLM's in what hurts when it is overlooked: log-probs are taken *after* temperature by default, they
come as ``[log-prob, id, text]``, and an abort by id also ends every call whose id begins with that one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from prorl_gym.inference.behaviour import LogprobKind
from prorl_gym.inference.checks import Checks, FinishReason, cached_tokens, inside, tells_versions
from prorl_gym.inference.dialect import METRICS_ANSWER, Call, Dialect, HttpOptions, session_header
from prorl_gym.inference.http import Answer, Ask
from prorl_gym.inference.metrics import Page
from prorl_gym.inference.model_list import ModelList
from prorl_gym.inference.prompt_text import cut_echo, prompt_text
from prorl_gym.inference.protocol import EngineHealth, EngineLoad, GenerationRequest, GenerationResult
from prorl_gym.inference.refusals import unable
from prorl_gym.inference.vllm_wire import size_bound

_FINISH: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}

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
_ONE_RANK = {"tp_rank": "0", "pp_rank": "0"}
"""Ranks of one replica may all tell the same figures; replicas (``dp_rank``) are added up."""

_FIX = "Serve the model with SGLang 0.5.20 or newer, unmodified."
_ECHO_FIX = "Start it without --allow-auto-truncate, and with nothing before it that rewrites prompts."
_LOGPROB_FIX = "Check that 'engines' names the server itself and not a router."


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions(HttpOptions):
    """How to talk to an SGLang server."""

    logprob_kind: LogprobKind = "processed"
    """``raw`` only for a server that was started with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``."""
    priority_scheduling: bool = False
    """The server was started with ``--enable-priority-scheduling``, where higher values go first."""
    routed_experts: bool = False
    """Ask for the experts that each token met."""


class SglangDialect(Dialect):
    """SGLang's routes.

    Args:
        base_url: with or without the final ``/v1``.
        options: see there.
    """

    def __init__(self, base_url: str, options: SglangOptions) -> None:
        base = base_url.rstrip("/")
        self._root = base.removesuffix("/v1")
        self._options = options
        checks = Checks(
            base, options.vocab_size, "an SGLang server", _FIX, model=options.model, control_ids=options.control_ids
        )
        super().__init__(checks, options.logprob_kind)
        self._models = ModelList(base, options.model)

    def sample(self, request: GenerationRequest) -> Ask:
        """Write a call.

        Raises:
            EngineError: ``ENGINE_REFUSED``: an id that is not as long as all others could abort them, too.
        """
        if re.fullmatch(r"[0-9a-f]{32}", request.request_id) is None:
            raise unable(
                self.address, "aborts by the beginning of an id", "Give every call uuid4().hex as its request_id."
            )
        return Ask(
            "POST",
            f"{self._root}/generate",
            self._body(request),
            {"X-Session-ID": session_header(request.session_id)},
            ("input_ids", prompt_text(request)),
            size_bound(request, routed_experts=self._options.routed_experts),
        )

    def sampled(self, payload: bytes, request: GenerationRequest, call: Call) -> GenerationResult:
        """Check a 200 answer and return what was sampled.

        Raises:
            EngineError: ``ENGINE_CONTRACT``; what an abort with a status says.
        """
        checks = self.checks
        payload, echoed = cut_echo(payload, request)
        answer = checks.json_object(payload)
        checks.served_model(answer.get("model"), self._models.aliases)
        meta = checks.mapping(answer.get("meta_info"), "meta_info")
        reason = checks.mapping(meta.get("finish_reason"), "finish_reason")
        finish = checks.finish(reason.get("type"), _FINISH)
        status = reason.get("status_code")
        if finish == "abort" and type(status) is int and 400 <= status < 600:
            message = reason.get("message")
            raise self.refusal(Answer(status, message.encode(errors="replace") if isinstance(message, str) else b""))
        if answer.get("output_ids") is None:
            raise checks.contract("does not return token ids (output_ids)")
        ids = checks.sampled_ids(answer["output_ids"], "output_ids", request, finish, call.expected())
        self._check_prompt(answer, meta, request, echoed=echoed)
        spans = _spans(meta, len(ids))
        return GenerationResult(
            token_ids=ids,
            logprobs=self._logprobs(meta.get("output_token_logprobs"), ids, "output_token_logprobs"),
            finish_reason=finish,
            logprob_kind=self._options.logprob_kind,
            engine=call.engine,
            versions=checks.versions(spans, len(ids), call.version),
            versions_told=tells_versions(spans),
            seconds=call.seconds,
            cached_tokens=cached_tokens(meta.get("cached_tokens"), len(request.prompt_ids)),
            routed_experts=checks.experts(meta.get("routed_experts")) if self._options.routed_experts else None,
        )

    def health(self) -> Ask:
        """Ask for the model list, which tells the context length too."""
        return Ask("GET", f"{self._root}/v1/models")

    def healthy(self, payload: bytes) -> EngineHealth:
        """Read the model list."""
        return self._models.health(payload)

    def abort(self, request_id: str) -> Ask:
        """Ask for the end of one call."""
        return Ask("POST", f"{self._root}/abort_request", {"rid": request_id})

    def paused(self) -> Ask:
        """Ask whether it takes calls: while it is paused it answers none of them."""
        return Ask("GET", f"{self._root}/ready")

    def is_paused(self, answer: Answer) -> bool:
        """Read whether it does not."""
        return answer.status == 503

    def metrics(self) -> Ask:
        """Ask for the metrics page, which needs ``--enable-metrics``."""
        return Ask("GET", f"{self._root}/metrics", bound=METRICS_ANSWER)

    def load(self, payload: bytes) -> EngineLoad | None:
        """Read the metrics page."""
        page = Page(payload, _METRICS, _ONE_RANK)
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

    def probe(self, token_ids: Sequence[int]) -> Ask:
        """Ask for the log-probs of the prompt from its start, which also keeps its prefix cache out of it."""
        body: dict[str, Any] = {
            "rid": uuid4().hex,
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
            "extra_key": uuid4().hex,
        }
        return Ask("POST", f"{self._root}/generate", body, bound=(1 << 20) + 1024 * len(token_ids))

    def probed(self, payload: bytes, token_ids: Sequence[int]) -> list[float]:
        """Read them; the first token's is null, since nothing comes before it."""
        meta = self.checks.mapping(self.checks.json_object(payload).get("meta_info"), "meta_info")
        told = self.checks.array(meta.get("input_token_logprobs"), "input_token_logprobs")
        if len(told) != len(token_ids):
            raise self.checks.contract(f"told log-probs of {len(told)} prompt tokens, {len(token_ids)} were sent")
        return self._logprobs(list(told[1:]), token_ids[1:], "input_token_logprobs")

    def reset(self) -> Ask:
        """Ask to drop the prefix cache."""
        return Ask("POST", f"{self._root}/flush_cache")

    def confirmed(self, answer: Answer) -> bool:
        """Read whether it did: 400 says that calls are running."""
        if answer.status in (200, 400):
            return answer.status == 200
        raise self.refusal(answer)

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
            body["extra_key"] = request.cache_salt  # the salt of its prefix cache, under the name that it has longest
        if self._options.priority_scheduling and request.priority:
            body["priority"] = request.priority
        if self._options.routed_experts:
            body["return_routed_experts"] = True
        return body

    def _check_prompt(
        self, answer: Mapping[str, object], meta: Mapping[str, object], request: GenerationRequest, *, echoed: bool
    ) -> None:
        if not echoed:
            self.checks.echo(answer.get("prompt_token_ids", meta.get("prompt_token_ids")), request, _ECHO_FIX)
        told = meta.get("prompt_tokens")
        if told is not None and told != len(request.prompt_ids):
            raise self.checks.contract("worked on a prompt of another length than it was sent", _ECHO_FIX)

    def _logprobs(self, entries: object, ids: Sequence[int], where: str) -> list[float]:
        if not ids and not entries:
            return []
        if not isinstance(entries, list):
            raise self.checks.contract(f"does not return log-probs ({where})", _LOGPROB_FIX)
        pairs = [self._pair(entry, where) for entry in self.checks.array(entries, where)]  # pyright: ignore[reportUnknownArgumentType]
        logprobs = self.checks.logprobs([value for value, _ in pairs], len(ids))
        if [token for _, token in pairs] != list(ids):
            raise self.checks.contract(f"returned log-probs of other tokens than it sampled ({where})")
        return logprobs

    def _pair(self, entry: object, where: str) -> tuple[object, object]:
        """An entry is ``[log-prob, id, text or null]``."""
        parts = self.checks.array(entry, f"an entry of {where}")
        if len(parts) < 2:
            raise self.checks.contract(f"returned an entry of {where} without its token")
        return parts[0], parts[1]


def _spans(meta: Mapping[str, object], count: int) -> object:
    """Return spans of weight versions: those of a call that met an update, or one for the whole call."""
    spans = meta.get("weight_versions")
    if spans is not None or inside(meta, "weight_version") is None:
        return spans
    return [{"version": meta["weight_version"], "start": 0, "end": count}]
