"""The formats of tool calls: to add one, write a ``ToolParser``, and add its name and the parser at the end."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from prorl_gym.inference.strict_json import MAX_JSON_DEPTH, STRICT_JSON, as_mapping, is_too_deep
from prorl_gym.inference.toolcalls.argument_schema import UNTYPED, accepts
from prorl_gym.inference.toolcalls.turn_parsing import (
    MAX_CALLS,
    ParsedCall,
    ParsedText,
    ToolParser,
    Tools,
)

ToolFormat = Literal["auto", "hermes", "qwen3_coder", "llama", "nemotron", "declared"]

_BLANKS = re.compile(r"[ \t\r\n]*")

_HERMES_OPEN, _HERMES_CLOSE = "<tool_call>", "</tool_call>"

_LLAMA_TAG = "<|python_tag|>"

_LLAMA_HINT = 'Write nothing but {"name": NAME, "parameters": {...}} with valid JSON, one call per turn.'

_LLAMA_CALL_ATTEMPT = re.compile(r'\{\s*"(?:name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)|parameters"\s*:)')

_CODER_HINT = (
    "Write <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, each tag on a line."
)
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>|</tool_call>)")
_DOUBLED_END = re.compile(r"</parameter>\s*</parameter>")
_BROKEN_BLOCK_END = re.compile(r"</tool_call>\s*(?=<tool_call>|\Z)")
_ANY_TAG = re.compile(
    r"</(?P<closed>tool_call|function|parameter)>"
    r"|<(?P<opened>tool_call(?=>)|(?:function|parameter)(?==[^<>\n]{1,256}>))"
)
_CALL_KINDS = ("function", "tool_call")
_MAX_OPEN_TAGS = 100
"""Tags open at once inside one value; more are not read."""
_TAG_NAME = re.compile(r"[^<>\n]{1,256}>")
# As Python and Jinja spell them: some templates print the arguments of earlier calls that way.
_LITERALS: Mapping[str, Any] = {"True": True, "False": False, "None": None}

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
    if not _is_name(members.get("name")):
        return _missing_name(format_hint)
    if arguments_key not in members:
        return f'The tool call has no "{arguments_key}". {format_hint}'
    arguments = members[arguments_key]
    if not isinstance(arguments, dict):
        return f'"{arguments_key}" of the tool call must be a JSON object. {format_hint}'
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
    inner_closings: Sequence[str] = ()
    """Tags that close a part of a block: outside of blocks they show that one was cut at an example inside it."""

    def parse(self, text: str, tools: Tools) -> ParsedText:
        found, position, start = CallCollector(), 0, 0
        while start >= 0:
            start = text.find(self.opening, position)
            outside = text[position : start if start >= 0 else len(text)]
            found.text_parts.append(outside)
            if (found.calls or (start < 0 and not found.parse_errors)) and self._has_stray_tag(outside, found):
                found.calls.clear()  # they are examples inside an argument, or cut at one
                found.collect(self.stray_complaint)
                break
            if start >= 0:
                block, position = self.read_block(text, start + len(self.opening), tools)
                items = [block] if isinstance(block, ParsedCall | str) else block
                if not all(found.collect(item) for item in items):
                    break
        return found.parsed_text()

    def _has_stray_tag(self, outside: str, found: CallCollector) -> bool:
        """Whether a tag belongs to no block; a small model's second ``</tool_call>`` after a right call is harmless."""
        tags = self.inner_closings if found.calls and not found.parse_errors else self.stray_tags
        return any(tag in outside for tag in tags)

    @abstractmethod
    def read_block(
        self, text: str, start: int, tools: Tools
    ) -> tuple[ParsedCall | str | Iterable[ParsedCall | str], int]:
        """Read the block whose content begins at ``start``: its calls or complaints, and where the text continues."""


class JsonBlockParser(_BlockParser):
    """The formats whose blocks are one JSON value: a call, or a list of them."""

    def __init__(self, name: str, opening: str, closing: str, hint: str, *, has_list: bool) -> None:
        self.name, self.opening, self._closing, self._hint = name, opening, closing, hint
        self._has_list = has_list
        self.stray_tags = (closing,)
        self.stray_complaint = f"{closing} without {opening}. {hint}"

    def read_block(self, text: str, start: int, tools: Tools) -> tuple[Iterable[ParsedCall | str], int]:
        try:
            value, end = read_json(text, start)
        except ValueError as error:
            complaint, end = f"The block is not valid JSON ({error}).", start
        else:
            end = skip_blanks(text, end)
            if text.startswith(self._closing, end):
                return self._read_calls(value), end + len(self._closing)
            complaint = f"The block has more than one JSON value, or was not closed with {self._closing}."
        return [f"{complaint} {self._hint}"], next_block(text, end, self.opening, self._closing)

    def _read_calls(self, value: Any) -> Iterable[ParsedCall | str]:
        if not self._has_list:
            return [parse_call(value, self._hint)]
        if not isinstance(value, list) or not value:
            return [f"The tool calls are not a JSON list of objects. {self._hint}"]
        return (parse_call(entry, self._hint) for entry in cast("list[Any]", value))


