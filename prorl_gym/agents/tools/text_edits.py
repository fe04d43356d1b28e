"""Edits of a text as the ``editor`` tool makes them, and the excerpts that it shows. Pure functions.

The text and what is searched in it are chosen by a model, and this runs on the service's event loop: every function
takes time in proportion to the text, whatever repeats in it.

Lines end with a line feed only, as they do for compilers and for git; numbers count from 1.
"""

from collections.abc import Iterable
from itertools import islice

CONTEXT_LINES = 4
"""Lines shown before and after an edit."""
_MAX_LISTED = 10
"""Line numbers in one complaint."""


class EditRefused(Exception):
    """The edit was not made. The text is worded for the model."""


def split_lines(text: str) -> list[str]:
    """Return the lines without their ends; a last line feed opens no further line."""
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def replace_once(text: str, old: str, new: str) -> tuple[str, int]:
    """Replace the only occurrence of ``old``; return the text and the number of the first line that changed.

    In a file whose lines all end in CRLF, ``old`` and ``new`` are read as if theirs did.

    Raises:
        EditRefused: it does not occur, occurs more than once, or nothing would change.
    """
    if not old:
        raise EditRefused("old_str is empty. Give the text to replace, or use insert.")
    if old not in text and "\n" in old and text.count("\n") == text.count("\r\n") > 0:
        old, new = (part.replace("\r\n", "\n").replace("\n", "\r\n") for part in (old, new))
    if old == new:
        raise EditRefused("old_str and new_str are the same: nothing would change.")
    at = text.find(old)
    if at < 0:
        raise EditRefused(f"old_str was not found. {_similar_line_hint(text, old)}")
    places = _line_numbers(text, old)
    if len(places) > 1:
        count = str(len(places)) if len(places) <= _MAX_LISTED else f"more than {_MAX_LISTED}"
        raise EditRefused(
            f"old_str stands in {count} places, which begin on lines {_format_numbers(places)}. Give more of the lines "
            "around the one that is meant."
        )
    return text[:at] + new + text[at + len(old) :], places[0]


def insert_after(text: str, line: int, new: str) -> str:
    """Insert lines after line number ``line``; 0 puts them first.

    Raises:
        EditRefused: there is no such line.
    """
    lines = split_lines(text)
    if not 0 <= line <= len(lines):
        raise EditRefused(f"insert_line is {line}, but the file has {len(lines)} lines: give 0 to {len(lines)}.")
    end = "\r\n" if text.count("\n") == text.count("\r\n") > 0 else "\n"
    position = sum(len(one) + 1 for one in lines[:line])
    new = new.replace("\r\n", "\n").removesuffix("\n").replace("\n", end) + end
    if position > len(text):  # after a last line that has no end
        return text + end + new.removesuffix(end)
    return text[:position] + new + text[position:]


def number_lines(lines: Iterable[str], first: int) -> str:
    """Return lines with their numbers."""
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, first))


def edit_excerpt(text: str, first: int, count: int) -> str:
    """Return the numbered lines of an edit and some around it."""
    lines = split_lines(text)
    start, end = max(1, first - CONTEXT_LINES), min(len(lines), first + max(count, 1) - 1 + CONTEXT_LINES)
    return number_lines(lines[start - 1 : end], start)


def _line_numbers(text: str, part: str) -> list[int]:
    """Return the lines at which a text begins, overlapping ones too; one more than are listed at most."""
    numbers: list[int] = []
    line, seen, at = 1, 0, text.find(part)
    while at >= 0 and len(numbers) <= _MAX_LISTED:
        line += text.count("\n", seen, at)
        numbers.append(line)
        seen, at = at, text.find(part, at + 1)
    return numbers


def _similar_line_hint(text: str, old: str) -> str:
    """Return a hint where the first line of ``old`` occurs with other blanks: mostly the indentation differs."""
    wanted = next((line.strip() for line in old.split("\n") if line.strip()), "")
    lines = enumerate(split_lines(text) if wanted and wanted in text else [], 1)
    places = list(islice((number for number, line in lines if line.strip() == wanted), _MAX_LISTED + 1))
    if not places:
        return "View the file and copy the text as it stands there, blanks included."
    return f"Its first line stands on line {_format_numbers(places)}: compare blanks, and the lines after it."


def _format_numbers(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MAX_LISTED]))
    return f"{shown}, ..." if len(numbers) > _MAX_LISTED else shown
