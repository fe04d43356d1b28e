"""Parsing a whole turn of the model: thoughts, then text and calls. Calls inside thoughts are text, in every format."""

from dataclasses import replace

from prorl_gym.inference.toolcalls.protocol import ParsedText, ToolParser, Tools

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


def parse_turn(parser: ToolParser, text: str, tools: Tools, *, thinking_open: bool = False) -> ParsedText:
    """Split a turn into text, calls and complaints. Never raises.

    Args:
        parser: of the form of calls.
        text: decoded, without the token that ended the turn.
        tools: what may be called.
        thinking_open: the prompt opened the thoughts already, as some templates do.
    """
    end = thinking_end(text, thinking_open=thinking_open)
    said = parser.parse(text[end:], tools)
    return replace(said, text=(text[:end] + _blanks_after(text, end) + said.text).strip()) if end else said


def thinking_end(text: str, *, thinking_open: bool = False) -> int:
    """Return where the thoughts at the beginning of a turn end: 0 without any, its length if they are not closed."""
    if not thinking_open and not text.lstrip().startswith(THINK_OPEN):
        return 0
    end = text.find(THINK_CLOSE)
    return end + len(THINK_CLOSE) if end >= 0 else len(text)


def split_thinking(text: str, *, thinking_open: bool = False) -> tuple[str, str]:
    """Split a turn into its thoughts, without their tags, and the text after them."""
    end = thinking_end(text, thinking_open=thinking_open)
    return text[:end].strip().removeprefix(THINK_OPEN).removesuffix(THINK_CLOSE).strip(), text[end:]


def _blanks_after(text: str, end: int) -> str:
    """Return the blanks after the thoughts: templates put them back the way they were."""
    return text[end : len(text) - len(text[end:].lstrip())]
