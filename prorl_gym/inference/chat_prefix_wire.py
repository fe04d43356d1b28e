"""NeMo-RL's chat route as data.

The server renders the messages with its own template and then puts the ids of the last assistant message (what its
prompt was and what was sampled) over the beginning of what it rendered. So the prompt is exact if both sides' templates
agree on everything *after* the last turn, and on the whole first prompt. That is verified, never trusted: the answer
carries the ids that the model saw, and they must be those that we hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from prorl_gym.inference.behaviour import LogprobKind
from prorl_gym.inference.chat_wire import chat_messages, tool_fields
from prorl_gym.inference.checks import Checks, FinishReason, cached_tokens, inside
from prorl_gym.inference.dialect import Call, Dialect, HttpOptions, call_headers
from prorl_gym.inference.http import Ask
from prorl_gym.inference.prompt_text import cut_echo
from prorl_gym.inference.protocol import Conversation, EngineHealth, GenerationRequest, GenerationResult
from prorl_gym.inference.refusals import unable
from prorl_gym.inference.vllm_wire import FINISH, REPETITION, size_bound

_FINISH: Mapping[str, FinishReason] = {**FINISH, "tool_calls": "stop"}

_FIX = "Serve the policy with NeMo-RL's own vLLM server (expose_http_server: true), or set another 'engine'."
_ECHO_FIX = (
    "Give it the template of 'tokenizer'/'chat_template' and the same 'template_options', without history edits."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrefixOptions(HttpOptions):
    """How to talk to NeMo-RL's server."""

    logprob_kind: LogprobKind = "processed"
    """NeMo-RL starts vLLM so that it gives the probabilities that were sampled from."""
    template_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sent as ``chat_template_kwargs``: the server renders with the same ones as we."""


class ChatPrefixDialect(Dialect):
    """NeMo-RL's routes: chat completions and tokenize. It has no abort, no health, no metrics, no reset.

    Args:
        base_url: ends in ``/v1``; ``/tokenize`` lies above it.
        options: see there.
    """

    def __init__(self, base_url: str, options: ChatPrefixOptions) -> None:
        self._base = base_url.rstrip("/")
        self._root = self._base.removesuffix("/v1")
        self._options = options
        checks = Checks(
            self._base,
            options.vocab_size,
            "NeMo-RL's vLLM server",
            _FIX,
            model=options.model,
            control_ids=options.control_ids,
        )
        super().__init__(checks, options.logprob_kind)

    def sample(self, request: GenerationRequest) -> Ask:
        """Write a call of the chat route.

        Raises:
            EngineError: ``ENGINE_REFUSED``, when the call comes without its messages.
        """
        conversation = request.conversation
        if conversation is None:
            raise unable(self.address, "takes messages, and this call has only token ids", "Set another 'engine'.")
        body: dict[str, Any] = {
            "model": self._options.model,
            "messages": self._messages(conversation, request.prompt_ids),
            "max_tokens": request.max_tokens,
            # Always both, and top_k only when it is on: the server asserts that they are those of the training.
            "temperature": request.temperature,
            "top_p": request.top_p,
            "logprobs": True,
            "top_logprobs": 0,  # without it the server rejects ``logprobs``
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "stop_token_ids": list(request.stop_token_ids),
            **tool_fields(conversation),
        }
        if self._options.template_options:
            body["chat_template_kwargs"] = dict(self._options.template_options)
        if request.top_k > 0:
            body["top_k"] = request.top_k
        if request.seed is not None:
            body["seed"] = request.seed
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        # The message and the log-probs carry ids and texts of each token once more.
        return Ask("POST", f"{self._base}/chat/completions", body, call_headers(request), bound=2 * size_bound(request))

    def sampled(self, payload: bytes, request: GenerationRequest, call: Call) -> GenerationResult:
        """Check a 200 answer and return what was sampled."""
        checks = self.checks
        payload, echoed = cut_echo(payload, request)
        answer = checks.json_object(payload)
        checks.served_model(answer.get("model"))
        choice = checks.only_choice(answer)
        message = checks.mapping(choice.get("message"), "its message")
        finish = checks.finish(choice.get("finish_reason"), _FINISH)
        echo = _told(message.get("prompt_token_ids"), answer.get("prompt_token_ids"))
        if not echoed and not call.trial:  # a trial's prompt is the server's own rendering
            checks.echo(echo, request, _ECHO_FIX)
        named, values = _content(choice)
        told = _told(message.get("generation_token_ids"), named)
        if told is None:
            raise checks.contract("does not return token ids")
        expected = call.expected(other_end=choice.get("finish_reason") == REPETITION)
        ids = checks.sampled_ids(_as_ids(told), "generation_token_ids", request, finish, expected)
        logprobs = _told(message.get("generation_log_probs"), values)
        if logprobs is None:
            raise checks.no_logprobs()
        return GenerationResult(
            token_ids=ids,
            logprobs=checks.logprobs(checks.array(logprobs, "generation_log_probs"), len(ids)),
            finish_reason=finish,
            logprob_kind=self._options.logprob_kind,
            engine=call.engine,
            versions=[call.version] * len(ids),
            seconds=call.seconds,
            cached_tokens=cached_tokens(
                inside(answer, "usage", "prompt_tokens_details", "cached_tokens"), len(request.prompt_ids)
            ),
        )

    def health(self) -> Ask:
        """Ask to tokenize a word: the only route beside the chat."""
        return Ask("POST", f"{self._root}/tokenize", {"model": self._options.model, "prompt": "a"})

    def healthy(self, payload: bytes) -> EngineHealth:
        """Read the context length out of the answer, if it is there."""
        told = self.checks.json_object(payload).get("max_model_len")
        return EngineHealth(ok=True, max_model_len=told if type(told) is int and told > 0 else None)

    def _messages(self, conversation: Conversation, prompt_ids: Sequence[int]) -> list[dict[str, Any]]:
        messages = chat_messages(conversation)
        if conversation.last_generation is None:
            return messages
        start, end = conversation.last_generation
        last = next((message for message in reversed(messages) if message["role"] == "assistant"), None)
        if last is None or not 0 <= start <= end <= len(prompt_ids):
            raise unable(
                self.address,
                f"is to be told of a turn at {start}..{end} that the conversation does not have",
                "Hand over all messages with the ids that belong to them.",
            )
        last["prompt_token_ids"] = list(prompt_ids[:start])
        last["generation_token_ids"] = list(prompt_ids[start:end])
        last["generation_log_probs"] = [0.0] * (end - start)  # the field is required; the server reads the ids alone
        return messages


def _told(first: object, second: object) -> object:
    """Return what NeMo-RL's message says, or else what vLLM's own answer around it does."""
    return second if first is None else first


def _content(choice: Mapping[str, object]) -> tuple[list[object] | None, list[object] | None]:
    """Return names and log-probs of the tokens as vLLM's own chat route gives them."""
    content = inside(choice, "logprobs", "content")
    if not isinstance(content, list):
        return None, None
    entries = cast("list[object]", content)
    return [inside(entry, "token") for entry in entries], [inside(entry, "logprob") for entry in entries]


def _as_ids(told: object) -> object:
    """Read ids that are spelt ``token_id:7`` or ``7``; whatever else there is stays for the checks to refuse."""
    if not isinstance(told, list):
        return told
    return [_as_id(token) for token in cast("list[object]", told)]


def _as_id(token: object) -> object:
    digits = token.removeprefix("token_id:") if isinstance(token, str) else ""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else token
