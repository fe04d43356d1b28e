"""Where the thoughts of a turn end: what every reader of a turn's text asks.

A turn begins with the tag of its thoughts whether its prompt ended in that or the model wrote it.
"""

import re

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_BEGUN = re.compile(rf"\s*{THINK_OPEN}")


def thinking_end(text: str) -> int:
    """Return where the thoughts at the beginning of a turn end: 0 without any, its length if they are not closed.

    Tags anywhere else are text.
    """
    end = 0
    while (begun := _BEGUN.match(text, end)) is not None:
        closed = text.find(THINK_CLOSE, begun.end())
        if closed < 0:
            return len(text)
        end = closed + len(THINK_CLOSE)
    return end


def split_thinking(text: str) -> tuple[str, str]:
    """Split a turn into its thoughts, without the tags around them, and the text after them."""
    end = thinking_end(text)
    return text[:end].strip().removeprefix(THINK_OPEN).removesuffix(THINK_CLOSE).strip(), text[end:]


def open_thinking(text: str) -> str:
    """Return the text of a server's turn, with the opening tag that only the prompt had, if a closing one shows it."""
    before, closed, _ = text.partition(THINK_CLOSE)
    return f"{THINK_OPEN}\n{text}" if closed and THINK_OPEN not in before else text
