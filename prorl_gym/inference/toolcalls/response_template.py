"""The format that a tokenizer declares itself: ``response_template`` of ``transformers`` 5.

The declaration is a program of regular expressions that comes with the model, run on text that the model wrote. Neither
is trusted: a text beyond ``MAX_CHARACTERS`` is not read at all (their search is quadratic in the number of delimiters),
whatever is raised becomes a complaint, and only well-formed entries of the result become calls.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from prorl_gym.inference.toolcalls.call_collector import CallCollector, make_call, parse_call
from prorl_gym.inference.toolcalls.protocol import ParsedCall, ParsedText, Tools

MAX_CHARACTERS = 1 << 16

_FORMAT_HINT = "Write tool calls exactly as the instructions show them."

ParseResponse = Callable[[str, Tools], object]
"""Text and schemas to a chat message. See ``Tokenizer.parse_response``."""


class ResponseTemplateParser:
    """Implements ``ToolParser``.

    Args:
        parse_response: of the tokenizer.
    """

    name = "declared"

    def __init__(self, parse_response: ParseResponse) -> None:
        self._parse_response = parse_response

    def parse(self, text: str, tools: Tools) -> ParsedText:
        """See ``ToolParser.parse``."""
        if len(text) > MAX_CHARACTERS:
            return ParsedText(
                text.strip(), parse_errors=(f"The turn is too long to look for tool calls in. {_FORMAT_HINT}",)
            )
        try:
            message = self._parse_response(text, tools)
        except Exception as error:  # the declaration raises anything on what it cannot read
            complaint = f"The tool call cannot be read ({type(error).__name__}). {_FORMAT_HINT}"
            return ParsedText(text.strip(), parse_errors=(complaint,))
        members: Mapping[str, Any] = cast("Mapping[str, Any]", message) if isinstance(message, Mapping) else {}
        found = CallCollector([_message_text(members)])
        calls = members.get("tool_calls")
        for entry in cast("list[Any]", calls) if isinstance(calls, list) else []:
            if not found.collect(_parse_entry(entry)):
                break
        return found.parsed_text()

    def plain_length(self, text: str, start: int) -> int:
        """See ``ToolParser.plain_length``: nothing, since any text may be a call by the declaration."""
        return start


def _message_text(message: Mapping[str, Any]) -> str:
    thoughts = next((message[key] for key in ("thinking", "reasoning_content", "reasoning") if message.get(key)), "")
    content = message.get("content") or ""
    if not isinstance(content, str) or not isinstance(thoughts, str):
        return ""
    return f"<think>\n{thoughts}\n</think>\n\n{content}" if thoughts else content


def _parse_entry(entry: object) -> ParsedCall | str:
    if not isinstance(entry, Mapping):
        return f"The tool call is not an object. {_FORMAT_HINT}"
    members = cast("Mapping[str, Any]", entry)
    function = members.get("function", members)
    if not isinstance(function, Mapping):
        return parse_call(function, _FORMAT_HINT)
    named = cast("Mapping[str, Any]", function)
    arguments = named.get("arguments")
    if not isinstance(arguments, Mapping):
        return parse_call(dict(named), _FORMAT_HINT)
    return make_call(named.get("name"), dict(cast("Mapping[str, Any]", arguments)), _FORMAT_HINT)
