"""The adapter for NeMo-RL's vLLM server, which takes messages whose last assistant turn carries its token ids.

The server renders the messages with its own template and then puts the ids of the last assistant message (what its
prompt was and what was sampled) over the beginning of what it rendered. So the prompt is exact if both sides' templates
agree on everything *after* the last turn, and on the whole first prompt. That is verified, never trusted: the answer
carries the ids that the model saw, and they must be those that we hold.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from prorl_gym.inference.engines.dialect import (
    ANSWER_FIELDS,
    CHOICE_FIELDS,
    MESSAGE_FIELDS,
    Dialect,
    HttpEngineOptions,
    call_headers,
    positive_int,
    unsupported_error,
)
from prorl_gym.inference.engines.http_engine import HttpEngine
from prorl_gym.inference.engines.http_exchange import HttpRequest
from prorl_gym.inference.engines.openai import tool_fields
from prorl_gym.inference.engines.response_validator import (
    AnsweredCall,
    FinishReason,
    JsonObject,
    get_nested,
    read_cached_tokens,
)
from prorl_gym.inference.engines.vllm import FINISH_REASONS, REPETITION, max_response_bytes, sampling_fields
from prorl_gym.inference.protocol import Conversation, EngineHealth, GenerationRequest, GenerationResult, LogprobKind

_FINISH: Mapping[str, FinishReason] = {**FINISH_REASONS, "tool_calls": "stop"}

_MESSAGE_FIELDS = MESSAGE_FIELDS | {
    *("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts"),
}

_ID = re.compile(r"(?:token_id:)?([0-9]{1,9})")

_ECHO_FIX = (
    "Give it the template of 'tokenizer'/'chat_template' and the same 'template_options', without history edits."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrefixOptions(HttpEngineOptions):
    logprob_kind: LogprobKind | None = "processed"
    """NeMo-RL starts vLLM so that it returns the probabilities that were sampled from."""
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sent as ``chat_template_kwargs``, so that the server renders as we do."""


class ChatPrefixEngine(HttpEngine):
    """One NeMo-RL server, at a URL like ``http://127.0.0.1:4000/v1``: exact tokens over a chat route."""

    def __init__(self, name: str, base_url: str, options: ChatPrefixOptions, *, version: int = 0) -> None:
        super().__init__(name, ChatPrefixDialect(base_url, options), options, version=version)


class ChatPrefixDialect(Dialect[ChatPrefixOptions]):
    """NeMo-RL's routes: chat completions and tokenize. It has no abort, no health, no metrics, no reset."""

    server_kind = "NeMo-RL's vLLM server"
    fix = "Serve the policy with NeMo-RL's own vLLM server (expose_http_server: true), or set another 'engine'."

    def sample_request(self, request: GenerationRequest) -> HttpRequest:
        conversation = self.require_conversation(request)
        body: dict[str, Any] = {
            "model": self._options.model,
            "messages": self._messages(conversation, request.prompt_ids),
            "max_tokens": request.max_tokens,
            "logprobs": True,
            "top_logprobs": 0,  # without it the server rejects ``logprobs``
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            # Always temperature and top_p, and top_k only when it is on: the server asserts that they are those of the
            # training.
            **sampling_fields(request),
            **tool_fields(conversation),
        }
        if self._options.template_options:
            body["chat_template_kwargs"] = dict(self._options.template_options)
        # The message and the log-probs carry ids and texts of each token once more.
        max_bytes = 2 * max_response_bytes(request, routed_experts=self._options.record_routed_experts)
        url = f"{self.address}/chat/completions"
        return HttpRequest("POST", url, body, call_headers(request), max_bytes=max_bytes)

    def read_answer(self, answer: JsonObject, request: GenerationRequest, answered: AnsweredCall) -> GenerationResult:
        checks = self.validator
        checks.check_model_name(answer.get("model"))
        choice = checks.only_choice(answer)
        message = checks.require_object(choice.get("message"), "its message")
        self.count_unknown(answer, ANSWER_FIELDS)
        self.count_unknown(choice, CHOICE_FIELDS, "choice.")
        self.count_unknown(message, _MESSAGE_FIELDS, "message.")
        finish = checks.translate_finish_reason(choice.get("finish_reason"), _FINISH)
        echo = _first_present(message.get("prompt_token_ids"), answer.get("prompt_token_ids"))
        if not answered.is_prompt_checked and not answered.is_trial:  # a trial's prompt is the server's own rendering
            checks.check_prompt_echo(echo, request, _ECHO_FIX)
        content = get_nested(choice, "logprobs", "content")  # of vLLM's own chat route
        entries = cast("list[object]", content) if isinstance(content, list) else None
        named = None if entries is None else [get_nested(entry, "token") for entry in entries]
        values = None if entries is None else [get_nested(entry, "logprob") for entry in entries]
        sampled = _first_present(message.get("generation_token_ids"), named)
        if sampled is None:
            raise checks.contract_error("does not return token ids")
        guarded = choice.get("finish_reason") == REPETITION
        ids = checks.check_sampled_ids(
            _as_ids(sampled), "generation_token_ids", request, finish, answered, stopped_by_guard=guarded
        )
        logprobs = _first_present(message.get("generation_log_probs"), values)
        if logprobs is None:
            raise checks.missing_logprobs_error()
        return self.make_result(
            answered,
            ids,
            checks.check_logprobs(checks.require_array(logprobs, "generation_log_probs"), len(ids)),
            finish,
            cached_tokens=read_cached_tokens(answer, len(request.prompt_ids)),
            routed_experts=message.get("routed_experts"),
        )

    def health_request(self) -> HttpRequest:  # the only route besides the chat
        return HttpRequest("POST", f"{self._root}/tokenize", {"model": self._options.model, "prompt": "a"})

    def read_health(self, payload: bytes) -> EngineHealth:
        length = self.validator.parse_object(payload).get("max_model_len")
        return EngineHealth(ok=True, max_model_len=positive_int(length))

    def _messages(self, conversation: Conversation, prompt_ids: Sequence[int]) -> list[dict[str, Any]]:
        messages = [message.to_chat() for message in conversation.messages]
        if conversation.last_turn_span is None:
            return messages
        start, end = conversation.last_turn_span
        last = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
        if last is None or not 0 <= start <= end <= len(prompt_ids):
            raise unsupported_error(
                self.address,
                f"cannot be given a turn at {start}..{end} that the conversation does not have",
                "Hand over all messages with the ids that belong to them.",
            )
        last["prompt_token_ids"] = list(prompt_ids[:start])
        last["generation_token_ids"] = list(prompt_ids[start:end])
        last["generation_log_probs"] = [0.0] * (end - start)  # the field is required; the server reads the ids alone
        return messages


def _first_present(first: object, second: object) -> object:
    """Return a field of NeMo-RL's message, or else of vLLM's own answer around it."""
    return second if first is None else first


def _as_ids(tokens: object) -> object:
    """Read ids that are spelled ``token_id:7`` or ``7``; anything else is left for the checks to refuse."""
    if not isinstance(tokens, list):
        return tokens
    spelled = (
        (token, _ID.fullmatch(token) if isinstance(token, str) else None) for token in cast("list[object]", tokens)
    )
    return [int(found[1]) if found else token for token, found in spelled]
