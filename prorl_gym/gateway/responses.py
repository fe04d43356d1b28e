"""The Responses API: items in, items out."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from prorl_gym.errors import ConfigError
from prorl_gym.gateway.answer import (
    AnswerFormat,
    AnswerHead,
    CompletedTurn,
    encode_event,
    token_fields,
)
from prorl_gym.gateway.history import (
    TEXT_FIX,
    Item,
    as_item,
    normalize_list,
    read_message,
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
    unsupported,
)
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry, TokenFields
from prorl_gym.records import Message, ToolCall

HISTORY_KEY = "input"

TEXT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": ("content",),
    "function_call": (),
    "function_call_output": ("output",),
    "reasoning": ("content", "summary"),
}
"""Types of items that a text model can read, and their fields of text."""

_TEXT_EVENTS = {
    "reasoning": ("summary", "reasoning_summary_part", "reasoning_summary_text"),
    "message": ("content", "content_part", "output_text"),
}
"""By the type of an item: the list of its one part, and the names of the events of that part and of its text."""


def normalize_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body whose history holds the fields that ``read_call`` reads, in the form that strict models accept.

    Agents send back what they were answered, and what their clients add to it: null fields among them. Raises
    ``ConfigError``: an item has a part that must not be ignored.
    """
    return normalize_list(body, HISTORY_KEY, _normalize_item)


