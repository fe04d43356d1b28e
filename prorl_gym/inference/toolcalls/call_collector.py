"""What all parsers share: collecting the calls of a turn, and reading a call from a JSON object."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from prorl_gym.inference.json_depth import MAX_JSON_DEPTH, is_too_deep
from prorl_gym.inference.toolcalls.protocol import MAX_CALLS, ParsedCall, ParsedText

_BLANKS = re.compile(r"[ \t\r\n]*")


@dataclass(slots=True)
class CallCollector:
    """What was found in a turn so far."""

    text_parts: list[str] = field(default_factory=list[str])
    calls: list[ParsedCall] = field(default_factory=list[ParsedCall])
    parse_errors: list[str] = field(default_factory=list[str])

    def collect(self, item: ParsedCall | str) -> bool:
        """Add a call or a complaint; whether there was room for it. The first one too many adds a complaint."""
        if len(self.calls) + len(self.parse_errors) >= MAX_CALLS:
            self.parse_errors.append(f"More than {MAX_CALLS} tool calls in one turn: the rest was ignored.")
            return False
        if isinstance(item, ParsedCall):
            self.calls.append(item)
        else:
            self.parse_errors.append(item)
        return True

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a call nor a complaint."""
        return not self.calls and not self.parse_errors

    def parsed_text(self) -> ParsedText:
        """Return it as a record."""
        return ParsedText("".join(self.text_parts).strip(), tuple(self.calls), tuple(self.parse_errors))


def parse_blocks(
    text: str,
    opening: str,
    read_block: Callable[[str, int], tuple[ParsedCall | str | Iterable[ParsedCall | str], int]],
    stray_tags: Sequence[str],
    stray_complaint: str,
) -> ParsedText:
    """Parse a text in which each block of calls begins with a tag.

    Args:
        text: the turn after its thoughts.
        opening: the tag.
        read_block: reads the block whose content begins at a position; returns its calls or complaints, and where the
            text continues.
        stray_tags: tags that show an attempt at a call where there is no block.
        stray_complaint: the complaint about such an attempt.
    """
    found, position = CallCollector(), 0
    while (start := text.find(opening, position)) >= 0:
        found.text_parts.append(text[position:start])
        block, position = read_block(text, start + len(opening))
        items = [block] if isinstance(block, ParsedCall | str) else block
        if not all(found.collect(item) for item in items):
            return found.parsed_text()
    rest = text[position:]
    if found.is_empty and any(tag in rest for tag in stray_tags):
        found.collect(stray_complaint)
    found.text_parts.append(rest)
    return found.parsed_text()


def length_before_tag(text: str, start: int, tag: str) -> int:
    """Return where a tag begins, or may begin once more is written; see ``ToolParser.plain_length``."""
    found = text.find(tag, start)
    if found >= 0:
        return found
    return len(text) - next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)


def read_json(text: str, position: int) -> tuple[Any, int]:
    """Decode the JSON value at ``position``; return it and where it ends.

    Decoding from the front, not cutting at a closing tag: a string in the JSON may contain that tag.

    Raises:
        ValueError: no valid JSON; worded for the model.
    """
    begin = skip_blanks(text, position)
    try:
        return _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - begin}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(str(error)[:100]) from None


def parse_call(value: Any, format_hint: str, arguments_key: str = "arguments") -> ParsedCall | str:
    """Return a call from a JSON object with a name and arguments, or a complaint.

    Args:
        value: any JSON value.
        format_hint: how a call is to be written; ends each complaint.
        arguments_key: what the form calls the arguments.
    """
    if not isinstance(value, dict):
        return f"The tool call is not a JSON object. {format_hint}"
    members = cast("dict[str, Any]", value)  # keys of JSON are strings
    if arguments_key not in members:
        return (
            f'The tool call has no "{arguments_key}". {format_hint}'
            if _is_name(members.get("name"))
            else _missing_name(format_hint)
        )
    arguments = members[arguments_key]
    if not isinstance(arguments, dict):
        return f'"{arguments_key}" of the tool call must be a JSON object, not {_json_type(arguments)}. {format_hint}'
    return make_call(members.get("name"), cast("dict[str, Any]", arguments), format_hint)


def make_call(name: Any, arguments: Mapping[str, Any], format_hint: str) -> ParsedCall | str:
    """Return a call from its name and arguments, or a complaint."""
    if not _is_name(name):
        return _missing_name(format_hint)
    if is_too_deep(arguments):
        return (
            f"The arguments of the tool call are nested too deeply (more than {MAX_JSON_DEPTH} levels). {format_hint}"
        )
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except UnicodeEncodeError:
        return f"The tool call contains half of a surrogate pair, which is no character. {format_hint}"
    except (ValueError, TypeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:100]
        return f"The arguments of the tool call are not valid JSON ({reason}). {format_hint}"
    return ParsedCall(name=name.strip(), arguments=text)


def skip_blanks(text: str, position: int) -> int:
    """Return the first position from here on that is no blank."""
    found = _BLANKS.match(text, position)
    return found.end() if found else position


def next_block(text: str, position: int, opening: str, closing: str) -> int:
    """Return where the text continues after an unreadable block: behind its closing tag, or at the next opening one."""
    closed, opened = text.find(closing, position), text.find(opening, position)
    if closed >= 0 and (opened < 0 or closed < opened):
        return closed + len(closing)
    return opened if opened >= 0 else len(text)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name.strip())


def _missing_name(format_hint: str) -> str:
    return f'The tool call has no "name" (a string). {format_hint}'


def _json_type(value: Any) -> str:
    names: dict[type[object], str] = {
        str: "a string",
        list: "a list",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return next((name for kind, name in names.items() if type(value) is kind), "null")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
