"""Whether a value fits the JSON schema of a tool's argument.

By drafts 4 to 2020-12: the keywords that decide what kind of value is meant (``type``, ``enum``, ``const``, ``anyOf``,
``oneOf``, ``allOf``, ``$ref`` into the tool's own schema). The others (bounds, patterns, members) are the tool's to
check, so several schemas of a ``oneOf`` may accept a value. What is unknown or empty constrains nothing.
"""

import math
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import unquote

from prorl_gym.inference.strict_json import as_mapping

UNTYPED = object()
"""A value of no type: only a schema without types accepts it."""

_MAX_DEPTH = 10
"""Schemas inside schemas, which may come from a program in a sandbox."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def accepts(value: object, schema: object, root: Mapping[str, Any]) -> bool:
    """Whether a schema accepts a JSON value; ``root``: the schema that its references point into."""
    return _accepts(value, schema, root, {}, 0)


def _accepts(value: object, schema: object, root: Mapping[str, Any], known: dict[int, bool], depth: int) -> bool:
    """``known``: what schemas said, by identity. Each is asked once, however often it is referred to."""
    members = as_mapping(schema)
    if depth > _MAX_DEPTH or not members:
        return schema is not False
    if id(schema) not in known:
        known[id(schema)] = True  # inside itself it constrains nothing more
        known[id(schema)] = _is_accepted(value, members, root, known, depth + 1)
    return known[id(schema)]


def _is_accepted(
    value: object, members: Mapping[str, Any], root: Mapping[str, Any], known: dict[int, bool], depth: int
) -> bool:
    kinds = [str(kind) for kind in _list(members.get("type")) or [members.get("type")]]
    if all(kind in _TYPES for kind in kinds) and not any(_is_of_type(value, kind) for kind in kinds):
        return False
    choices = [[members["const"]] if "const" in members else [], _list(members.get("enum"))]
    if not all(any(_typed(value) == _typed(one) for one in choice) for choice in choices if choice):
        return False
    reference = [_resolve(members["$ref"], root)] if "$ref" in members else []
    unions = [_list(members.get(name)) for name in ("anyOf", "oneOf")]
    return all(_accepts(value, one, root, known, depth) for one in _list(members.get("allOf")) + reference) and all(
        any(_accepts(value, one, root, known, depth) for one in union) for union in unions if union
    )


def _is_of_type(value: object, kind: str) -> bool:
    if isinstance(value, bool):  # a bool is an int in Python only
        return kind == "boolean"
    if isinstance(value, float):
        return math.isfinite(value) and (kind == "number" or (kind == "integer" and value.is_integer()))
    return isinstance(value, _TYPES[kind])


def _typed(value: object) -> object:
    """Return a JSON value with its booleans marked: for Python they are 1 and 0."""
    marked = [_typed(one) for one in _list(value)] or {name: _typed(one) for name, one in as_mapping(value).items()}
    return ("boolean", value) if isinstance(value, bool) else marked or value


def _resolve(reference: object, root: Mapping[str, Any]) -> object:
    """Follow a reference, for example ``#/$defs/Mode``; one out of the schema constrains nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    found: object = root
    for part in reference.split("/")[1:]:
        found = as_mapping(found).get(unquote(part).replace("~1", "/").replace("~0", "~"), True)
    return found


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
