"""Text that a system call can take: paths, arguments and variables, as Linux has them."""

import os
from collections.abc import Mapping, Sequence


def flaw_of(text: str) -> str:
    """Return what keeps a text from being a path or an argument, or ""."""
    if "\0" in text:
        return "contains a NUL byte"
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        return f"contains U+{ord(text[error.start]):04X}, which has no encoding"
    return ""


def flaw_of_variables(env: Mapping[str, str]) -> str:
    """Return what keeps some variable from being one, with its name, or ""."""
    for name, value in env.items():
        if not name or "=" in name:
            return f"{name!a} cannot be a variable: its name is empty or has '='"
        if flaw := flaw_of(name) or flaw_of(value):
            return f"{name!a} cannot be a variable: it {flaw}"
    return ""


def flaw_of_command(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> str:
    """Return what keeps a program from being started so, or ""."""
    for argument in argv:
        if flaw := flaw_of(argument):
            return f"an argument {flaw}"
    if flaw := flaw_of(cwd):
        return f"the working directory {flaw}"
    return flaw_of_variables(env)
