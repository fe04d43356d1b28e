"""The chat completions API: messages in, one message out."""

from collections.abc import Mapping, Sequence
from typing import Any

from prorl_gym.errors import ConfigError
from prorl_gym.gateway.answer import (
    AnswerFormat,
    AnswerHead,
    CompletedTurn,
    encode_event,
    error_body,
    token_fields,
)
from prorl_gym.gateway.history import (
    TEXT_FIX,
    TOKEN_FIELDS,
    Item,
    as_item,
    as_parts,
    normalize_list,
    read_message,
    read_role,
    read_text,
    read_token_fields,
    read_tool_call,
    wrap_thinking,
)
from prorl_gym.gateway.model_call import (
    GatewayOptions,
    ModelCall,
    OfferedTool,
    make_call,
    reject_unsupported,
    text_of_arguments,
)
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry
from prorl_gym.left_out import count_left_out, unknown_fields
from prorl_gym.records import ToolCall
from prorl_gym.thoughts import split_thinking

HISTORY_KEY = "messages"

_FIELDS = {
    "assistant": frozenset({"role", "content", "refusal", "tool_calls", "reasoning_content"}) | TOKEN_FIELDS,
    "tool": frozenset({"role", "content", "tool_call_id"}),
}
"""Fields of messages that are read; others are left out and counted, except ``REJECTED_FIELDS``."""

_PLAIN_FIELDS = frozenset({"role", "content"})
_REPEATED_FIELDS = frozenset({"reasoning", "annotations", "provider_specific_fields"})
"""Of messages that clients send back as they were answered: what they say is in the other fields, or is no text."""

REJECTED_FIELDS = {
    "function_call": "Send calls as 'tool_calls', and their results as messages of the role 'tool'.",
    "audio": TEXT_FIX,
    "images": TEXT_FIX,
}
"""Fields that add to the text: without them the conversation would be another one."""


