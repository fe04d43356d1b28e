"""The protocol of a tool-call parser, and its result.

The text is the model's and therefore hostile: no parser raises, a call that cannot be read becomes a complaint worded
for the model, and the work is linear in the text. The loop checks whether a tool of that name exists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Tools = Sequence[Mapping[str, Any]]
"""Function schemas, as ``ToolSpec.as_function`` gives them. They come from environments and are trusted."""

MAX_CALLS = 32
"""Calls and complaints that one turn can give; the rest becomes one complaint."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call that is well-formed."""

    name: str
    arguments: str
    """JSON text of an object."""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """One turn, parsed."""

    text: str
    """Everything outside of call blocks, thoughts included, without blanks around it."""
    calls: tuple[ParsedCall, ...] = ()
    parse_errors: tuple[str, ...] = ()
    """One per block that could not be read."""


class ToolParser(Protocol):
    """Reads one form of tool calls."""

    @property
    def name(self) -> str:
        """The format's name in the configuration."""
        ...

    def parse(self, text: str, tools: Tools) -> ParsedText:
        """Split what follows the thoughts into text, calls and complaints. Never raises.

        Args:
            text: decoded, without the token that ended the turn.
            tools: what may be called; forms with untyped values read the types here.
        """
        ...

    def plain_length(self, text: str, start: int) -> int:
        """Return the length of the beginning of a text that stays text, whatever is still to be written.

        Args:
            text: as far as it is written.
            start: what this method returned for a shorter beginning of it; 0 at first.
        """
        ...
