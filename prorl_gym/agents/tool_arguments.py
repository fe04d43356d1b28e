"""Reading the arguments of a tool call: hostile JSON text in, checked values or a complaint for the model out.

Only the part of JSON schema that tools use is understood: an object with typed, possibly required properties; see
``argument_schema``. A complaint is worded for the model, since it becomes the observation.
"""

import json
from collections.abc import Mapping
from typing import Any

from prorl_gym.agents.protocol import ToolSpec
from prorl_gym.inference.strict_json import STRICT_JSON, is_too_deep
from prorl_gym.inference.toolcalls.argument_schema import accepts


class BadArguments(Exception):
    """The arguments of a call do not fit the tool. The text is shown to the model."""


def parse_arguments(spec: ToolSpec, text: str) -> Mapping[str, Any]:
    """Parse the JSON text of a call's arguments as the model wrote it. Raises as ``check_arguments``."""
    try:
        values: Any = STRICT_JSON.decode(text)
    except (ValueError, RecursionError):
        raise _error(spec, "they are not valid JSON") from None
    if not isinstance(values, dict) or is_too_deep(values):
        raise _error(spec, "they are not a JSON object, or nested too deep")
    return check_arguments(spec, values)  # pyright: ignore[reportUnknownArgumentType]


def check_arguments(spec: ToolSpec, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call after a check against the tool's schema. Raises ``BadArguments``."""
    properties: Mapping[str, Mapping[str, Any]] = spec.parameters.get("properties", {})
    for name in spec.parameters.get("required", ()):
        if name not in arguments:
            raise _error(spec, f"'{name}' is missing")
    for name, value in arguments.items():
        if name not in properties:
            shown = name.encode(errors="replace").decode()
            raise _error(spec, f"'{shown[:40]}{'...' if len(shown) > 40 else ''}' is not one of them")
        if why := _value_problem(value, properties[name], spec.parameters):
            raise _error(spec, f"'{name}' {why}")
    return {name: _integer(value, properties[name], spec.parameters) for name, value in arguments.items()}


def _integer(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return ``3.0`` as 3 where the schema takes integers only."""
    is_integer = isinstance(value, float) and value.is_integer() and not accepts(0.5, schema, root)
    return int(value) if is_integer else value


def _value_problem(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    if "type" in schema and not accepts(value, {"type": schema["type"]}, root):
        return f"must be of type {_spelled_type(schema)}"
    if "enum" in schema and not accepts(value, {"enum": schema["enum"]}, root):
        return f"must be one of {', '.join(map(repr, schema['enum']))}"
    if not accepts(value, schema, root):
        return f"must fit {json.dumps(schema)[:200]}"
    if isinstance(value, str) and value.encode(errors="replace").decode() != value:
        # JSON can spell lone surrogates; no file, pipe or record can hold them.
        return "holds characters that are not valid Unicode text"
    return ""


def _error(spec: ToolSpec, why: str) -> BadArguments:
    return BadArguments(f"The arguments of '{spec.name}' were not accepted: {why}. Expected: {tool_signature(spec)}.")


def tool_signature(spec: ToolSpec) -> str:
    """Return a tool's arguments in one line, for example ``bash(command: string, is_input?: boolean)``."""
    required = spec.parameters.get("required", ())
    parts: list[str] = []
    for name, schema in spec.parameters.get("properties", {}).items():
        parts.append(f"{name}{'' if name in required else '?'}: {_spelled_type(schema)}")
    return f"{spec.name}({', '.join(parts)})"


def _spelled_type(schema: Mapping[str, Any]) -> str:
    kind: str | list[str] = schema.get("type", "any")
    return kind if isinstance(kind, str) else " or ".join(kind)
