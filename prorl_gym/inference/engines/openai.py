"""The adapter for any OpenAI-compatible chat server: text in, text out. For evaluation and for judges.

Its results cannot be trained on: the server does not return the ids that it samples. Such a result has ``text_turn``
set. Its ids are our tokenizer's encoding of the text, so that records and lengths make sense; its log-probs are zeros;
a session gives such tokens mask 0.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from prorl_gym.inference.engines.dialect import (
    ANSWER_FIELDS,
    CHOICE_FIELDS,
    MESSAGE_FIELDS,
    Dialect,
    HttpEngineOptions,
    call_headers,
)
from prorl_gym.inference.engines.http_engine import HttpEngine
from prorl_gym.inference.engines.http_exchange import HttpRequest
from prorl_gym.inference.engines.response_validator import (
    AnsweredCall,
    FinishReason,
    JsonObject,
    get_nested,
    read_cached_tokens,
    short_repr,
)
from prorl_gym.inference.protocol import Conversation, GenerationRequest, GenerationResult, TextTurn
from prorl_gym.records import ToolCall

_FINISH: Mapping[str, FinishReason] = {
    "stop": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "content_filter": "stop",  # the rest of the turn will not come
    "length": "length",
}

_MAX_CALLS = 128

_MAX_NAME_LENGTH = 256

_BYTES_PER_TOKEN = 64
"""A token is a few characters; escaped as JSON each may take six bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIOptions(HttpEngineOptions):
    encode: Callable[[str], Sequence[int]]
    """Text to ids of our own tokenizer, no control tokens in it."""


class OpenAIEngine(HttpEngine):
    """One OpenAI-compatible chat server, at a URL like ``https://host/v1``: text only."""

    def __init__(self, name: str, base_url: str, options: OpenAIOptions, *, version: int = 0) -> None:
        super().__init__(name, OpenAIDialect(base_url, options), options, version=version)


class OpenAIDialect(Dialect[OpenAIOptions]):
    """The routes that every such server has, with the fields of OpenAI's own API only: strict servers refuse others."""

    server_kind = "an OpenAI-compatible server"
    fix = "Check that it is an OpenAI-compatible server with a chat route."

    def sample_request(self, request: GenerationRequest) -> HttpRequest:
        conversation = self.require_conversation(request)
        body: dict[str, Any] = {
            "model": self._options.model,
            "messages": [message.to_chat() for message in conversation.messages],
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            **tool_fields(conversation),
        }
        if request.seed is not None:
            body["seed"] = request.seed
        bound = (1 << 20) + _BYTES_PER_TOKEN * request.max_tokens
        url = f"{self.address}/chat/completions"
        return HttpRequest("POST", url, body, call_headers(request), max_bytes=bound)

    def read_answer(self, answer: JsonObject, request: GenerationRequest, answered: AnsweredCall) -> GenerationResult:
        checks = self.validator
        choice = checks.only_choice(answer)
        self.count_unknown(answer, ANSWER_FIELDS)
        self.count_unknown(choice, CHOICE_FIELDS, "choice.")
        finish = checks.translate_finish_reason(choice.get("finish_reason"), _FINISH)
        said = self._parse_message(checks.require_object(choice.get("message"), "its message"))
        # As a model with hermes calls would write it: for the local encoding only. Their tokens are not ours: the text
        # may be more than max_tokens of our tokens.
        calls = (f'{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in said.tool_calls)
        parts = [*([said.text] if said.text else ()), *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
        ids = list(self._options.encode("\n".join(parts)))[: request.max_tokens]
        cached = read_cached_tokens(answer, len(request.prompt_ids))
        return self.make_result(answered, ids, [0.0] * len(ids), finish, cached_tokens=cached, text_turn=said)

    def _parse_message(self, message: JsonObject) -> TextTurn:
        self.count_unknown(message, MESSAGE_FIELDS, "message.")
        text, calls = message.get("content"), message.get("tool_calls")
        if text is not None and not isinstance(text, str):
            raise self.validator.contract_error("its message's content is not text")
        entries = self.validator.require_array(calls, "tool_calls") if calls is not None else ()
        if len(entries) > _MAX_CALLS:
            raise self.validator.contract_error(f"called {len(entries)} tools at once")
        return TextTurn(
            _replace_surrogates(text or ""), tuple(self._tool_call(entry, index) for index, entry in enumerate(entries))
        )

    def _tool_call(self, entry: object, index: int) -> ToolCall:
        name, arguments = get_nested(entry, "function", "name"), get_nested(entry, "function", "arguments")
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_LENGTH:
            raise self.validator.contract_error(f"called a tool by the name {short_repr(name)}")
        if isinstance(arguments, dict):  # some servers decode the JSON
            try:
                arguments = json.dumps(cast("dict[str, Any]", arguments), ensure_ascii=False, allow_nan=False)
            except (ValueError, RecursionError):  # not everything that can be read can be written
                raise self.validator.contract_error("called a tool with arguments that no JSON can hold") from None
        if not isinstance(arguments, str):
            raise self.validator.contract_error(f"called a tool with {short_repr(arguments)} as its arguments")
        call_id = get_nested(entry, "id")
        known = isinstance(call_id, str) and 0 < len(call_id) <= _MAX_NAME_LENGTH
        return ToolCall(
            id=_replace_surrogates(cast("str", call_id)) if known else f"call_{index}",
            name=_replace_surrogates(name),
            arguments=_replace_surrogates(arguments),
        )


def tool_fields(conversation: Conversation) -> dict[str, Any]:
    """Return ``tools``, or nothing: servers refuse an empty list."""
    return {"tools": [dict(tool) for tool in conversation.tools]} if conversation.tools else {}


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can spell and no record can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
