"""Anthropic's messages API: messages of content blocks in, one message of content blocks out.

It is read leniently only: the programs that speak it send what their own service understands.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prorl_gym.errors import ConfigError
from prorl_gym.gateway.answer import AnswerFormat, AnswerHead, CompletedTurn, encode_event, error_body
from prorl_gym.gateway.history import Item, as_item, as_list, as_parts, read_role, read_tool_call, wrap_thinking
from prorl_gym.gateway.model_call import ModelCall, SamplingParams
from prorl_gym.harness.body_reader import ReadBody
from prorl_gym.harness.client_tools import read_tools
from prorl_gym.harness.wires import Wire, lenient_call, readable_text
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry
from prorl_gym.left_out import unknown_fields
from prorl_gym.records import Message, ToolCall

_PART_OF_TEXT = "\n"
"""Between the parts of a system or user message: programs send notes and tasks as parts of one message."""

_PARAMETERS = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "max_tokens", "stream", "metadata", "service_tier"}
    | {"temperature", "top_p", "top_k", "thinking", "context_management"}
)
"""Of a call, those that are read, that the rollout decides, or that change nothing."""

_NO_USAGE = {"input_tokens": 0, "output_tokens": 0}


def read_call(body: ReadBody, sampling: SamplingParams, omitted: Counter[str]) -> ModelCall:
    fields = body.fields
    omitted.update(unknown_fields(fields, _PARAMETERS, "parameter "))
    history = body.read_history(fields.get("messages"), partial(read_messages, omitted=omitted))
    choice = as_item(fields.get("tool_choice")) or {}
    params = {
        "tools": [_as_function(tool) for tool in read_tools(fields)],
        "tool_choice": choice.get("type"),
        "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True,
    }
    system = readable_text(fields.get("system"), omitted, _PART_OF_TEXT)
    opening = [HistoryEntry(Message(role="system", content=system))] if system else []
    return lenient_call([*opening, *history], params, sampling, omitted, fields.get("max_tokens"))


def read_messages(messages: Sequence[object], omitted: Counter[str]) -> list[HistoryEntry]:
    """Read a history; consecutive messages of the assistant are one turn. Raises ``ConfigError`` for no message."""
    entries: list[HistoryEntry] = []
    for place, each in enumerate(messages):
        where, message = f"messages[{place}]", as_item(each)
        if message is None:
            raise ConfigError(f"{where}: is no message.", "Send objects with 'role' and 'content'.")
        role = read_role(str(message.get("role", "user")), where)
        if role != "assistant":
            entries += [HistoryEntry(read) for read in _read_blocks(role, message.get("content"), omitted)]
            continue
        turn = _read_turn(message.get("content"), where, omitted)
        if entries and entries[-1].is_assistant:
            before = entries.pop().message
            calls = (*before.tool_calls, *turn.tool_calls)
            turn = before.model_copy(update={"content": before.content + turn.content, "tool_calls": calls})
        entries.append(HistoryEntry(turn))
    return entries


def write_answer(turn: CompletedTurn, params: Mapping[str, Any], form: AnswerFormat) -> dict[str, Any]:
    parsed = turn.parsed
    content: list[dict[str, Any]] = []
    if form.with_reasoning and parsed.thinking:
        content.append({"type": "thinking", "thinking": parsed.thinking, "signature": ""})
    text = form.text_of(parsed)
    if text or not (content or parsed.calls):
        content.append({"type": "text", "text": text})
    for call in parsed.calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    is_cut = turn.sampled.finish_reason == "length"
    prompt = len(turn.prompt.ids)
    cached = min(turn.sampled.cached_tokens, prompt)
    return {
        **_answer_head(turn.head, form),
        "content": content,
        "stop_reason": "max_tokens" if is_cut else "tool_use" if parsed.calls else "end_turn",
        "stop_sequence": None,
        "usage": {  # the sum is what was used: cached tokens are not among ``input_tokens`` here
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(turn.sampled.token_ids),
        },
    }


class MessageEvents:
    """Implements ``EventWriter``: a message of content blocks, each begun, extended and stopped."""

    def __init__(self, head: AnswerHead, form: AnswerFormat, body: Mapping[str, Any]) -> None:
        self._message = _answer_head(head, form)

    def begin(self) -> bytes:
        # The usage comes at the end: the length of the prompt is not known yet.
        empty = {"content": list[Any](), "stop_reason": None, "stop_sequence": None, "usage": _NO_USAGE}
        return _event("message_start", message=self._message | empty)

    def keep_alive(self) -> bytes:
        return _event("ping")

    def end(self, answer: Mapping[str, Any]) -> bytes:
        events = b""
        for index, block in enumerate(answer["content"]):
            kind = block["type"]
            begun = dict(block)
            if kind == "tool_use":
                begun["input"] = dict[str, Any]()
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            else:
                begun[kind] = ""
                delta = {"type": f"{kind}_delta", kind: block[kind]}
            events += _event("content_block_start", index=index, content_block=begun)
            events += _event("content_block_delta", index=index, delta=delta)
            events += _event("content_block_stop", index=index)
        delta = {key: answer[key] for key in ("stop_reason", "stop_sequence")}
        return events + _event("message_delta", delta=delta, usage=answer["usage"]) + _event("message_stop")

    def fail(self, message: str) -> bytes:
        return encode_event(error_body(message), "error")


def _event(kind: str, **fields: Any) -> bytes:
    return encode_event({"type": kind, **fields}, kind)


def _answer_head(head: AnswerHead, form: AnswerFormat) -> dict[str, Any]:
    return {"id": f"msg_{head.id}", "type": "message", "role": "assistant", "model": form.model}


def _read_blocks(role: Any, content: object, omitted: Counter[str]) -> list[Message]:
    """Read a message that is not the assistant's: results of tools, notes of the system and text, in their order."""
    read: list[Message] = []
    texts: list[object] = []

    def flush_text() -> None:
        if texts:
            read.append(Message(role=role, content=readable_text(texts, omitted, _PART_OF_TEXT)))
            texts.clear()

    for block in as_list(content) or ():
        item = as_item(block) or {}
        kind = item.get("type")
        if kind not in ("tool_result", "mid_conv_system"):
            texts.append(block)
            continue
        flush_text()
        text = readable_text(item.get("content"), omitted, _PART_OF_TEXT)
        if kind == "tool_result":
            read.append(Message(role="tool", content=text, tool_call_id=str(item.get("tool_use_id") or "")))
        else:
            read.append(Message(role="system", content=text))
    flush_text()
    return read or [Message(role=role, content=readable_text(content, omitted))]


def _read_turn(content: object, where: str, omitted: Counter[str]) -> Message:
    texts: list[object] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in as_parts(content):
        part = as_item(block) or {}
        match part.get("type"):
            case "thinking":
                thoughts.append(readable_text(part.get("thinking"), omitted))
            case "redacted_thinking":
                omitted["part redacted_thinking"] += 1
            case "tool_use":
                calls.append(read_tool_call({**part, "arguments": part.get("input")}, "id", where))
            case _:
                texts.append(block)
    text, thinking = readable_text(texts, omitted), "".join(thoughts)
    content = wrap_thinking(thinking) + text if thinking.strip() else text
    return Message(role="assistant", content=content, tool_calls=tuple(calls))


def _as_function(tool: Item) -> dict[str, Any]:
    """Return a tool with its schema under the name that the other wires have for it."""
    kind = tool.get("type") or "custom"
    named = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function" if kind == "custom" else kind, **named}


def _input(arguments: str) -> dict[str, Any]:
    """Return arguments as the object that this wire has: engines that answer in text may give any text."""
    try:
        value: object = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return dict(as_item(value) or {"arguments": arguments}) if value != {} else {}


MESSAGES = Wire("messages", read_call, write_answer, MessageEvents)
