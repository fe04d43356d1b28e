"""The format of Qwen3-Coder, Qwen3.5 and Nemotron 3: tags, with values as plain text.

    <tool_call>
    <function=bash>
    <parameter=command>
    ls -l
    </parameter>
    </function>
    </tool_call>

Values carry no type, so they are read by the tool's schema: a string verbatim, anything else as JSON where it is JSON.
They cannot be escaped either: a value ends at the first closing tag after which the call continues properly.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from prorl_gym.inference.toolcalls.call_collector import (
    length_before_tag,
    make_call,
    next_block,
    parse_blocks,
    read_json,
    skip_blanks,
)
from prorl_gym.inference.toolcalls.protocol import ParsedCall, ParsedText, Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_FORMAT_HINT = (
    "Write <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, each tag on a line."
)
_FUNCTION, _END = "<function=", "</function>"
_PARAMETER = "<parameter="
_VALUE_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>|</tool_call>)")
_BLOCK_END = re.compile(r"</function>\s*</tool_call>")
_TAG_NAME = re.compile(r"[^<>\n]{1,256}>")
# As Python and Jinja spell them: some templates print the arguments of earlier calls that way.
_LITERALS: Mapping[str, Any] = {"True": True, "False": False, "None": None}


class Qwen3CoderParser:
    """Implements ``ToolParser``."""

    name = "qwen3_coder"

    def parse(self, text: str, tools: Tools) -> ParsedText:
        """See ``ToolParser.parse``."""
        stray = f"A tool call begins with {OPEN}. {_FORMAT_HINT}"
        return parse_blocks(text, OPEN, partial(_read_block, tools), (CLOSE, _FUNCTION, _END), stray)

    def plain_length(self, text: str, start: int) -> int:
        """See ``ToolParser.plain_length``."""
        return length_before_tag(text, start, OPEN)


def _read_block(tools: Tools, text: str, start: int) -> tuple[ParsedCall | str, int]:
    begin = skip_blanks(text, start)
    name_end = _TAG_NAME.match(text, begin + len(_FUNCTION)) if text.startswith(_FUNCTION, begin) else None
    if name_end is None:
        return f"The tool call does not begin with <function=NAME>. {_FORMAT_HINT}", next_block(
            text, begin, OPEN, CLOSE
        )
    name = name_end.group()[:-1].strip()
    types = _parameter_types(name, tools)
    block_end = _BLOCK_END.search(text, name_end.end())
    limit = block_end.end() if block_end else len(text)  # a value that is not closed must not swallow the next call
    arguments: dict[str, Any] = {}
    position = skip_blanks(text, name_end.end())
    while text.startswith(_PARAMETER, position):
        key_end = _TAG_NAME.match(text, position + len(_PARAMETER))
        value_end = _VALUE_END.search(text, key_end.end(), limit) if key_end else None
        if key_end is None or value_end is None:
            return f"A parameter of the tool call is not closed with </parameter>. {_FORMAT_HINT}", next_block(
                text, position, OPEN, CLOSE
            )
        key = key_end.group()[:-1].strip()
        if key in arguments:
            return f"The tool call gives the parameter '{key[:40]}' twice. {_FORMAT_HINT}", next_block(
                text, position, OPEN, CLOSE
            )
        arguments[key] = _parse_value(text[key_end.end() : value_end.start()], types.get(key))
        position = value_end.end()
    if not text.startswith(_END, position):
        return f"The tool call was not closed with {_END}. {_FORMAT_HINT}", next_block(text, position, OPEN, CLOSE)
    closing = skip_blanks(text, position + len(_END))
    if not text.startswith(CLOSE, closing):
        return f"The tool call was not closed with {CLOSE}. {_FORMAT_HINT}", next_block(text, closing, OPEN, CLOSE)
    return make_call(name, arguments, _FORMAT_HINT), closing + len(CLOSE)


def _parameter_types(name: str, tools: Tools) -> Mapping[str, frozenset[str]]:
    """Return the types that each parameter of a tool may have; empty for one whose schema names none."""
    for tool in tools:
        function = _as_mapping(tool.get("function", tool))
        if function.get("name") == name:
            properties = _as_mapping(_as_mapping(function.get("parameters")).get("properties"))
            return {key: frozenset(_schema_types(_as_mapping(schema))) for key, schema in properties.items()}
    return {}


def _schema_types(schema: Mapping[str, Any]) -> list[str]:
    declared = schema.get("type")
    names: list[Any] = cast("list[Any]", declared) if isinstance(declared, list) else [declared]
    found = [name for name in names if isinstance(name, str)]
    for union in ("anyOf", "oneOf"):
        for member in schema.get(union) or ():
            found += _schema_types(_as_mapping(member))
    return found


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _parse_value(written: str, types: frozenset[str] | None) -> Any:
    """Read a value. The newline after its opening tag and the one before its closing tag belong to the tags."""
    text = written.removeprefix("\n").removesuffix("\n")
    if types is None or "string" in types:  # the agent loop reports a parameter that the tool does not have
        return text
    word = text.strip()
    if word in _LITERALS:
        return _LITERALS[word]
    try:
        value, end = read_json(word, 0)
    except ValueError:
        return text
    return value if end == len(word) else text
