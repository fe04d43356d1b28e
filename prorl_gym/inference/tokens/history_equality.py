"""Decides which histories are the same. docs/tokens.md has the rules as a table.

A conversation is compared in two parts. Its words (roles, texts, calls) are one digest, which agents must send back
unchanged. Its thoughts are kept turn by turn, because agents may leave them out but not replace them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from math import isfinite
from typing import Any, NoReturn

from prorl_gym.inference.json_depth import is_too_deep
from prorl_gym.inference.toolcalls.turn_parsing import split_thinking
from prorl_gym.records import Message


@dataclass(frozen=True, slots=True, eq=False)
class ThinkingChain:
    """What the assistant thought in each turn of a conversation, as a list that branches can share."""

    digest: bytes
    """Of the last turn; empty where it has no thoughts."""
    previous: "ThinkingChain | None" = None
    """Of the turns before it."""


def history_digests(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """Return one digest per message, of the words of the conversation up to and with it."""
    return tuple(accumulate(messages, extend_digest, initial=_digest(list(tools))))[1:]


def extend_digest(digest: bytes, message: Message) -> bytes:
    """Return the digest of a conversation with one more message."""
    return _digest(_comparable_fields(message), digest)


def thinking_chain(messages: Iterable[Message], before: ThinkingChain | None = None) -> ThinkingChain | None:
    """Return the thoughts of a conversation, after those of what came before it."""
    for message in messages:
        if message.role == "assistant":
            before = ThinkingChain(_thinking_digest(message), before)
    return before


def thinking_matches(thinking: ThinkingChain | None, shown: Sequence[Message]) -> bool:
    """Whether a conversation with the same words shows these thoughts, or leaves some of them out."""
    for message in reversed(shown):
        if message.role == "assistant":
            digest = _thinking_digest(message)
            if digest and (thinking is None or digest != thinking.digest):
                return False
            thinking = thinking and thinking.previous
    return True


def is_same_turn(sampled: Message, shown: Message) -> bool:
    """Whether a turn is shown as it was sampled, with or without its thoughts."""
    return extend_digest(b"", sampled) == extend_digest(b"", shown) and thinking_matches(
        thinking_chain([sampled]), [shown]
    )


def _comparable_fields(message: Message) -> list[Any]:
    text = message.content
    if message.role == "assistant":
        text = split_thinking(text)[1].strip()
    return [message.role, text, *([call.name, *_arguments(call.arguments)] for call in message.tool_calls)]


def _thinking_digest(message: Message) -> bytes:
    thoughts = split_thinking(message.content)[0]
    return _digest(thoughts) if thoughts else b""


def _arguments(text: str) -> tuple[str, Any]:
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
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return blake2b(before + text.encode(), digest_size=16).digest()