class LlamaParser:
    """Llama 3: a turn that is nothing but one object, perhaps after ``<|python_tag|>``.

    ``{"name": "bash", "parameters": {"command": "ls"}}``

    One call per turn: the family's templates refuse more. Any other text that is JSON is an answer.
    """

    name = "llama"

    def parse(self, text: str, tools: Tools) -> ParsedText:
        found = CallCollector()
        is_object = text.lstrip().startswith("{")  # a tag after that is its own, or behind it
        before, tag, content = ("", "", text) if is_object else text.partition(_LLAMA_TAG)
        if not tag and not is_object:
            if _LLAMA_CALL_ATTEMPT.search(text):
                found.collect(f"There is text around the tool call. {_LLAMA_HINT}")
            return _result_with_text(found, text)
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
    JSON. They cannot be escaped either: a value ends at the first closing tag that closes no tag of the value itself
    and after which the call continues properly. A turn that reads well without that rule too, as other calls, has none.
    """

    name = "qwen3_coder"
    opening = _HERMES_OPEN
    stray_tags = (_HERMES_CLOSE, _FUNCTION, _FUNCTION_END, _PARAMETER_END)
    stray_complaint = f"Tags lie outside of a tool call, which begins with {_HERMES_OPEN}. {_CODER_HINT}"
    inner_closings = (_PARAMETER_END, _FUNCTION_END)

    def __init__(self, *, has_examples: bool = True) -> None:
        self._find_value_end = _find_value_end if has_examples else _find_first_end
        self._other_reading = Qwen3CoderParser(has_examples=False) if has_examples else None

    def parse(self, text: str, tools: Tools) -> ParsedText:
        parsed = super().parse(text, tools)
        other = parsed if self._other_reading is None or not parsed.calls else self._other_reading.parse(text, tools)
        if other.calls == parsed.calls or not other.calls or other.parse_errors:
            return parsed
        return ParsedText(parsed.text, parse_errors=(f"Tags in a value can be read in two ways. {_CODER_HINT}",))

    def read_block(self, text: str, start: int, tools: Tools) -> tuple[ParsedCall | str, int]:
        def refuse(complaint: str, position: int) -> tuple[str, int]:
            tag = _ANY_TAG.search(text, position)
            if tag is None or f"</{tag['closed']}>" not in self.inner_closings:  # that would be a stray one
                position = next_block(text, position, _HERMES_OPEN, _HERMES_CLOSE)
            return f"{complaint} {_CODER_HINT}", position

        begin = skip_blanks(text, start)
        name_end = _TAG_NAME.match(text, begin + len(_FUNCTION)) if text.startswith(_FUNCTION, begin) else None
        if name_end is None:
            return refuse("The tool call does not begin with <function=NAME>.", begin)
        name = name_end.group()[:-1].strip()
        schema = _arguments_schema(name, tools)
        arguments: dict[str, Any] = {}
        position = skip_blanks(text, name_end.end())
        while text.startswith(_PARAMETER, position):
            key_end = _TAG_NAME.match(text, position + len(_PARAMETER))
            value_end, resumed = self._find_value_end(text, key_end.end() if key_end else position)
            if key_end is None or value_end is None:
                return f"A parameter of the tool call is not closed with {_PARAMETER_END}. {_CODER_HINT}", resumed
            key = key_end.group()[:-1].strip()
            if key in arguments:
                return refuse(f"The tool call gives the parameter '{key[:40]}' twice.", value_end.end())
            arguments[key] = _parse_value(text[key_end.end() : value_end.start()], key, schema)
            position = value_end.end()
        if not text.startswith(_FUNCTION_END, position):
            return refuse(f"The tool call was not closed with {_FUNCTION_END}.", position)
        closing = skip_blanks(text, position + len(_FUNCTION_END))
        if not text.startswith(_HERMES_CLOSE, closing):
            return refuse(f"The tool call was not closed with {_HERMES_CLOSE}.", closing)
        return make_call(name, arguments, _CODER_HINT), closing + len(_HERMES_CLOSE)


def _find_value_end(text: str, start: int) -> tuple[re.Match[str] | None, int]:
    """Return the closing tag of the value that begins at ``start``, and where the text continues.

    A closing tag in an example of a call belongs to the last opening tag of its kind that is still open. Opening tags
    between the two are only mentioned. Where it could as well end the value, since tags around it are only mentioned or
    not there, the value is not closed (``None``). Such a value ends where its block is followed by another one, or with
    the text: a call further on may be an example in it.
    """
    with suppress(ValueError):  # tags in the strings of JSON are no tags
        if end := _VALUE_END.match(text, skip_blanks(text, read_json(text, start)[1])):
            return end, end.end()
    examples: list[str] = []
    resumed, has_boundary = len(text), False
    for tag in _ANY_TAG.finditer(text, start):
        kind = tag["opened"] or tag["closed"]
        end = _VALUE_END.match(text, tag.start())
        if tag["opened"]:
            examples.append(kind)
        elif kind in examples:
            while examples.pop() != kind:
                pass
            has_boundary = has_boundary or end is not None
            if end and any(text.startswith(f"</{one}>", end.end()) for one in _CALL_KINDS if one not in examples):
                break
        elif end:
            return (end, end.end()) if not (examples and has_boundary) else (None, resumed)
        elif _DOUBLED_END.match(text, tag.start()):
            break
        elif end := _BROKEN_BLOCK_END.match(text, tag.start()):
            resumed = min(resumed, end.end())
        if len(examples) > _MAX_OPEN_TAGS:
            break
    return None, resumed


def _find_first_end(text: str, start: int) -> tuple[re.Match[str] | None, int]:
    """Return the first closing tag of a value after which the call continues properly; else as ``_find_value_end``."""
    end = _VALUE_END.search(text, start)
    return end, end.end() if end else len(text)


def _arguments_schema(name: str, tools: Tools) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments, an object; empty for a tool that is not known."""
    functions = [as_mapping(tool.get("function", tool)) for tool in tools]
    return as_mapping(next((one.get("parameters") for one in functions if one.get("name") == name), None))


