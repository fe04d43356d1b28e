"""Reading what agents send: the parts of a message that the wires share.

What cannot be understood is refused with a ``ConfigError`` (HTTP 400) that names it: a message that is silently left
out would make another prompt.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from prorl_gym.errors import ConfigError
from prorl_gym.inference.tokens.prompt_builder import TokenFields
from prorl_gym.records import Message, ToolCall
from prorl_gym.thoughts import THINK_CLOSE, THINK_OPEN

Item = Mapping[str, Any]

TEXT_FIX = "This server takes text messages, function calls and their outputs, and reasoning items."
TOKEN_FIELDS = frozenset({"prompt_token_ids", "generation_token_ids", "generation_log_probs"})

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")


def as_list(value: object) -> list[Any] | None:
    return cast("list[Any]", value) if isinstance(value, list) else None


def as_parts(value: object) -> list[Any]:
    """Return a list as it is, and any other value as the only part."""
    parts = as_list(value)
    return [value] if parts is None else parts


def as_item(value: object) -> Item | None:
    return cast("Item", value) if isinstance(value, Mapping) else None


def normalize_list(body: Mapping[str, Any], key: str, normalize: Callable[[object, str], object]) -> dict[str, Any]:
    """Return a body whose list under ``key`` is normalized, each entry with its place for errors."""
    entries = as_list(body.get(key))
    if entries is None:
        return dict(body)
    return {**body, key: [normalize(entry, f"{key}[{place}]") for place, entry in enumerate(entries)]}


def read_message(item: Item, where: str) -> Message:
    """Read role and text of a message. Raises ``ConfigError``: an unknown role, or a part that is not text."""
    role = read_role(str(item.get("role", "user")), where)
    return Message.model_validate({"role": role, "content": read_text(item.get("content"), where)})


def read_role(role: str, where: str) -> str:
    """Return the name that templates have for a role. Raises ``ConfigError`` for an unknown one."""
    if role not in _ROLES:
        raise ConfigError(f"{where}: there is no role '{role[:40]}'.", f"Roles are {', '.join(_ROLES)}.")
    return _ROLES[role]


def read_text(content: object, where: str) -> str:
    """Return the text of a content field: a string, or parts of text. Raises ``ConfigError`` for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for each in as_parts(content):
        part = as_item(each)
        kind = type(each).__name__ if part is None else part.get("type", "text")
        text = None if part is None else part.get("refusal" if kind == "refusal" else "text")
        if part is None or kind not in _TEXT_PARTS or not (text is None or isinstance(text, str)):
            raise ConfigError(f"{where}: parts of type '{kind}' are not supported, only text.", TEXT_FIX)
        texts.append(text or "")
    return "".join(texts)


def read_tool_call(item: Item, id_key: str, where: str) -> ToolCall:
    """Read a function call whose id is under ``id_key``; arguments may be JSON, its text, or missing.

    Raises ``ConfigError`` without a name.
    """
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str):
        raise ConfigError(f"{where}: a call needs a name.", TEXT_FIX)
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=str(item.get(id_key) or ""), name=name, arguments=arguments if arguments.strip() else "{}")


def read_token_fields(item: Item, where: str) -> TokenFields | None:
    """Read the token ids that came back with a turn, if any. Raises ``ConfigError`` for what are no ids."""
    generation = item.get("generation_token_ids")
    if not generation:
        return None
    prompt = item.get("prompt_token_ids")
    if not prompt or not all(type(token) is int and token >= 0 for token in (*prompt, *generation)):
        raise ConfigError(f"{where}: its token fields are no token ids.", "Send them back as they came.")
    return TokenFields(list(prompt), list(generation))


def wrap_thinking(text: str) -> str:
    """Return thoughts as a turn begins with them."""
    return f"{THINK_OPEN}\n{text.strip()}\n{THINK_CLOSE}\n\n"
