"""How deeply JSON from a model or an engine may be nested."""

from typing import Any, cast

MAX_JSON_DEPTH = 100
"""Levels of arguments. The JSON parser takes thousands, Python's recursion does not."""


def is_too_deep(value: Any) -> bool:
    """Whether a JSON value has more levels than code that recurses into it can take."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []
