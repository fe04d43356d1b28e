"""The adapter for NeMo-RL's vLLM server, which takes messages whose last assistant turn carries its token ids.

The server renders the messages with its own template and then puts the ids of the last assistant message (what its
prompt was and what was sampled) over the beginning of what it rendered. So the prompt is exact if both sides' templates
agree on everything *after* the last turn, and on the whole first prompt. That is verified, never trusted: the answer
carries the ids that the model saw, and they must be those that we hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from prorl_gym.inference.engines.dialect import (
    AnsweredCall,
    Dialect,
    HttpEngineOptions,
    call_headers,
    unsupported_error,
)
from prorl_gym.inference.engines.http_engine import HttpEngine
from prorl_gym.inference.engines.http_exchange import HttpRequest
from prorl_gym.inference.engines.logprob_rule import LogprobKind
from prorl_gym.inference.engines.openai import tool_fields
from prorl_gym.inference.engines.response_validator import FinishReason, get_nested, read_cached_tokens
from prorl_gym.inference.engines.vllm import FINISH_REASONS, REPETITION, max_response_bytes, sampling_fields
from prorl_gym.inference.protocol import Conversation, EngineHealth, GenerationRequest, GenerationResult

_FINISH: Mapping[str, FinishReason] = {**FINISH_REASONS, "tool_calls": "stop"}

_FIX = "Serve the policy with NeMo-RL's own vLLM server (expose_http_server: true), or set another 'engine'."

_ECHO_FIX = (
    "Give it the template of 'tokenizer'/'chat_template' and the same 'template_options', without history edits."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrefixOptions(HttpEngineOptions):
    """How to talk to NeMo-RL's server."""

    logprob_kind: LogprobKind = "processed"
    """NeMo-RL starts vLLM so that it returns the probabilities that were sampled from."""
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sent as ``chat_template_kwargs``, so that the server renders as we do."""
    record_routed_experts: bool = False
    """Keep which experts each token met, from a server that was started to return them."""


class ChatPrefixEngine(HttpEngine):
    """One NeMo-RL server, at a URL like ``http://127.0.0.1:4000/v1``: exact tokens over a chat route."""

    def __init__(self, name: str, base_url: str, options: ChatPrefixOptions, *, version: int = 0) -> None:
        super().__init__(name, ChatPrefixDialect(base_url, options), options, version=version)


class ChatPrefixDialect(Dialect):
    """NeMo-RL's routes: chat completions and tokenize. It has no abort, no health, no metrics, no reset.

    Args:
        base_url: ends in ``/v1``; ``/tokenize`` lies above it.
        options: see there.
    """

    def __init__(self, base_url: str, options: ChatPrefixOptions) -> None:
        self._options = options
        super().__init__(
            base_url, options, server_kind="NeMo-RL's vLLM server", fix=_FIX, logprob_kind=options.logprob_kind
        )

    def sample_request(self, request: GenerationRequest) -> HttpRequest:
        """Write a call of the chat route.

        Raises:
            EngineError: ``ENGINE_REFUSED``, when the call comes without its messages.
        """
        conversation = self.require_conversation(request)
        body: dict[str, Any] = {
            "model": self._model,
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
        max_bytes = max_response_bytes(request, routed_experts=self._options.record_routed_experts)
        return HttpRequest(
            "POST",
            f"{self._base}/chat/completions",
            body,
            call_headers(request),
            max_bytes=2 * max_bytes,
        )

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
        checks.check_model_name(answer.get("model"))
        choice = checks.only_choice(answer)
        message = checks.require_object(choice.get("message"), "its message")
        finish = checks.translate_finish_reason(choice.get("finish_reason"), _FINISH)
        echo = _first_present(message.get("prompt_token_ids"), answer.get("prompt_token_ids"))
        if not is_prompt_checked and not answered.is_trial:  # a trial's prompt is the server's own rendering
            checks.check_prompt_echo(echo, request, _ECHO_FIX)
        named, values = _tokens_and_logprobs(choice)
        sampled = _first_present(message.get("generation_token_ids"), named)
        if sampled is None:
            raise checks.contract_error("does not return token ids")
        expected = answered.expectation(stopped_by_guard=choice.get("finish_reason") == REPETITION)
        ids = checks.check_sampled_ids(_as_ids(sampled), "generation_token_ids", request, finish, expected)
        logprobs = _first_present(message.get("generation_log_probs"), values)
        if logprobs is None:
            raise checks.missing_logprobs_error()
        return GenerationResult(
            token_ids=ids,
            logprobs=checks.check_logprobs(checks.require_array(logprobs, "generation_log_probs"), len(ids)),
            finish_reason=finish,
            logprob_kind=self._options.logprob_kind,
            engine=answered.engine,
            versions=[answered.version] * len(ids),
            seconds=answered.seconds,
            cached_tokens=read_cached_tokens(answer, len(request.prompt_ids)),
            routed_experts=checks.check_routed_experts(message.get("routed_experts"))
            if self._options.record_routed_experts
            else None,
        )

    def health_request(self) -> HttpRequest:
        """Return a request to tokenize a word: the only route beside the chat."""
        return HttpRequest("POST", f"{self._root}/tokenize", {"model": self._model, "prompt": "a"})

    def read_health(self, payload: bytes) -> EngineHealth:
        """Read the context length out of the answer, if it is there."""
        length = self.validator.parse_object(payload).get("max_model_len")
        return EngineHealth(ok=True, max_model_len=length if type(length) is int and length > 0 else None)

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


def _tokens_and_logprobs(choice: Mapping[str, object]) -> tuple[list[object] | None, list[object] | None]:
    """Return names and log-probs of the tokens as vLLM's own chat route gives them."""
    content = get_nested(choice, "logprobs", "content")
    if not isinstance(content, list):
        return None, None
    entries = cast("list[object]", content)
    return [get_nested(entry, "token") for entry in entries], [get_nested(entry, "logprob") for entry in entries]


def _as_ids(tokens: object) -> object:
    """Read ids that are spelled ``token_id:7`` or ``7``; anything else is left for the checks to refuse."""
    if not isinstance(tokens, list):
        return tokens
    return [_as_id(token) for token in cast("list[object]", tokens)]


def _as_id(token: object) -> object:
    digits = token.removeprefix("token_id:") if isinstance(token, str) else ""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else token
