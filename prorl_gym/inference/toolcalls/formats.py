"""The formats of tool calls: to add one, write a ``ToolParser``, and add its name and the parser at the end."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from prorl_gym.inference.strict_json import MAX_JSON_DEPTH, STRICT_JSON, as_mapping, is_too_deep
from prorl_gym.inference.toolcalls.turn_parsing import (
    MAX_CALLS,
    ParsedCall,
    ParsedText,
    ToolParser,
    Tools,
    length_before_tag,
)

ToolFormat = Literal["auto", "hermes", "qwen3_coder", "llama", "nemotron", "declared"]

_BLANKS = re.compile(r"[ \t\r\n]*")

_HERMES_OPEN, _HERMES_CLOSE = "<tool_call>", "</tool_call>"

_HERMES_HINT = 'Write <tool_call>{"name": NAME, "arguments": {...}}</tool_call> with valid JSON.'

_NEMOTRON_OPEN, _NEMOTRON_CLOSE = "<TOOLCALL>", "</TOOLCALL>"

_NEMOTRON_HINT = 'Write <TOOLCALL>[{"name": NAME, "arguments": {...}}]</TOOLCALL> with valid JSON.'

_LLAMA_TAG = "<|python_tag|>"

_LLAMA_HINT = 'Write nothing but {"name": NAME, "parameters": {...}} with valid JSON, one call per turn.'

_LLAMA_CALL_ATTEMPT = re.compile(r'\{\s*"(?:name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)|parameters"\s*:)')

_CODER_HINT = (
    "Write <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, each tag on a line."
)
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER = "<parameter="
_VALUE_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>|</tool_call>)")
_BLOCK_END = re.compile(r"</function>\s*</tool_call>")
_TAG_NAME = re.compile(r"[^<>\n]{1,256}>")
# As Python and Jinja spell them: some templates print the arguments of earlier calls that way.
_LITERALS: Mapping[str, Any] = {"True": True, "False": False, "None": None}

_JSON_TYPES: Mapping[type[object], str] = {
    str: "a string",
    list: "a list",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}

MAX_CHARACTERS = 1 << 16
"""Longest turn that a tokenizer's own declaration reads: its search is quadratic in the number of delimiters."""

_DECLARED_HINT = "Write tool calls exactly as the instructions show them."

ParseResponse = Callable[[str, Tools], object]
"""Text and schemas to a chat message. See ``Tokenizer.parse_response``."""


@dataclass(slots=True)
class CallCollector:
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

    def parsed_text(self) -> ParsedText:
        return ParsedText("".join(self.text_parts).strip(), tuple(self.calls), tuple(self.parse_errors))


def read_json(text: str, position: int) -> tuple[Any, int]:
    """Decode the JSON value at ``position``; return it and where it ends. Raises ``ValueError``, worded for the model.

    Decoding from the front, not cutting at a closing tag: a string in the JSON may contain that tag.
    """
    begin = skip_blanks(text, position)
    try:
        return STRICT_JSON.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - begin}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(str(error)[:100]) from None


def parse_call(value: Any, format_hint: str, arguments_key: str = "arguments") -> ParsedCall | str:
    """Return a call from a JSON object with a name and arguments, or a complaint that ends in ``format_hint``."""
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
        kind = _JSON_TYPES.get(cast("type[object]", type(arguments)), "null")
        return f'"{arguments_key}" of the tool call must be a JSON object, not {kind}. {format_hint}'
    return make_call(members.get("name"), cast("dict[str, Any]", arguments), format_hint)


def make_call(name: Any, arguments: Mapping[str, Any], format_hint: str) -> ParsedCall | str:
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


class _BlockParser(ABC):
    """Base of the formats whose calls stand in blocks that begin with a tag."""

    name: str
    opening: str
    """Tag that begins a block."""
    stray_tags: Sequence[str]
    """Tags that show an attempt at a call where there is no block."""
    stray_complaint: str

    def parse(self, text: str, tools: Tools) -> ParsedText:
        found, position = CallCollector(), 0
        while (start := text.find(self.opening, position)) >= 0:
            found.text_parts.append(text[position:start])
            block, position = self.read_block(text, start + len(self.opening), tools)
            items = [block] if isinstance(block, ParsedCall | str) else block
            if not all(found.collect(item) for item in items):
                return found.parsed_text()
        rest = text[position:]
        if not found.calls and not found.parse_errors and any(tag in rest for tag in self.stray_tags):
            found.collect(self.stray_complaint)
        found.text_parts.append(rest)
        return found.parsed_text()

    @abstractmethod
    def read_block(
        self, text: str, start: int, tools: Tools
    ) -> tuple[ParsedCall | str | Iterable[ParsedCall | str], int]:
        """Read the block whose content begins at ``start``: its calls or complaints, and where the text continues."""

    def plain_length(self, text: str, start: int) -> int:
        return length_before_tag(text, start, self.opening)