def read_call(params: Mapping[str, Any], options: GatewayOptions, template_options: Mapping[str, Any]) -> ModelCall:
    reject_unsupported(params, options, template_options)
    if "message.output_text.logprobs" in params.get("include", ()):
        raise unsupported("include: message.output_text.logprobs", "The token fields carry the log-probs.")
    given = params["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if params.get("instructions"):
        items = [{"role": "system", "content": params["instructions"]}, *items]
    return make_call(params, options, read_items(items), params.get("max_output_tokens"))


def read_items(items: Sequence[Item]) -> list[HistoryEntry]:
    """Read a history. The assistant's items between two items of others are one turn.

    Raises ``ConfigError``: an item or a part of it is not text, not a call and not a call's output.
    """
    entries: list[HistoryEntry] = []
    thinking: list[str] = []
    for position, item in enumerate(items):
        where = f"input[{position}]"
        if item.get("type") == "reasoning":
            thinking.append(read_text(item.get("content"), where) or read_text(item.get("summary"), where))
            # A turn that was cut in its thoughts has no other item to carry the tokens.
            if tokens := read_token_fields(item, where):
                entries.append(_thinking_entry(thinking, tokens))
            continue
        entry = _read_item(item, where)
        if thinking and not entry.is_assistant:
            entries.append(_thinking_entry(thinking))
        elif thinking:
            entry = _merge_entries(_thinking_entry(thinking), entry)  # thoughts begin another turn
        elif entry.is_assistant and entries and entries[-1].is_assistant and entries[-1].tokens is None:
            entry = _merge_entries(entries.pop(), entry)
        entries.append(entry)
    return [*entries, _thinking_entry(thinking)] if thinking else entries


def write_answer(turn: CompletedTurn, params: Mapping[str, Any], form: AnswerFormat) -> dict[str, Any]:
    """Return a turn as a response to a call with these parameters, whose tools the answer repeats."""
    output = list[dict[str, Any]]()
    if form.with_reasoning and turn.parsed.thinking:
        summary = {"type": "summary_text", "text": turn.parsed.thinking}
        output.append({"type": "reasoning", "id": f"rs-{turn.head.id}", "summary": [summary]})
    text = form.text_of(turn.parsed)
    if text or not (turn.parsed.calls or output):
        item = {"type": "message", "id": f"msg-{turn.head.id}", "role": "assistant", "status": "completed"}
        output.append(item | {"content": [{"type": "output_text", "text": text, "annotations": list[Any]()}]})
    for call in turn.parsed.calls:
        output.append(_write_call(call, turn.call.offered.get(call.name)))
    if form.with_tokens:
        output[-1] |= token_fields(turn)
    cut = turn.sampled.finish_reason == "length"
    return {
        **_answer_head(turn.head, form),
        "status": "incomplete" if cut else "completed",
        "output": output,
        "parallel_tool_calls": not turn.call.single_tool_call,
        "tool_choice": "auto" if turn.call.may_call_tools else "none",
        "tools": params.get("tools") or [],
        "temperature": turn.call.sampling.temperature,
        "top_p": turn.call.sampling.top_p,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "metadata": {
            # What the API has no field for: why a new segment began, and the policy versions.
            **({"prorl_new_segment": turn.prompt.origin.value} if turn.prompt.origin.starts_segment else {}),
            **_version_runs(turn.sampled.versions),
        },
        "usage": form.usage(turn, "input", "output"),
    }


class ResponseEvents:
    """Implements ``EventWriter``: a response of items, each added, extended and done."""

    def __init__(self, head: AnswerHead, form: AnswerFormat, body: Mapping[str, Any]) -> None:
        self._response = _answer_head(head, form) | {"output": list[Any]()}
        self._sequence_number = -1

    def begin(self) -> bytes:
        return self._event("created", response=self._response | {"status": "in_progress"}) + self.keep_alive()

    def keep_alive(self) -> bytes:
        return self._event("in_progress", response=self._response | {"status": "in_progress"})

    def end(self, answer: Mapping[str, Any]) -> bytes:
        events = b"".join(self._write_item(index, item) for index, item in enumerate(answer["output"]))
        return events + self._event(answer["status"], response=answer)

    def fail(self, message: str) -> bytes:
        error = {"code": "server_error", "message": message}
        return self._event("failed", response=self._response | {"status": "failed", "error": error})

    def _write_item(self, index: int, item: Mapping[str, Any]) -> bytes:
        place = {"item_id": item["id"], "output_index": index}
        if (field := {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"])) is not None:
            events = self._event("output_item.added", output_index=index, item={**item, field: ""})
            events += self._event(f"{item['type']}_{field}.delta", **place, delta=item[field])
            events += self._event(f"{item['type']}_{field}.done", **place, **{field: item[field]})
        else:
            key, part_event, text_event = _TEXT_EVENTS[item["type"]]
            (part,) = item[key]
            begun = {**item, key: list[Any]()} | ({"status": "in_progress"} if "status" in item else {})
            place |= {"summary_index" if key == "summary" else "content_index": 0}
            events = self._event("output_item.added", output_index=index, item=begun)
            events += self._event(f"{part_event}.added", **place, part=part | {"text": ""})
            events += self._event(f"{text_event}.delta", **place, delta=part["text"])
            events += self._event(f"{text_event}.done", **place, text=part["text"])
            events += self._event(f"{part_event}.done", **place, part=part)
        return events + self._event("output_item.done", output_index=index, item=item)

    def _event(self, name: str, **fields: Any) -> bytes:
        self._sequence_number += 1
        kind = f"response.{name}"
        return encode_event({"type": kind, "sequence_number": self._sequence_number, **fields}, kind)


def _answer_head(head: AnswerHead, form: AnswerFormat) -> dict[str, Any]:
    return {"id": f"resp-{head.id}", "object": "response", "created_at": head.created, "model": form.model}


def _write_call(call: ToolCall, offered: OfferedTool | None) -> dict[str, Any]:
    item = {"type": "function_call", "id": f"fc-{call.id}", "call_id": call.id}
    item |= {"name": call.name, "arguments": call.arguments}
    if offered is None:
        return item
    item |= {"name": offered.name} | ({"namespace": offered.namespace} if offered.namespace else {})
    if offered.takes_text:
        del item["arguments"]
        item |= {"type": "custom_tool_call", "id": f"ctc-{call.id}", "input": text_of_arguments(call.arguments)}
    return item


def _normalize_item(given: object, where: str) -> object:
    item = as_item(given)
    if item is None:
        return given
    plain = {key: value for key, value in item.items() if value is not None and key != "routed_experts"}
    kind = plain.get("type", "message")
    if kind == "message" and isinstance(plain.get("content"), list):
        plain["content"] = read_text(plain["content"], where)
    elif kind == "function_call_output" and isinstance(plain.get("output"), list):
        plain["output"] = read_text(plain["output"], where)
    elif kind == "reasoning":
        plain = {"id": "", "summary": list[Any](), **plain}
    return plain


def _read_item(item: Item, where: str) -> HistoryEntry:
    kind = item.get("type") or "message"
    if kind == "message":
        return HistoryEntry(read_message(item, where), read_token_fields(item, where))
    if kind == "function_call":
        if item.get("namespace"):
            raise ConfigError(f"{where}: 'namespace' is not supported.", "Give functions names of their own.")
        call = read_tool_call(item, "call_id", where)
        return HistoryEntry(Message(role="assistant", content="", tool_calls=(call,)), read_token_fields(item, where))
    if kind == "function_call_output":
        output, call_id = read_text(item.get("output"), where), str(item.get("call_id", ""))
        return HistoryEntry(Message(role="tool", content=output, tool_call_id=call_id))
    raise ConfigError(f"{where}: items of type '{kind}' are not supported.", TEXT_FIX)


def _thinking_entry(thinking: list[str], tokens: TokenFields | None = None) -> HistoryEntry:
    """Return the collected thoughts as the beginning of a turn, and clear them."""
    content = wrap_thinking("".join(thinking))
    thinking.clear()
    return HistoryEntry(Message(role="assistant", content=content), tokens)


def _merge_entries(first: HistoryEntry, second: HistoryEntry) -> HistoryEntry:
    """Join two items of one model call; its tokens are on the last."""
    calls = (*first.message.tool_calls, *second.message.tool_calls)
    content = first.message.content + second.message.content
    return HistoryEntry(first.message.model_copy(update={"tool_calls": calls, "content": content}), second.tokens)


def _version_runs(versions: Sequence[int]) -> dict[str, str]:
    """Return the versions in runs: ``3`` or ``3*10 4*7`` (ten tokens of version 3, then seven of version 4)."""
    runs = [(version, len(list(same))) for version, same in groupby(versions)]
    if not runs:
        return {}
    text = str(runs[0][0]) if len(runs) == 1 else " ".join(f"{version}*{count}" for version, count in runs)
    return {"prorl_policy_version": text[:512]}


open_events = ResponseEvents
