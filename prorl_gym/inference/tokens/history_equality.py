"""Decides which histories are the same. docs/tokens.md has the rules as a table.

A conversation is compared in two parts. Its words (roles, texts, calls) are one digest, which agents must send back
unchanged. Its thoughts are kept turn by turn, because agents may leave them out but not replace them.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from math import isfinite
from typing import Any, NoReturn, cast

from prorl_gym.inference.json_depth import is_too_deep
from prorl_gym.inference.toolcalls.turn_parsing import split_thinking
from prorl_gym.records import Message, ToolCall

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True, eq=False)
class ThinkingChain:
    """What the assistant thought in each turn of a conversation, as a list that branches can share."""

    digest: bytes
    """Of the last turn; empty where it has no thoughts."""
    previous: "ThinkingChain | None" = None
    """Of the turns before it."""


class HistoryDigests:
    """Digests of conversations with the same tools.

    Args:
        tools: function schemas; other ones make another conversation.
        stable_text: returns what of a text must stay the same, for messages that the assistant did not write.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]], stable_text: Callable[[str, str], str] | None = None
    ) -> None:
        self.of_tools = _digest(list(tools))
        """The digest of a conversation without messages."""
        self._defaults = {name: _defaults(schema) for name, schema in map(_function_schema, tools)}
        self._stable_text = stable_text

    def of_history(self, messages: Sequence[Message], known: Sequence[bytes] = ()) -> tuple[bytes, ...]:
        """Return one digest per message, of the words of the conversation up to and with it.

        Args:
            messages: the conversation.
            known: the digests of its first messages, where they were made before.
        """
        last = known[-1] if known else self.of_tools
        return (*known, *tuple(accumulate(messages[len(known) :], self.extend, initial=last))[1:])

    def extend(self, digest: bytes, message: Message) -> bytes:
        """Return the digest of a conversation with one more message."""
        return _digest(self._comparable_fields(message), digest)

    def is_same_turn(self, sampled: Message, shown: Message) -> bool:
        """Whether a turn is shown as it was sampled, with or without its thoughts."""
        return self.extend(b"", sampled) == self.extend(b"", shown) and thinking_matches(
            thinking_chain([sampled]), thinking_chain([shown])
        )

    def _comparable_fields(self, message: Message) -> list[Any]:
        text = message.content
        if message.role == "assistant":
            text = split_thinking(text)[1].strip()
        elif self._stable_text is not None:
            text = self._stable_text(message.role, text)
        return [message.role, text, *([call.name, *self._comparable_arguments(call)] for call in message.tool_calls)]

    def _comparable_arguments(self, call: ToolCall) -> tuple[str, Any]:
        """Return arguments as a value, without those that have their schema's default."""
        kind, value = read_arguments(call.arguments)
        defaults = self._defaults.get(call.name)
        if not defaults or not isinstance(value, dict):
            return kind, value
        members = cast("dict[str, Any]", value)
        return kind, {key: each for key, each in members.items() if key not in defaults or _json(each) != defaults[key]}


def thinking_chain(messages: Iterable[Message], before: ThinkingChain | None = None) -> ThinkingChain | None:
    """Return the thoughts of a conversation, after those of what came before it."""
    for message in messages:
        if message.role == "assistant":
            before = ThinkingChain(_thinking_digest(message), before)
    return before


def thinking_matches(thinking: ThinkingChain | None, shown: ThinkingChain | None) -> bool:
    """Whether a conversation with the same words shows these thoughts, or leaves some of them out."""
    while shown is not None:
        if shown.digest and (thinking is None or shown.digest != thinking.digest):
            return False
        shown, thinking = shown.previous, thinking and thinking.previous
    return True


def _thinking_digest(message: Message) -> bytes:
    thoughts = split_thinking(message.content)[0]
    return _digest(thoughts) if thoughts else b""


def read_arguments(text: str) -> tuple[str, Any]:
    """Return the value that arguments spell, or the text itself where it is no JSON or no exact value."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return "text", text
    return ("text", text) if is_too_deep(value) else ("value", value)


def _finite(text: str) -> float:
    value = float(text)
    return value if isfinite(value) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


def _digest(value: Any, before: bytes = b"") -> bytes:
    """Digest a value as JSON text, in which ``1``, ``1.0`` and ``true`` differ; for Python's ``==`` they are equal."""
    return blake2b(before + _json(value).encode(), digest_size=16).digest()


def _json(value: Any) -> str:
    return _ENCODER.encode(value)


def _function_schema(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function: Any = tool.get("function")
    if not isinstance(function, Mapping):
        return "", {}
    schema = cast("Mapping[str, Any]", function)
    return str(schema.get("name")), schema


def _defaults(function: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments that have a default in a function's schema, with its JSON."""
    properties: Any = (_as_mapping(function.get("parameters"))).get("properties")
    declared = {key: _as_mapping(schema) for key, schema in _as_mapping(properties).items()}
    return {key: _json(schema["default"]) for key, schema in declared.items() if "default" in schema}


def _as_mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
