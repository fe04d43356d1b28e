"""JSON from a model or an engine: strict, and nested no deeper than code that recurses into it can take."""

import json
from collections.abc import Mapping
from itertools import chain
from typing import Any, NoReturn, cast

MAX_JSON_DEPTH = 100
"""Levels of arguments. The JSON parser takes thousands, Python's recursion does not."""


def refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


STRICT_JSON = json.JSONDecoder(parse_constant=refuse_constant)
"""Made once: an event of a stream is short, and there is one for each token."""


def is_too_deep(value: Any) -> bool:
    """Whether a JSON value has more levels than ``MAX_JSON_DEPTH``."""
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        children = (cast("list[Any]", one) if isinstance(one, list) else as_mapping(one).values() for one in level)
        level = [*chain.from_iterable(children)]
        if not level:
            return False
    return True


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON object; an empty one for any other value."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
