"""Reading tool calls out of what the model wrote, in the Hermes form that Qwen and ChatML templates use.

    <tool_call>
    {"name": "bash", "arguments": {"command": "ls"}}
    </tool_call>

The text is the model's and therefore hostile: nothing here raises, a call that cannot be read becomes a complaint
worded for the model, and the work is linear in the text. Whether a tool of that name exists is the loop's affair.
"""

import json
from dataclasses import dataclass
from typing import Any, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"

MAX_CALLS = 32
"""Calls and complaints that one turn can give; the rest becomes one complaint."""

_FORM = 'Write <tool_call>{"name": NAME, "arguments": {...}}</tool_call> with valid JSON.'


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call that is well-formed."""

    name: str
    arguments: str
    """JSON text of an object."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """What a turn said."""

    text: str
    """Everything outside of call blocks, thoughts included, without blanks around it."""
    calls: tuple[ParsedCall, ...]
    complaints: tuple[str, ...]
    """One per block that could not be read."""


def parse_hermes(text: str) -> ParsedText:
    """Split a turn into text, calls and complaints. Never raises.

    Blocks inside the model's thoughts (up to the first ``</think>``) are text: a plan is not an act.
    """
    spoken: list[str] = []
    calls: list[ParsedCall] = []
    complaints: list[str] = []
    position = _end_of_thoughts(text)
    spoken.append(text[:position])
    while (start := text.find(OPEN, position)) >= 0:
        spoken.append(text[position:start])
        if len(calls) + len(complaints) == MAX_CALLS:
            complaints.append(f"More than {MAX_CALLS} tool calls in one turn: the rest was ignored.")
            return _result(spoken, calls, complaints)
        found, position = _read_block(text, start + len(OPEN))
        if isinstance(found, ParsedCall):
            calls.append(found)
        else:
            complaints.append(found)
    rest = text[position:]
    if CLOSE in rest and not calls and not complaints:
        complaints.append(f"{CLOSE} without {OPEN}. {_FORM}")
    spoken.append(rest)
    return _result(spoken, calls, complaints)


def _read_block(text: str, start: int) -> tuple[ParsedCall | str, int]:
    """Read the block whose content begins at ``start``; return what it is and where the text goes on."""
    begin = _skip_blanks(text, start)
    try:
        # Decoding from the front, not cutting at the closing tag: a string in the JSON may contain that tag.
        value, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        return f"The tool call is not valid JSON ({error.msg} at character {error.pos - begin}). {_FORM}", _after(
            text, begin
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:100]
        return f"The tool call is not valid JSON ({reason}). {_FORM}", _after(text, begin)
    closing = _skip_blanks(text, end)
    if not text.startswith(CLOSE, closing):
        if closing == len(text):
            return f"The tool call was not closed with {CLOSE}. {_FORM}", closing
        return f"There is more than one JSON object between {OPEN} and {CLOSE}. {_FORM}", _after(text, closing)
    return _as_call(value), closing + len(CLOSE)


def _as_call(value: Any) -> ParsedCall | str:
    if not isinstance(value, dict):
        return f"The tool call is not a JSON object. {_FORM}"
    members: dict[str, Any] = value  # pyright: ignore[reportUnknownVariableType]  # keys of JSON are strings
    name = members.get("name")
    if not isinstance(name, str) or not name.strip():
        return f'The tool call has no "name" (a string). {_FORM}'
    if "arguments" not in members:
        return f'The tool call has no "arguments". {_FORM}'
    if not isinstance(members["arguments"], dict):
        return f'"arguments" of the tool call must be a JSON object, not {_kind(members["arguments"])}. {_FORM}'
    arguments = json.dumps(members["arguments"], ensure_ascii=False)
    try:
        (name + arguments).encode()
    except UnicodeEncodeError:
        return f"The tool call contains half of a surrogate pair, which is no character. {_FORM}"
    return ParsedCall(name=name.strip(), arguments=arguments)


def _after(text: str, position: int) -> int:
    """Where to go on after a block that cannot be read: behind its closing tag, or at the next opening one."""
    closing, opening = text.find(CLOSE, position), text.find(OPEN, position)
    if closing >= 0 and (opening < 0 or closing < opening):
        return closing + len(CLOSE)
    return opening if opening >= 0 else len(text)


def _end_of_thoughts(text: str) -> int:
    end = text.find("</think>")
    if end >= 0:
        return end + len("</think>")
    return len(text) if text.lstrip().startswith("<think>") else 0


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _kind(value: Any) -> str:
    names: dict[type[object], str] = {
        str: "a string",
        list: "a list",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return next((name for kind, name in names.items() if type(value) is kind), "null")


def _result(spoken: list[str], calls: list[ParsedCall], complaints: list[str]) -> ParsedText:
    return ParsedText("".join(spoken).strip(), tuple(calls), tuple(complaints))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
