"""The protocol of a tool-call parser, and parsing a whole turn: thoughts, then text and calls.

The text is the model's and therefore hostile: no parser raises, a call that cannot be read becomes a complaint worded
for the model, and the work is linear in the text. Calls inside thoughts are text, in every format. The loop checks
whether a tool of that name exists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from prorl_gym.thoughts import thinking_end

Tools = Sequence[Mapping[str, Any]]
"""Function schemas, as ``ToolSpec.as_function`` gives them. They come from environments and are trusted."""

MAX_CALLS = 32
"""Calls and complaints that one turn can give; the rest becomes one complaint."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: str
    """JSON text of an object."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    text: str
    """Everything outside of call blocks, thoughts included, without blanks around it."""
    calls: tuple[ParsedCall, ...] = ()
    parse_errors: tuple[str, ...] = ()
    """One per block that could not be read."""


class ToolParser(Protocol):
    """Reads one form of tool calls."""

    @property
    def name(self) -> str: ...

    def parse(self, text: str, tools: Tools) -> ParsedText:
        """Split what follows the thoughts, without the token that ended the turn, into text, calls and complaints.

        Never raises. Forms with untyped values read their types in ``tools``.
        """
        ...


def parse_turn(parser: ToolParser, text: str, tools: Tools) -> ParsedText:
    """Split a turn, which begins with the tag of its thoughts also where the prompt wrote that. Never raises."""
    end = thinking_end(text)
    said = parser.parse(text[end:], tools)
    # Templates put the blanks after the thoughts back the way they were.
    blanks = text[end : len(text) - len(text[end:].lstrip())]
    return replace(said, text=(text[:end] + blanks + said.text).strip()) if end else said