def _parse_value(written: str, key: str, arguments: Mapping[str, Any]) -> Any:
    """Read a value. The newline after its opening tag and the one before its closing tag belong to the tags."""
    text = written.removeprefix("\n").removesuffix("\n")
    schema = as_mapping(arguments.get("properties")).get(key)
    if schema is None:  # the agent loop reports a parameter that the tool does not have
        return text
    word = text.strip()
    value = _LITERALS.get(word, text)
    with suppress(ValueError):
        decoded, end = read_json(word, 0)
        value = decoded if end == len(word) else value
    if word == "null" and accepts(None, schema, arguments):
        return None
    # Text where the schema takes text, unless it takes anything.
    is_text = accepts(text, schema, arguments) and not accepts(UNTYPED, schema, arguments)
    return value if not is_text and accepts(value, schema, arguments) else text


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


def _message_text(message: Mapping[str, Any]) -> str:
    thoughts = next((message[key] for key in ("thinking", "reasoning_content", "reasoning") if message.get(key)), "")
    content = message.get("content") or ""
    if not isinstance(content, str) or not isinstance(thoughts, str):
        return ""
    return f"<think>\n{thoughts}\n</think>\n\n{content}" if thoughts else content


def _parse_entry(entry: object) -> ParsedCall | str:
    function = as_mapping(entry).get("function", entry)
    if not isinstance(function, Mapping):
        return parse_call(function, _DECLARED_HINT)
    members = dict(cast("Mapping[str, Any]", function))
    if isinstance(members.get("arguments"), Mapping):
        members["arguments"] = dict(members["arguments"])
    return parse_call(members, _DECLARED_HINT)


def known_parsers(parse_response: ParseResponse | None = None) -> dict[str, ToolParser]:
    """Return every parser by its name, in the order in which ``auto`` tries them."""
    # Hermes, Qwen2.5 and Qwen3.
    hint = 'Write <tool_call>{"name": NAME, "arguments": {...}}</tool_call> with valid JSON.'
    hermes = JsonBlockParser("hermes", _HERMES_OPEN, _HERMES_CLOSE, hint, has_list=False)
    # Nemotron Nano 2 and Llama-Nemotron.
    hint = 'Write <TOOLCALL>[{"name": NAME, "arguments": {...}}]</TOOLCALL> with valid JSON.'
    nemotron = JsonBlockParser("nemotron", "<TOOLCALL>", "</TOOLCALL>", hint, has_list=True)
    known: list[ToolParser] = [hermes, Qwen3CoderParser(), nemotron, LlamaParser()]
    if parse_response is not None:
        known.insert(0, ResponseTemplateParser(parse_response))
    return {parser.name: parser for parser in known}