def normalize_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body whose messages hold the fields that ``read_call`` reads, in the form that strict models accept.

    Agents send back what they were answered, and what their clients add to it: null fields among them. Raises
    ``ConfigError``: a message has a part or a field that must not be ignored.
    """
    return normalize_list(body, HISTORY_KEY, _normalize_message)


def read_call(params: Mapping[str, Any], options: GatewayOptions, template_options: Mapping[str, Any]) -> ModelCall:
    """Read a call. Raises ``ConfigError``: it needs something that is not supported."""
    reject_unsupported(params, options, template_options)
    limit = params.get("max_completion_tokens") or params.get("max_tokens")
    return make_call(params, options, read_messages(params["messages"]), limit)


def read_messages(messages: Sequence[Item]) -> list[HistoryEntry]:
    """Read a history. Raises ``ConfigError``: a message has parts that are not text, or an unknown role."""
    return [_read_message(message, f"messages[{position}]") for position, message in enumerate(messages)]


def write_answer(turn: CompletedTurn, params: Mapping[str, Any], form: AnswerFormat) -> dict[str, Any]:
    parsed = turn.parsed
    message: dict[str, Any] = {"role": "assistant", "content": form.text_of(parsed) or None}
    if form.with_reasoning and parsed.thinking:
        message["reasoning_content"] = parsed.thinking
    if parsed.calls:
        message["tool_calls"] = [_write_call(call, turn.call.offered.get(call.name)) for call in parsed.calls]
    if form.with_tokens:
        message |= token_fields(turn)
    cut = turn.sampled.finish_reason == "length"
    finish = "length" if cut else "tool_calls" if parsed.calls else "stop"
    logprobs = None
    if turn.call.logprobs:
        texts = [form.codec.decode([token]) for token in turn.sampled.token_ids]
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": list[Any]()}
            for text, logprob in zip(texts, turn.sampled.logprobs, strict=True)
        ]
        logprobs = {"content": content}
    return {
        **_answer_head(turn.head, form),
        "choices": [{"index": 0, "finish_reason": finish, "message": message, "logprobs": logprobs}],
        "usage": form.usage(turn, "prompt", "completion"),
    }


def _write_call(call: ToolCall, offered: OfferedTool | None) -> dict[str, Any]:
    if offered is not None and offered.takes_text:
        custom = {"name": offered.name, "input": text_of_arguments(call.arguments)}
        return {"id": call.id, "type": "custom", "custom": custom}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ChatEvents:
    """Implements ``EventWriter``: chunks, and ``[DONE]``. The call may ask for the usage in a chunk of its own."""

    def __init__(self, head: AnswerHead, form: AnswerFormat, body: Mapping[str, Any]) -> None:
        self._head = _answer_head(head, form) | {"object": "chat.completion.chunk"}
        options = as_item(body.get("stream_options")) or {}
        self._has_usage_chunk = options.get("include_usage") is True

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def keep_alive(self) -> bytes:
        return self._chunk({})

    def end(self, answer: Mapping[str, Any]) -> bytes:
        (choice,) = answer["choices"]
        message = choice["message"]
        calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls", ()))]
        parts = {key: message.get(key) for key in ("reasoning_content", "content")} | {"tool_calls": calls}
        events = b"".join(self._chunk({key: part}) for key, part in parts.items() if part)
        usage = {"usage": answer["usage"]}
        events += self._chunk({}, choice["finish_reason"], {} if self._has_usage_chunk else usage)
        if self._has_usage_chunk:
            events += encode_event({**self._head, "choices": list[Any](), **usage})
        return events + b"data: [DONE]\n\n"

    def fail(self, message: str) -> bytes:
        return encode_event(error_body(message))

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None, more: Mapping[str, Any] = {}) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return encode_event({**self._head, "choices": [choice], **more})


def _answer_head(head: AnswerHead, form: AnswerFormat) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.id}", "object": "chat.completion", "created": int(head.created), "model": form.model}


def _normalize_message(given: object, where: str) -> object:
    message = as_item(given)
    if message is None:
        return given
    for field, fix in REJECTED_FIELDS.items():
        if message.get(field):
            raise ConfigError(f"{where}: '{field}' is not supported.", fix)
    role = message.get("role")
    if isinstance(role, str):
        read_role(role, where)
    if message.get("tool_calls") and role != "assistant":
        raise ConfigError(f"{where}: only the assistant calls tools.", "Leave out 'tool_calls', or correct the role.")
    fields = _FIELDS.get(str(role), _PLAIN_FIELDS)
    plain = {key: value for key, value in message.items() if key in fields and value is not None}
    count_left_out("agent_program", "chat completions", unknown_fields(message, fields | _REPEATED_FIELDS, "message."))
    if isinstance(plain.get("content"), list):
        plain["content"] = read_text(plain["content"], where)
    if role == "assistant":
        if refusal := plain.pop("refusal", None):
            plain["content"] = f"{plain.get('content', '')}{refusal}"
        if isinstance(thoughts := message.get("reasoning"), str):
            plain.setdefault("reasoning_content", thoughts)
        if (calls := plain.get("tool_calls")) is not None:
            plain["tool_calls"] = [_normalize_call(call, where) for call in as_parts(calls)]
    return plain


def _normalize_call(given: object, where: str) -> Item:
    """Return a call of a function without fields that clients add. Raises ``ConfigError`` for any other one."""
    call = as_item(given)
    function = None if call is None else as_item(call.get("function"))
    if call is None or function is None:
        raise ConfigError(f"{where}: only calls of functions are supported.", TEXT_FIX)
    read = {key: function[key] for key in ("name", "arguments") if key in function}
    return {"id": call.get("id"), "type": "function", "function": read}


def _read_message(message: Item, where: str) -> HistoryEntry:
    read = read_message(message, where)
    if read.role == "tool":
        read = read.model_copy(update={"tool_call_id": str(message.get("tool_call_id", ""))})
    if read.role != "assistant":
        return HistoryEntry(read)
    thoughts = message.get("reasoning_content")
    if isinstance(thoughts, str) and thoughts.strip() != split_thinking(read.content)[0]:
        read = read.model_copy(update={"content": wrap_thinking(thoughts) + read.content})
    calls: Sequence[Item] = message.get("tool_calls") or ()
    read_calls = tuple(read_tool_call({"id": call.get("id"), **call["function"]}, "id", where) for call in calls)
    return HistoryEntry(read.model_copy(update={"tool_calls": read_calls}), read_token_fields(message, where))


open_events = ChatEvents
