"""Reading the arguments of a tool call: hostile JSON text in, checked values or a complaint for the model out.

Only the part of JSON schema that tools use is understood: an object with typed, possibly required properties. A
complaint is worded for the model, since it becomes the observation.
"""

import json
from collections.abc import Mapping
from typing import Any

from prorl_gym.agents.protocol import ToolSpec

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class BadArguments(Exception):
    """The arguments of a call do not fit the tool. The text is shown to the model."""


def parse_arguments(spec: ToolSpec, text: str) -> Mapping[str, Any]:
    """Parse the arguments of a call and check them against the tool's schema.

    Args:
        spec: the tool that is called.
        text: JSON text as the model wrote it.

    Raises:
        BadArguments: not a JSON object, a required argument is missing, one is unknown or has the wrong type.
    """
    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise _error(spec, "they are not valid JSON") from None
    if not isinstance(values, dict):
        raise _error(spec, "they are not a JSON object")
    return check_arguments(spec, values)  # pyright: ignore[reportUnknownArgumentType]


def check_arguments(spec: ToolSpec, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the arguments of a call against the tool's schema, and return them.

    Raises:
        BadArguments: a required argument is missing, one is unknown or has the wrong type.
    """
    properties: Mapping[str, Mapping[str, Any]] = spec.parameters.get("properties", {})
    for name in spec.parameters.get("required", ()):
        if name not in arguments:
            raise _error(spec, f"'{name}' is missing")
    for name, value in arguments.items():
        if name not in properties:
            raise _error(spec, f"'{_short(name)}' is not one of them")
        _check_value(spec, name, value, properties[name])
    return arguments


def _check_value(spec: ToolSpec, name: str, value: Any, schema: Mapping[str, Any]) -> None:
    wanted: str | list[str] | None = schema.get("type")
    if wanted is not None:
        kinds = [wanted] if isinstance(wanted, str) else wanted
        if not any(_has_type(kind, value) for kind in kinds):
            raise _error(spec, f"'{name}' must be of type {' or '.join(kinds)}")
    if "enum" in schema and value not in schema["enum"]:
        raise _error(spec, f"'{name}' must be one of {', '.join(map(repr, schema['enum']))}")
    if isinstance(value, str) and not _encodable(value):
        # JSON can spell lone surrogates; no file, pipe or record can hold them.
        raise _error(spec, f"'{name}' holds characters that are not valid Unicode text")


def _has_type(kind: str, value: Any) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _error(spec: ToolSpec, why: str) -> BadArguments:
    return BadArguments(f"The arguments of '{spec.name}' were not accepted: {why}. Expected: {tool_signature(spec)}.")


def tool_signature(spec: ToolSpec) -> str:
    """Return a tool's arguments in one line, for example ``bash(command: string, is_input?: boolean)``."""
    required = spec.parameters.get("required", ())
    parts = [
        f"{name}{'' if name in required else '?'}: {_type_name(schema)}"
        for name, schema in spec.parameters.get("properties", {}).items()
    ]
    return f"{spec.name}({', '.join(parts)})"


def _type_name(schema: Mapping[str, Any]) -> str:
    kind: str | list[str] = schema.get("type", "any")
    return kind if isinstance(kind, str) else " or ".join(kind)


def _short(text: str) -> str:
    clean = text.encode(errors="replace").decode()
    return clean if len(clean) <= 40 else clean[:40] + "..."