class HermesParser(_BlockParser):
    """Hermes, Qwen2.5 and Qwen3: one object between tags for each call.

    ``<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>``
    """

    name = "hermes"
    opening = _HERMES_OPEN
    stray_tags = (_HERMES_CLOSE,)
    stray_complaint = f"{_HERMES_CLOSE} without {_HERMES_OPEN}. {_HERMES_HINT}"

    def read_block(self, text: str, start: int, tools: Tools) -> tuple[ParsedCall | str, int]:
        try:
            value, end = read_json(text, start)
        except ValueError as error:
            complaint, closing = f"The tool call is not valid JSON ({error}).", start
        else:
            closing = skip_blanks(text, end)
            if text.startswith(_HERMES_CLOSE, closing):
                return parse_call(value, _HERMES_HINT), closing + len(_HERMES_CLOSE)
            if closing == len(text):
                return f"The tool call was not closed with {_HERMES_CLOSE}. {_HERMES_HINT}", closing
            complaint = f"There is more than one JSON object between {_HERMES_OPEN} and {_HERMES_CLOSE}."
        return f"{complaint} {_HERMES_HINT}", next_block(text, closing, _HERMES_OPEN, _HERMES_CLOSE)


class NemotronParser(_BlockParser):
    """Nemotron Nano 2 and Llama-Nemotron: one list of calls between tags.

    ``<TOOLCALL>[{"name": "bash", "arguments": {"command": "ls"}}]</TOOLCALL>``
    """

    name = "nemotron"
    opening = _NEMOTRON_OPEN
    stray_tags = (_NEMOTRON_CLOSE,)
    stray_complaint = f"{_NEMOTRON_CLOSE} without {_NEMOTRON_OPEN}. {_NEMOTRON_HINT}"

    def read_block(self, text: str, start: int, tools: Tools) -> tuple[str | Iterable[ParsedCall | str], int]:
        try:
            value, end = read_json(text, start)
        except ValueError as error:
            complaint, closing = f"The tool calls are not valid JSON ({error}).", start
        else:
            closing = skip_blanks(text, end)
            if text.startswith(_NEMOTRON_CLOSE, closing):
                position = closing + len(_NEMOTRON_CLOSE)
                if not isinstance(value, list) or not value:
                    return f"The tool calls are not a JSON list of objects. {_NEMOTRON_HINT}", position
                return (parse_call(entry, _NEMOTRON_HINT) for entry in cast("list[Any]", value)), position
            complaint = f"The tool calls were not closed with {_NEMOTRON_CLOSE}."
        return f"{complaint} {_NEMOTRON_HINT}", next_block(text, closing, _NEMOTRON_OPEN, _NEMOTRON_CLOSE)


class LlamaParser:
    """Llama 3: a turn that is nothing but one object, perhaps after ``<|python_tag|>``.

    ``{"name": "bash", "parameters": {"command": "ls"}}``

    One call per turn: the family's templates refuse more. Any other text that is JSON is an answer.
    """

    name = "llama"

    def parse(self, text: str, tools: Tools) -> ParsedText:
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
        members = as_mapping(value)
        if not tag and not ("parameters" in members or ("name" in members and "arguments" in members)):
            return _result_with_text(found, content)
        if skip_blanks(content, end) < len(content):
            found.collect(f"There is something after the tool call. {_LLAMA_HINT}")
        else:
            # Models of this family sometimes write the key of the other formats.
            key = "arguments" if "arguments" in members and "parameters" not in members else "parameters"
            found.collect(parse_call(value, _LLAMA_HINT, key))
        return found.parsed_text()

    def plain_length(self, text: str, start: int) -> int:
        return start if text.lstrip().startswith("{") else length_before_tag(text, start, _LLAMA_TAG)


def _result_with_text(found: CallCollector, text: str) -> ParsedText:
    found.text_parts.append(text)
    return found.parsed_text()


