"""The Responses API: items in, items out."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from prorl_gym.errors import ConfigError
from prorl_gym.gateway.answer import (
    KEEP_ALIVE_COMMENT,
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
from prorl_gym.gateway.model_call import GatewayOptions, ModelCall, make_call, reject_unsupported, unsupported
from prorl_gym.gateway.turn_stream import Piece, PieceKind
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry, TokenFields
from prorl_gym.records import Message

HISTORY_KEY = "input"

TEXT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": ("content",),
    "function_call": (),
    "function_call_output": ("output",),
    "reasoning": ("content", "summary"),
}
"""Types of items that a text model can read, and their fields of text."""

_TEXT_EVENTS: Mapping[PieceKind, str] = {"thinking": "reasoning_summary_text", "text": "output_text"}
_PART_EVENTS: Mapping[PieceKind, str] = {"thinking": "reasoning_summary_part", "text": "content_part"}


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
            entry = _merge_entries(_thinking_entry(thinking), entry)
        if item.get("type") == "function_call" and entries and entries[-1].is_assistant and entries[-1].tokens is None:
            entry = _merge_entries(entries.pop(), entry)
        entries.append(entry)
    return [*entries, _thinking_entry(thinking)] if thinking else entries


def write_answer(turn: CompletedTurn, params: Mapping[str, Any], form: AnswerFormat) -> dict[str, Any]:
    """Return a turn as a response to a call with these parameters, whose tools the answer repeats."""
    output = list[dict[str, Any]]()
    if form.with_reasoning and turn.parsed.thinking:
        output.append(_piece_item(turn.head, "thinking", turn.parsed.thinking)[0])
    text = form.text_of(turn.parsed)
    if text or not (turn.parsed.calls or output):
        output.append(_piece_item(turn.head, "text", text)[0])
    for call in turn.parsed.calls:
        item = {"type": "function_call", "id": f"fc-{call.id}", "call_id": call.id}
        output.append(item | {"name": call.name, "arguments": call.arguments})
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

    keep_alive = KEEP_ALIVE_COMMENT

    def __init__(self, head: AnswerHead, form: AnswerFormat, body: Mapping[str, Any]) -> None:
        self._head = head
        self._response = _answer_head(head, form) | {"output": list[Any]()}
        self._sequence_number = -1
        self._index = 0
        """Position in the output of the item that is written."""
        self._open: PieceKind | None = None
        self._text = ""
        """Text of the open item."""

    def begin(self) -> bytes:
        response = self._response | {"status": "in_progress"}
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def write_piece(self, piece: Piece) -> bytes:
        events = b""
        if self._open != piece.kind:
            events = self._finish_item() + self._begin_item(piece.kind)
        self._text += piece.text
        return events + self._event(f"{_TEXT_EVENTS[piece.kind]}.delta", **self._place(piece.kind), delta=piece.text)

    def end(self, answer: Mapping[str, Any]) -> bytes:
        events = self._finish_item()
        for item in answer["output"][self._index :]:
            if item["type"] != "function_call":
                events += self._begin_item("text") + self._finish_item()
                continue
            place = {"item_id": item["id"], "output_index": self._index}
            events += self._item_event("added", item | {"arguments": ""})
            events += self._event("function_call_arguments.delta", **place, delta=item["arguments"])
            events += self._event("function_call_arguments.done", **place, arguments=item["arguments"])
            events += self._item_event("done", item)
            self._index += 1
        return events + self._event(answer["status"], response=answer)

    def fail(self, message: str) -> bytes:
        error = {"code": "server_error", "message": message}
        return self._event("failed", response=self._response | {"status": "failed", "error": error})

    def _begin_item(self, kind: PieceKind) -> bytes:
        self._open, self._text = kind, ""
        item, part = _piece_item(self._head, kind, "")
        item |= {"summary": list[Any]()} if kind == "thinking" else {"content": list[Any](), "status": "in_progress"}
        return self._item_event("added", item) + self._event(
            f"{_PART_EVENTS[kind]}.added", **self._place(kind), part=part
        )

    def _finish_item(self) -> bytes:
        """Return the events that end the item which pieces extended, if there is one."""
        kind = self._open
        if kind is None:
            return b""
        place, (item, part) = self._place(kind), _piece_item(self._head, kind, self._text)
        events = self._event(f"{_TEXT_EVENTS[kind]}.done", **place, text=self._text)
        events += self._event(f"{_PART_EVENTS[kind]}.done", **place, part=part)
        events += self._item_event("done", item)
        self._open = None
        self._index += 1
        return events

    def _place(self, kind: PieceKind) -> dict[str, Any]:
        part = "summary_index" if kind == "thinking" else "content_index"
        return {"item_id": _item_id(self._head, kind), "output_index": self._index, part: 0}

    def _item_event(self, name: str, item: Mapping[str, Any]) -> bytes:
        return self._event(f"output_item.{name}", output_index=self._index, item=item)

    def _event(self, name: str, **fields: Any) -> bytes:
        self._sequence_number += 1
        kind = f"response.{name}"
        return encode_event({"type": kind, "sequence_number": self._sequence_number, **fields}, kind)


def _answer_head(head: AnswerHead, form: AnswerFormat) -> dict[str, Any]:
    return {"id": f"resp-{head.id}", "object": "response", "created_at": head.created, "model": form.model}


def _item_id(head: AnswerHead, kind: PieceKind) -> str:
    return f"{'rs' if kind == 'thinking' else 'msg'}-{head.id}"


def _piece_item(head: AnswerHead, kind: PieceKind, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the item of the thoughts or of the text of an answer, and its one part."""
    if kind == "thinking":
        part: dict[str, Any] = {"type": "summary_text", "text": text}
        return {"type": "reasoning", "id": _item_id(head, kind), "summary": [part]}, part
    part = {"type": "output_text", "text": text, "annotations": list[Any]()}
    item = {"type": "message", "id": _item_id(head, kind), "role": "assistant", "status": "completed"}
    return item | {"content": [part]}, part


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
