"""The formats in which a tool call is a JSON object: Hermes, Nemotron and Llama. Each parser implements ``ToolParser``.

JSON has types, so none of them reads the tools' schemas.
"""

import re
from collections.abc import Iterable
from typing import Any, cast

from prorl_gym.inference.toolcalls.call_collector import (
    CallCollector,
    length_before_tag,
    next_block,
    parse_blocks,
    parse_call,
    read_json,
    skip_blanks,
)
from prorl_gym.inference.toolcalls.protocol import ParsedCall, ParsedText, Tools

_HERMES_OPEN, _HERMES_CLOSE = "<tool_call>", "</tool_call>"

_HERMES_HINT = 'Write <tool_call>{"name": NAME, "arguments": {...}}</tool_call> with valid JSON.'

_NEMOTRON_OPEN, _NEMOTRON_CLOSE = "<TOOLCALL>", "</TOOLCALL>"

_NEMOTRON_HINT = 'Write <TOOLCALL>[{"name": NAME, "arguments": {...}}]</TOOLCALL> with valid JSON.'

_LLAMA_TAG = "<|python_tag|>"

_LLAMA_HINT = 'Write nothing but {"name": NAME, "parameters": {...}} with valid JSON, one call per turn.'

_LLAMA_CALL_ATTEMPT = re.compile(r'\{\s*"(?:name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)|parameters"\s*:)')


class HermesParser:
    """Hermes, Qwen2.5 and Qwen3: one object between tags for each call.

    ``<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>``
    """

    name = "hermes"

    def parse(self, text: str, tools: Tools) -> ParsedText:
        """See ``ToolParser.parse``."""
        stray = f"{_HERMES_CLOSE} without {_HERMES_OPEN}. {_HERMES_HINT}"
        return parse_blocks(text, _HERMES_OPEN, _read_hermes_block, (_HERMES_CLOSE,), stray)

    def plain_length(self, text: str, start: int) -> int:
        """See ``ToolParser.plain_length``."""
        return length_before_tag(text, start, _HERMES_OPEN)


def _read_hermes_block(text: str, start: int) -> tuple[ParsedCall | str, int]:
    """Read the block whose content begins at ``start``; return the call or complaint, and where the text continues."""
    try:
        value, end = read_json(text, start)
    except ValueError as error:
        return f"The tool call is not valid JSON ({error}). {_HERMES_HINT}", next_block(
            text, start, _HERMES_OPEN, _HERMES_CLOSE
        )
    closing = skip_blanks(text, end)
    if text.startswith(_HERMES_CLOSE, closing):
        return parse_call(value, _HERMES_HINT), closing + len(_HERMES_CLOSE)
    if closing == len(text):
        return f"The tool call was not closed with {_HERMES_CLOSE}. {_HERMES_HINT}", closing
    return (
        f"There is more than one JSON object between {_HERMES_OPEN} and {_HERMES_CLOSE}. {_HERMES_HINT}",
        next_block(text, closing, _HERMES_OPEN, _HERMES_CLOSE),
    )


class NemotronParser:
    """Nemotron Nano 2 and Llama-Nemotron: one list of calls between tags.

    ``<TOOLCALL>[{"name": "bash", "arguments": {"command": "ls"}}]</TOOLCALL>``
    """

    name = "nemotron"

    def parse(self, text: str, tools: Tools) -> ParsedText:
        """See ``ToolParser.parse``."""
        stray = f"{_NEMOTRON_CLOSE} without {_NEMOTRON_OPEN}. {_NEMOTRON_HINT}"
        return parse_blocks(text, _NEMOTRON_OPEN, _read_nemotron_block, (_NEMOTRON_CLOSE,), stray)

    def plain_length(self, text: str, start: int) -> int:
        """See ``ToolParser.plain_length``."""
        return length_before_tag(text, start, _NEMOTRON_OPEN)


def _read_nemotron_block(text: str, start: int) -> tuple[str | Iterable[ParsedCall | str], int]:
    """Read a block; return its entries, or one complaint, and where the text continues."""
    try:
        value, end = read_json(text, start)
    except ValueError as error:
        return f"The tool calls are not valid JSON ({error}). {_NEMOTRON_HINT}", next_block(
            text, start, _NEMOTRON_OPEN, _NEMOTRON_CLOSE
        )
    closing = skip_blanks(text, end)
    if not text.startswith(_NEMOTRON_CLOSE, closing):
        return f"The tool calls were not closed with {_NEMOTRON_CLOSE}. {_NEMOTRON_HINT}", next_block(
            text, closing, _NEMOTRON_OPEN, _NEMOTRON_CLOSE
        )
    position = closing + len(_NEMOTRON_CLOSE)
    if not isinstance(value, list) or not value:
        return f"The tool calls are not a JSON list of objects. {_NEMOTRON_HINT}", position
    return (parse_call(entry, _NEMOTRON_HINT) for entry in cast("list[Any]", value)), position


class LlamaParser:
    """Llama 3: a turn that is nothing but one object, perhaps after ``<|python_tag|>``.

    ``{"name": "bash", "parameters": {"command": "ls"}}``

    One call per turn: the family's templates refuse more. Any other text that is JSON is an answer.
    """

    name = "llama"

    def parse(self, text: str, tools: Tools) -> ParsedText:
        """See ``ToolParser.parse``."""
        found = CallCollector()
        before, tag, content = text.partition(_LLAMA_TAG)
        if not tag and not text.lstrip().startswith("{"):
            if _LLAMA_CALL_ATTEMPT.search(text):
                found.collect(f"There is text around the tool call. {_LLAMA_HINT}")
            return _result_with_text(found, text)
        if not tag:
            before, content = "", text
        found.text_parts.append(before)
        try:
            value, end = read_json(content, 0)
        except ValueError as error:
            if tag or _LLAMA_CALL_ATTEMPT.search(content):
                found.collect(f"The tool call is not valid JSON ({error}). {_LLAMA_HINT}")
            return found.parsed_text() if tag else _result_with_text(found, content)
        if not tag and not _is_call(value):
            return _result_with_text(found, content)
        if skip_blanks(content, end) < len(content):
            found.collect(f"There is something after the tool call. {_LLAMA_HINT}")
        else:
            found.collect(parse_call(value, _LLAMA_HINT, _arguments_key(value)))
        return found.parsed_text()

    def plain_length(self, text: str, start: int) -> int:
        """See ``ToolParser.plain_length``."""
        return start if text.lstrip().startswith("{") else length_before_tag(text, start, _LLAMA_TAG)


def _result_with_text(found: CallCollector, text: str) -> ParsedText:
    found.text_parts.append(text)
    return found.parsed_text()


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and ("parameters" in value or ("name" in value and "arguments" in value))


def _arguments_key(value: Any) -> str:
    """Return the key of the arguments: models of this family sometimes write that of the other formats."""
    members = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    return "arguments" if "arguments" in members and "parameters" not in members else "parameters"
