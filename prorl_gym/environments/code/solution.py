"""Finding the program in what the agent handed in."""

import re

MAX_PROGRAM = 256 << 10
"""Longest program that is run, in bytes."""

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


class NoProgramError(ValueError):
    """There is nothing to run; the message says why."""


def find_program(answer: str) -> str:
    """Return the last fenced Python block of an answer, or the whole answer when nothing in it is fenced.

    Raises:
        NoProgramError: empty, too long, or fenced as another language only.
    """
    if len(answer) > 4 * MAX_PROGRAM:
        raise NoProgramError(f"the answer is longer than {4 * MAX_PROGRAM} characters")
    blocks = [(match[1].lower(), match[2]) for match in _FENCE.finditer(answer)]
    programs = [body for language, body in blocks if language in ("python", "py", "python3", "")]
    if blocks and not programs:
        raise NoProgramError("no block of Python in the answer")
    program = programs[-1] if programs else answer
    if not program.strip():
        raise NoProgramError("no program in the answer")
    if len(program.encode(errors="replace")) > MAX_PROGRAM:
        raise NoProgramError(f"the program is longer than {MAX_PROGRAM} bytes")
    return program
