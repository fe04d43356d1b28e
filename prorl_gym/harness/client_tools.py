"""Tools that agent programs offer, as the functions that the model is shown, and what their calls are named.

Functions, custom tools and namespaces can be shown exactly. Tools that only a provider can run are left out and
counted. Any other is refused: the program runs it, and without it the policy would be another agent.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prorl_gym.errors import ConfigError
from prorl_gym.gateway.history import Item, as_item, as_list
from prorl_gym.gateway.model_call import OfferedTool
from prorl_gym.inference.tokens.prompt_builder import function_schema

HOSTED = (
    *("web_search", "web_fetch", "file_search", "code_interpreter", "code_execution", "image_generation"),
    *("mcp", "tool_search_tool"),
)
"""How types of tools begin, and of their items, that only a provider can run."""


def offer_tools(
    params: Mapping[str, Any], omitted: Counter[str]
) -> tuple[list[dict[str, Any]], dict[str, OfferedTool]]:
    """Return the functions that the model is shown, and by their names the tools that a program calls otherwise.

    Raises ``ConfigError`` for tools that cannot be shown, or of which two have one name.
    """
    functions: list[dict[str, Any]] = []
    offered: dict[str, OfferedTool] = {}
    for tool in read_tools(params):
        kind = str(tool.get("type", "function"))
        if kind.startswith(HOSTED):
            omitted[f"tool {str(tool.get('name') or kind)[:80]}"] += 1
            continue
        one, shown = _offer_tool(tool, kind)
        if offered.setdefault(shown["name"], one) != one:
            raise ConfigError(f"tools: two are called '{shown['name'][:80]}'.", "Give them names of their own.")
        functions.append(function_schema(shown))
    return functions, {name: one for name, one in offered.items() if one != OfferedTool(name)}


def open_namespaces(params: Mapping[str, Any]) -> Iterator[Item]:
    """Return the tools of a call, those of a namespace in its place, its description with the first of them."""
    for tool in read_tools(params):
        if tool.get("type") != "namespace":
            yield tool
            continue
        about = tool.get("description")
        for inner in read_tools(tool):
            texts = [str(text) for text in (about, inner.get("description")) if text]
            yield {**inner, "namespace": tool.get("name"), "description": "\n".join(texts)}
            about = None


def read_tools(params: Mapping[str, Any]) -> list[Item]:
    """Return the tools of a call. Raises ``ConfigError`` if they are no list of objects."""
    given = params.get("tools")
    tools = as_list([] if given is None else given)
    if tools is None or not all(isinstance(tool, Mapping) for tool in tools):
        raise ConfigError("tools: they are no list of objects.", "Send objects with 'type' and 'name'.")
    return tools


def _offer_tool(tool: Item, kind: str) -> tuple[OfferedTool, dict[str, Any]]:
    """Return what a program calls a tool, and the function that the model is shown. Raises ``ConfigError``."""
    fields = as_item(tool.get(kind)) or tool
    name, namespace, description = fields.get("name"), str(tool.get("namespace") or ""), fields.get("description")
    given = fields.get("parameters")
    parameters = as_item(dict[str, Any]() if given is None else given)
    if kind not in ("function", "custom") or not isinstance(name, str) or not name or parameters is None:
        raise ConfigError(
            f"tools: {str(name)[:80]!r} of type '{kind[:80]}' cannot be shown to the model as a function.",
            "Make the program offer it as a function, or leave it out.",
        )
    texts = [str(description)] if description else []
    if kind == "custom":
        form = as_item(fields.get("format")) or {}
        grammar = as_item(form.get("grammar")) or form
        if definition := grammar.get("definition"):
            texts.append(f"The input has this form ({grammar.get('syntax')}):\n{definition}")
        parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    shown = {"name": shown_name(namespace, name), "description": "\n".join(texts), "parameters": parameters}
    return OfferedTool(name, namespace, kind == "custom"), shown


def shown_name(namespace: object, name: object) -> object:
    """Return the name under which the model knows a function of a namespace."""
    return f"{namespace}{'' if str(namespace).endswith('__') else '__'}{name}" if namespace else name
