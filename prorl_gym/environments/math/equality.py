"""Equality of two mathematical answers. Runs in a worker process: parsing what a model wrote may hang or crash.

The one file that knows ``math-verify`` (which has no types). Only its LaTeX grammar is used, never the path that
evaluates text as Python.
"""

import logging
from collections.abc import Mapping
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify  # pyright: ignore[reportMissingTypeStubs]

from prorl_gym.environments.math import spelling

for _noisy in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_noisy).setLevel(logging.CRITICAL)  # they log what they cannot read


def grade(body: Mapping[str, Any]) -> dict[str, bool]:
    """Worker entry: ``{"gold", "answer"}`` -> ``{"equal"}``."""
    return {"equal": equal(body["gold"], body["answer"])}


def equal(one: str, other: str) -> bool:
    """Whether two answers are the same. Symmetric; nothing equals an empty or meaningless answer.

    A percent sign on one side only is taken either way (``50%`` equals ``0.5`` and, since questions ask "how many
    percent", ``50``). Numbers agree to six decimal places, units and a leading ``x =`` do not count, sets have no
    order and tuples have one.
    """
    first, second = spelling.plain(one), spelling.plain(other)
    if not spelling.key(first) or not spelling.key(second):
        return False
    if spelling.key(first) == spelling.key(second):
        return not _undefined(_parse(first))
    first_words, second_words = spelling.words(first), spelling.words(second)
    if first_words is not None or second_words is not None:
        return first_words == second_words
    for form in (spelling.base, spelling.enclosure):  # told apart here, since the library does not
        forms = form(first), form(second)
        if None not in forms and forms[0] != forms[1]:
            return False
    return any(_same_value(left, right) for left, right in _percent_readings(first, second))


def _percent_readings(first: str, second: str) -> list[tuple[str, str]]:
    first_bare, second_bare = spelling.without_percent(first), spelling.without_percent(second)
    if first_bare is not None and second_bare is not None:
        return [(first_bare, second_bare)]
    if first_bare is not None:
        return [(first_bare, second), (f"({first_bare})/100", second)]
    if second_bare is not None:
        return [(first, second_bare), (first, f"({second_bare})/100")]
    return [(first, second)]


def _same_value(first: str, second: str) -> bool:
    left, right = _parse(first), _parse(second)
    if left is None or right is None or _undefined(left) or _undefined(right):
        return False
    # The library's own verdict depends on the order, so both are asked. Time is bounded from outside.
    return all(
        verify(gold, target, allow_set_relation_comp=True, timeout_seconds=None)
        for gold, target in ((left, right), (right, left))
    )


def _parse(text: str) -> Any:
    """Return the one expression that a text spells, or ``None``: several readings would be several chances."""
    found: list[Any] = parse(  # pyright: ignore[reportUnknownVariableType]
        f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=0
    )
    return found[0] if len(found) == 1 else None


def _undefined(value: Any) -> bool:
    return str(value) in ("nan", "zoo")
