"""Which histories are the same: the only place that decides it. docs/tokens.md has it as a table.

A conversation is compared in two parts. Its words (roles, texts, calls) are one digest, which agents must send back
unchanged. Its thoughts stand beside it, turn by turn, because agents may leave them out but not replace them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from math import isfinite
from typing import Any, NoReturn

from prorl_gym.inference.toolcalls.found import nests_too_deeply
from prorl_gym.inference.toolcalls.turn import THINK, UNTHINK, end_of_thoughts
from prorl_gym.records import Message


@dataclass(frozen=True, slots=True, eq=False)
class Thoughts:
    """What the assistant thought in each turn of a conversation, as a list that branches can share."""

    digest: bytes
    """Of the last turn; empty where it has no thoughts."""
    before: "Thoughts | None" = None
    """Of the turns before it."""


def digests(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """Return one digest per message, of the words of the conversation up to and with it."""
    return tuple(accumulate(messages, extended, initial=_digest(list(tools))))[1:]


def extended(digest: bytes, message: Message) -> bytes:
    """Return the digest of a conversation with one more message."""
    return _digest(_words(message), digest)


def thoughts_of(messages: Iterable[Message], before: Thoughts | None = None) -> Thoughts | None:
    """Return the thoughts of a conversation, after those of what came before it."""
    for message in messages:
        if message.role == "assistant":
            before = Thoughts(_thought(message), before)
    return before


def thoughts_agree(thoughts: Thoughts | None, shown: Sequence[Message]) -> bool:
    """Whether a conversation with the same words shows these thoughts, or leaves some of them out."""
    for message in reversed(shown):
        if message.role == "assistant":
            digest = _thought(message)
            if digest and (thoughts is None or digest != thoughts.digest):
                return False
            thoughts = thoughts and thoughts.before
    return True


def same_turn(sampled: Message, shown: Message) -> bool:
    """Whether a turn is shown as it was sampled, with or without its thoughts."""
    return extended(b"", sampled) == extended(b"", shown) and thoughts_agree(thoughts_of([sampled]), [shown])


def split_thoughts(text: str) -> tuple[str, str]:
    """Split what the assistant wrote into thoughts, without their tags, and the text after them."""
    end = end_of_thoughts(text)
    return text[:end].strip().removeprefix(THINK).removesuffix(UNTHINK).strip(), text[end:]


def _words(message: Message) -> list[Any]:
    text = message.content
    if message.role == "assistant":
        text = split_thoughts(text)[1].strip()
    return [message.role, text, *([call.name, *_arguments(call.arguments)] for call in message.tool_calls)]


def _thought(message: Message) -> bytes:
    thoughts = split_thoughts(message.content)[0]
    return _digest(thoughts) if thoughts else b""


def _arguments(text: str) -> tuple[str, Any]:
    """Return arguments as the value that they spell, or as text where they are no JSON or spell no exact value."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return "text", text
    return ("text", text) if nests_too_deeply(value) else ("value", value)


def _finite(text: str) -> float:
    value = float(text)
    return value if isfinite(value) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


def _digest(value: Any, before: bytes = b"") -> bytes:
    """Digest a value as JSON text, which tells ``1`` from ``1.0`` and ``true``; Python's ``==`` does not."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return blake2b(before + text.encode(), digest_size=16).digest()
