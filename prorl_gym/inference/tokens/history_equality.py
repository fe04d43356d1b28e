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
from typing import Any, cast

from prorl_gym.inference.strict_json import as_mapping, is_too_deep, refuse_constant
from prorl_gym.records import Message, ToolCall
from prorl_gym.thoughts import split_thinking

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True, eq=False)
class ThinkingChain:
    """The assistant's thoughts in each turn of a conversation, as a list that branches can share."""

    digest: bytes
    """Digest of the last turn's thoughts; empty where it has none."""
    previous: "ThinkingChain | None" = None
    """Thoughts of the turns before it."""


class HistoryDigests:
    """Digests of conversations with the same tools: other function schemas make another conversation.

    ``stable_text`` returns what must stay the same of a text that the assistant did not write, given its role.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]], stable_text: Callable[[str, str], str] | None = None
    ) -> None:
        self.of_tools = _digest(list(tools))
        """Digest of a conversation without messages."""
        self._defaults = dict(map(_defaults, tools))
        self._stable_text = stable_text

    def of_history(self, messages: Sequence[Message], known: Sequence[bytes] = ()) -> tuple[bytes, ...]:
        """Return one digest per message, of the words up to and with it; ``known`` are those of the first messages."""
        last = known[-1] if known else self.of_tools
        return (*known, *tuple(accumulate(messages[len(known) :], self.extend, initial=last))[1:])

    def extend(self, digest: bytes, message: Message) -> bytes:
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
        kept = (key for key, each in members.items() if key not in defaults or _ENCODER.encode(each) != defaults[key])
        return kind, {key: members[key] for key in kept}


def thinking_chain(messages: Iterable[Message], before: ThinkingChain | None = None) -> ThinkingChain | None:
    """Return the thoughts of a conversation, after those of what came before it."""
    for message in messages:
        if message.role == "assistant":
            thoughts = split_thinking(message.content)[0]
            before = ThinkingChain(_digest(thoughts) if thoughts else b"", before)
    return before


def thinking_matches(thinking: ThinkingChain | None, shown: ThinkingChain | None) -> bool:
    """Whether a conversation with the same words shows these thoughts, or leaves some of them out."""
    while shown is not None:
        if shown.digest and (thinking is None or shown.digest != thinking.digest):
            return False
        shown, thinking = shown.previous, thinking and thinking.previous
    return True


def read_arguments(text: str) -> tuple[str, Any]:
    """Return the value that arguments spell, or the text itself where it is no JSON or no exact value."""

    def read_finite(number: str) -> float:
        value = float(number)
        return value if isfinite(value) else refuse_constant(number)

    try:
        value = json.loads(text, parse_float=read_finite, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return "text", text
    return ("text", text) if is_too_deep(value) else ("value", value)


def _digest(value: Any, before: bytes = b"") -> bytes:
    """Digest a value as JSON text, in which ``1``, ``1.0`` and ``true`` differ; for Python's ``==`` they are equal."""
    return blake2b(before + _ENCODER.encode(value).encode(), digest_size=16).digest()


def _defaults(tool: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the name of a function, and its arguments that have a default in the schema, with its JSON."""
    function = as_mapping(tool.get("function"))
    properties = as_mapping(as_mapping(function.get("parameters")).get("properties"))
    declared = {key: as_mapping(schema) for key, schema in properties.items()}
    defaults = {key: _ENCODER.encode(schema["default"]) for key, schema in declared.items() if "default" in schema}
    return str(function.get("name")), defaults