class Qwen3CoderParser(_BlockParser):
    """Qwen3-Coder, Qwen3.5 and Nemotron 3: tags, with values as plain text.

        <tool_call>
        <function=bash>
        <parameter=command>
        ls -l
        </parameter>
        </function>
        </tool_call>

    Values carry no type, so they are read by the tool's schema: a string verbatim, anything else as JSON where it is
    JSON. They cannot be escaped either: a value ends at the first closing tag after which the call continues properly.
    """

    name = "qwen3_coder"
    opening = _HERMES_OPEN
    stray_tags = (_HERMES_CLOSE, _FUNCTION, _FUNCTION_END)
    stray_complaint = f"A tool call begins with {_HERMES_OPEN}. {_CODER_HINT}"

    def read_block(self, text: str, start: int, tools: Tools) -> tuple[ParsedCall | str, int]:
        def refuse(complaint: str, position: int) -> tuple[str, int]:
            return f"{complaint} {_CODER_HINT}", next_block(text, position, _HERMES_OPEN, _HERMES_CLOSE)

        begin = skip_blanks(text, start)
        name_end = _TAG_NAME.match(text, begin + len(_FUNCTION)) if text.startswith(_FUNCTION, begin) else None
        if name_end is None:
            return refuse("The tool call does not begin with <function=NAME>.", begin)
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
                return refuse("A parameter of the tool call is not closed with </parameter>.", position)
            key = key_end.group()[:-1].strip()
            if key in arguments:
                return refuse(f"The tool call gives the parameter '{key[:40]}' twice.", position)
            arguments[key] = _parse_value(text[key_end.end() : value_end.start()], types.get(key))
            position = value_end.end()
        if not text.startswith(_FUNCTION_END, position):
            return refuse(f"The tool call was not closed with {_FUNCTION_END}.", position)
        closing = skip_blanks(text, position + len(_FUNCTION_END))
        if not text.startswith(_HERMES_CLOSE, closing):
            return refuse(f"The tool call was not closed with {_HERMES_CLOSE}.", closing)
        return make_call(name, arguments, _CODER_HINT), closing + len(_HERMES_CLOSE)


def _parameter_types(name: str, tools: Tools) -> Mapping[str, frozenset[str]]:
    """Return the types that each parameter of a tool may have; empty for one whose schema names none."""
    for tool in tools:
        function = as_mapping(tool.get("function", tool))
        if function.get("name") == name:
            properties = as_mapping(as_mapping(function.get("parameters")).get("properties"))
            return {key: frozenset(_schema_types(as_mapping(schema))) for key, schema in properties.items()}
    return {}


def _schema_types(schema: Mapping[str, Any]) -> list[str]:
    declared = schema.get("type")
    names: list[Any] = cast("list[Any]", declared) if isinstance(declared, list) else [declared]
    found = [name for name in names if isinstance(name, str)]
    for union in ("anyOf", "oneOf"):
        for member in schema.get(union) or ():
            found += _schema_types(as_mapping(member))
    return found


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


class ResponseTemplateParser:
    """The format that a tokenizer declares itself: ``response_template`` of ``transformers`` 5.

    The declaration is a program of regular expressions that comes with the model, run on text that the model wrote.
    Neither is trusted: whatever is raised becomes a complaint, and only well-formed entries of the result become calls.
    """

    name = "declared"

    def __init__(self, parse_response: ParseResponse) -> None:
        self._parse_response = parse_response

    def parse(self, text: str, tools: Tools) -> ParsedText:
        if len(text) > MAX_CHARACTERS:
            complaint = f"The turn is too long to look for tool calls in. {_DECLARED_HINT}"
            return ParsedText(text.strip(), parse_errors=(complaint,))
        try:
            members = as_mapping(self._parse_response(text, tools))
        except Exception as error:  # the declaration raises anything on what it cannot read
            complaint = f"The tool call cannot be read ({type(error).__name__}). {_DECLARED_HINT}"
            return ParsedText(text.strip(), parse_errors=(complaint,))
        found = CallCollector([_message_text(members)])
        calls = members.get("tool_calls")
        for entry in cast("list[Any]", calls) if isinstance(calls, list) else []:
            if not found.collect(_parse_entry(entry)):
                break
        return found.parsed_text()

    def plain_length(self, text: str, start: int) -> int:
        return start  # any text may be a call by the declaration


def _message_text(message: Mapping[str, Any]) -> str:
    thoughts = next((message[key] for key in ("thinking", "reasoning_content", "reasoning") if message.get(key)), "")
    content = message.get("content") or ""
    if not isinstance(content, str) or not isinstance(thoughts, str):
        return ""
    return f"<think>\n{thoughts}\n</think>\n\n{content}" if thoughts else content


def _parse_entry(entry: object) -> ParsedCall | str:
    if not isinstance(entry, Mapping):
        return f"The tool call is not an object. {_DECLARED_HINT}"
    members = cast("Mapping[str, Any]", entry)
    function = members.get("function", members)
    if not isinstance(function, Mapping):
        return parse_call(function, _DECLARED_HINT)
    named = cast("Mapping[str, Any]", function)
    arguments = named.get("arguments")
    if not isinstance(arguments, Mapping):
        return parse_call(dict(named), _DECLARED_HINT)
    return make_call(named.get("name"), dict(cast("Mapping[str, Any]", arguments)), _DECLARED_HINT)


def known_parsers(parse_response: ParseResponse | None = None) -> dict[str, ToolParser]:
    """Return every parser by its name, in the order in which ``auto`` tries them."""
    known: list[ToolParser] = [HermesParser(), Qwen3CoderParser(), NemotronParser(), LlamaParser()]
    if parse_response is not None:
        known.insert(0, ResponseTemplateParser(parse_response))
    return {parser.name: parser for parser in known}
