"""vLLM's completions route as data: the request we write, and a suspicious reading of the answer.

Written for 0.33 and 0.32; what 0.32 does not know it ignores (``return_weight_versions``) or lacks (``/is_paused``
without its development routes), and neither is an error.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from prorl_gym.errors import EngineError
from prorl_gym.inference.behaviour import LogprobKind
from prorl_gym.inference.checks import Checks, FinishReason, cached_tokens, inside, tells_versions
from prorl_gym.inference.dialect import METRICS_ANSWER, Call, Dialect, HttpOptions, call_headers
from prorl_gym.inference.http import Answer, Ask
from prorl_gym.inference.metrics import Page, count
from prorl_gym.inference.model_list import ModelList
from prorl_gym.inference.prompt_text import cut_echo, prompt_text
from prorl_gym.inference.protocol import EngineHealth, EngineLoad, GenerationRequest, GenerationResult
from prorl_gym.inference.refusals import unable

REPETITION = "repetition"
"""vLLM's own guard against loops: the turn is over, without its terminator."""

FINISH: Mapping[str, FinishReason] = {
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
class VllmOptions(HttpOptions):
    """How to talk to a vLLM server."""

    logprob_kind: LogprobKind = "raw"
    """What the server's ``--logprobs-mode`` gives: ``raw`` is its default."""
    priority_scheduling: bool = False
    """The server was started with ``--scheduling-policy priority``."""
    routed_experts: bool = False
    """Keep which experts each token met, from a server that was started to return them."""


class VllmDialect(Dialect):
    """vLLM's routes.

    Args:
        base_url: ends in ``/v1``.
        options: see there.
    """

    def __init__(self, base_url: str, options: VllmOptions) -> None:
        self._base = base_url.rstrip("/")
        self._root = self._base.removesuffix("/v1")
        self._options = options
        fix = "Serve the model with vLLM 0.10.2 or newer, unmodified."
        checks = Checks(
            self._base, options.vocab_size, "a vLLM server", fix, model=options.model, control_ids=options.control_ids
        )
        super().__init__(checks, options.logprob_kind)
        self._models = ModelList(self._base, options.model)

    def sample(self, request: GenerationRequest) -> Ask:
        """Write a call of the completions route."""
        return Ask(
            "POST",
            f"{self._base}/completions",
            request_body(request, self._options.model, send_priority=self._options.priority_scheduling),
            call_headers(request),
            ("prompt", prompt_text(request)),
            size_bound(request, routed_experts=self._options.routed_experts),
        )

    def sampled(self, payload: bytes, request: GenerationRequest, call: Call) -> GenerationResult:
        """Check a 200 answer and return what was sampled."""
        checks = self.checks
        payload, echoed = cut_echo(payload, request)
        answer = checks.json_object(payload)
        checks.served_model(answer.get("model"), self._models.aliases)
        choice = checks.only_choice(answer)
        finish = checks.finish(choice.get("finish_reason"), FINISH)
        if choice.get("token_ids") is None:
            raise checks.contract(
                "does not return token ids", "Serve the model with vLLM 0.10.2 or newer (return_token_ids)."
            )
        expected = call.expected(other_end=choice.get("finish_reason") == REPETITION)
        ids = checks.sampled_ids(choice["token_ids"], "token_ids", request, finish, expected)
        if not echoed:
            checks.echo(choice.get("prompt_token_ids"), request, _ECHO_FIX)
        spans = choice.get("weight_versions")
        return GenerationResult(
            token_ids=ids,
            logprobs=self._logprobs(choice, ids),
            finish_reason=finish,
            logprob_kind=self._options.logprob_kind,
            engine=call.engine,
            versions=checks.versions(spans, len(ids), call.version),
            versions_told=tells_versions(spans),
            seconds=call.seconds,
            cached_tokens=cached_tokens(
                inside(answer, "usage", "prompt_tokens_details", "cached_tokens"), len(request.prompt_ids)
            ),
            routed_experts=checks.experts(choice.get("routed_experts")) if self._options.routed_experts else None,
        )

    def health(self) -> Ask:
        """Ask for the model list, which tells the context length too."""
        return Ask("GET", f"{self._base}/models")

    def healthy(self, payload: bytes) -> EngineHealth:
        """Read the model list."""
        return self._models.health(payload)

    def abort(self, request_id: str) -> Ask:
        """Ask for the end of one call. Its own id there has the route's prefix and the prompt's index."""
        return Ask("POST", f"{self._root}/abort_requests", {"request_ids": [f"cmpl-{request_id}-0"]})

    def paused(self) -> Ask:
        """Ask whether it is paused (a development route): 0.32 answers nothing at all then, 0.33 says 503."""
        return Ask("GET", f"{self._root}/is_paused")

    def is_paused(self, answer: Answer) -> bool:
        """Read whether it is."""
        return answer.status == 200 and _flag(answer.payload, "is_paused")

    def metrics(self) -> Ask:
        """Ask for the metrics page."""
        return Ask("GET", f"{self._root}/metrics", bound=METRICS_ANSWER)

    def load(self, payload: bytes) -> EngineLoad | None:
        """Read the metrics page."""
        return read_load(payload)

    def probe(self, token_ids: Sequence[int]) -> Ask:
        """Ask for the log-probs of the prompt; one token has to be sampled along with it."""
        body: dict[str, Any] = {
            "model": self._options.model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 1,
            "cache_salt": uuid4().hex,  # weights are asked for, not what was computed with older ones
        }
        return Ask("POST", f"{self._base}/completions", body, bound=(1 << 20) + 1024 * len(token_ids))

    def probed(self, payload: bytes, token_ids: Sequence[int]) -> list[float]:
        """Read them: objects by token id, the prompt's own token always among them."""
        checks = self.checks
        choice = checks.only_choice(checks.json_object(payload))
        entries = checks.array(choice.get("prompt_logprobs"), "prompt_logprobs")
        if len(entries) != len(token_ids):
            raise checks.contract(f"told log-probs of {len(entries)} prompt tokens, {len(token_ids)} were sent")
        told = zip(token_ids[1:], entries[1:], strict=True)
        return [checks.logprob(inside(entry, str(token), "logprob")) for token, entry in told]

    def reset(self) -> Ask:
        """Ask to drop the prefix cache (a development route)."""
        return Ask("POST", f"{self._root}/reset_prefix_cache")

    def confirmed(self, answer: Answer) -> bool:
        """Read whether it did: it does not while blocks are held, and older servers do not say."""
        if answer.status in (404, 405):
            raise unable(
                self.address,
                "has no /reset_prefix_cache",
                "Start vLLM with VLLM_SERVER_DEV_MODE=1, on a private address.",
            )
        if answer.status != 200:
            raise self.refusal(answer)
        return _flag(answer.payload, "success")

    def _logprobs(self, choice: Mapping[str, object], ids: Sequence[int]) -> list[float]:
        values, names = inside(choice, "logprobs", "token_logprobs"), inside(choice, "logprobs", "tokens")
        if not ids and not values:
            return []
        if not isinstance(values, list):
            raise self._no_logprobs()
        if None in cast("list[object]", values):
            raise self._no_logprobs()
        logprobs = self.checks.logprobs(cast("list[object]", values), len(ids))
        # The tokens are named once more: the log-probs must belong to the ids.
        if isinstance(names, list) and names and names != [f"token_id:{token}" for token in ids]:
            raise self.checks.contract("returned log-probs of other tokens than it sampled")
        return logprobs

    def _no_logprobs(self) -> EngineError:
        return self.checks.contract(
            "does not return log-probs of the sampled tokens",
            "Do not start it with --max-logprobs 0; for NeMo-RL's server set 'engine: chat_prefix'.",
        )


def request_body(request: GenerationRequest, model: str, *, send_priority: bool = False) -> dict[str, Any]:
    """Return the JSON body of a call, all but its prompt: ids and log-probs of the sampled tokens are asked for.

    Args:
        request: the call.
        model: the name that the server serves it under.
        send_priority: the server runs vLLM's priority scheduler; any other refuses a priority.
    """
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.max_tokens,  # never left out: vLLM's default is 16
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": 0,  # no alternatives, only the sampled token's
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "return_weight_versions": True,
        "stop_token_ids": list(request.stop_token_ids),
    }
    if request.top_k > 0:
        body["top_k"] = request.top_k
    if request.seed is not None:
        body["seed"] = request.seed
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if send_priority and request.priority:
        body["priority"] = -request.priority  # vLLM serves the lowest number first
    return body


def size_bound(request: GenerationRequest, *, routed_experts: bool = False) -> int:
    """Return how many bytes an honest answer can have: generous per token, and still a bound."""
    bound = (1 << 20) + 1024 * request.max_tokens + 16 * len(request.prompt_ids)
    tokens = request.max_tokens + len(request.prompt_ids)
    return bound + _ROUTED_EXPERTS_BYTES * tokens if routed_experts else bound


def read_load(payload: bytes) -> EngineLoad | None:
    """Read vLLM's metrics page, summed over the engines behind one server; ``None`` when it is another page."""
    page = Page(payload, _METRICS)
    if not page.has("vllm:num_requests_running"):
        return None
    sizes = [
        (count(sample.labels.get("num_gpu_blocks", "")), count(sample.labels.get("block_size", "")))
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


def _flag(payload: bytes, key: str) -> bool:
    """Whether a small JSON answer says so; an empty one says nothing."""
    try:
        return inside(json.loads(payload), key) is True
    except (ValueError, RecursionError):
        return False
