"""Bodies whose beginning was read before: a program sends its whole history in each call, and most of it is known.

A body is compared with earlier ones byte by byte, up to the end of the last item of their history: what is equal so
far means the same, so only the rest is parsed, read and digested.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, cast

from prorl_gym.errors import ConfigError
from prorl_gym.gateway.history import as_list
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry

_VALUES, _VALUES_PER_MESSAGE = 100_000, 16
"""New values of one body, or commas in its texts: a value takes up to a hundred times its bytes."""
_KEPT = 16
"""Bodies kept: the last ones of some agents at the same time."""
_KEPT_BYTES = 32 << 20
_MAX_PLACES = 4
"""Lists under the key of the history, nested ones among them, that are tried: each try reads the body."""

_DECODER = json.JSONDecoder()
_PLACEHOLDER = "null"
_BLANKS = " \t\n\r"
_STREAM_FIELDS = frozenset({"stream", "stream_options"})
"""How an answer is sent is no part of the call: a program may repeat one without streaming."""
_CACHE_CONTROL = re.compile(rb',"cache_control":\{"type":"ephemeral"(?:,"(?:ttl|scope)":"[^"\\]*")*\}')
"""Marks that Claude Code moves to the latest messages in each call. They say nothing to the model."""


@dataclass(frozen=True, slots=True, eq=False)
class _KnownBody:
    """The beginning of a body that was read, up to the end of the last item of its history."""

    path: str
    raw: bytes
    head: str
    digest: blake2b
    """Digest of its history."""
    entries: Sequence[HistoryEntry]


@dataclass(frozen=True, slots=True, eq=False)
class ReadBody:
    """A body; of its history, only what is new was parsed."""

    fields: Mapping[str, Any]
    """Under ``key``, the new items only."""
    digest: bytes
    """Equal calls have the same."""
    key: str
    known: Sequence[HistoryEntry]
    keep: Callable[[Sequence[HistoryEntry]], None]
    max_messages: int
    size: int
    """Bytes of it."""

    def read_history(
        self, items: object, read_items: Callable[[list[Any]], Sequence[HistoryEntry]]
    ) -> Sequence[HistoryEntry]:
        """Return the entries of the whole history, given the new items.

        Raises ``ConfigError`` if there are none, or more than a context holds.
        """
        new = as_list(items) or []
        if len(self.known) + len(new) > self.max_messages:
            raise ConfigError(f"{self.key}: more than {self.max_messages}, which no context holds.", "Send fewer.")
        entries = [*self.known, *read_items(new)]
        if not entries:
            raise ConfigError(f"{self.key}: there are none.", "Send at least one.")
        self.keep(entries)
        return entries


class BodyReader:
    """Reads the bodies of one program. ``max_messages``: in one history."""

    def __init__(self, max_messages: int) -> None:
        self._max_messages = max_messages
        self._known: tuple[_KnownBody, ...] = ()

    def count_new(self, path: str, raw: bytes) -> int:
        """Return about how many bytes of a body are new."""
        known = self._find_known(path, raw)
        return len(raw) if known is None else len(raw) - len(known.raw)

    def read(self, path: str, key: str, raw: bytes) -> ReadBody:
        """Read what is new in the history of a body, under ``key``. Several threads may call this at once.

        Raises ``ValueError`` or ``RecursionError`` if it is no JSON object, or has too many values.
        """
        raw = _CACHE_CONTROL.sub(b"", raw)
        known = self._find_known(path, raw)
        begin, digest = (0, blake2b(path.encode(), digest_size=16)) if known is None else (len(known.raw), known.digest)
        most = _VALUES + _VALUES_PER_MESSAGE * self._max_messages
        if raw.count(b",", begin) > most:
            raise ValueError(f"more than {most} values")
        text, digest = raw[begin:].decode("utf-8", "surrogatepass"), digest.copy()
        if known is None:
            places = islice(re.finditer(rf'"{key}"\s*:\s*(?=\[)', text), _MAX_PLACES)
            splits = (_split(text[: place.end()], text, place.end(), key) for place in places)
            found = next((one for one in splits if one is not None), None)  # ``None``: it has no list there
        else:
            found = _split(known.head, f"[{_PLACEHOLDER}{text}", 0, key)
        if found is None:
            fields = _as_object(json.loads(raw))
            digest.update(_encode_without(fields, _STREAM_FIELDS))
            return ReadBody(fields, digest.digest(), key, (), lambda entries: None, self._max_messages, len(raw))
        fields, head, rest = found
        if known is None:
            begin = len(head.encode("utf-8", "surrogatepass"))
        else:
            fields[key] = fields[key][1:]
        end = len(raw) - len(rest.encode("utf-8", "surrogatepass"))
        digest.update(raw[begin:end])
        whole = digest.copy()
        whole.update(_encode_without(fields, _STREAM_FIELDS | {key}))

        def keep(entries: Sequence[HistoryEntry]) -> None:
            # Where a history ends in a turn, what follows may be part of it.
            if not entries[-1].is_assistant and raw[end - 1 : end] == b"}":
                read = _KnownBody(path, raw[:end], head, digest, entries)
                kept = [*(one for one in self._known if one is not known), read][-_KEPT:]
                while len(kept) > 1 and sum(len(one.raw) for one in kept) > _KEPT_BYTES:
                    del kept[0]
                self._known = tuple(kept)

        entries = () if known is None else known.entries
        return ReadBody(fields, whole.digest(), key, entries, keep, self._max_messages, len(raw))

    def _find_known(self, path: str, raw: bytes) -> _KnownBody | None:
        longest_first = sorted(self._known, key=lambda one: len(one.raw), reverse=True)
        return next((one for one in longest_first if one.path == path and raw.startswith(one.raw)), None)


def _split(head: str, text: str, start: int, key: str) -> tuple[dict[str, Any], str, str] | None:
    """Split a body at its history, which begins at ``start`` of ``text`` and has ``head`` before it.

    Return the fields, ``head``, and what follows the last item; ``None``: this list is not the one of that key.
    """
    items, end = cast("tuple[list[Any], int]", _DECODER.raw_decode(text, start))
    fields = _as_object(json.loads(f"{head}{_PLACEHOLDER}{text[end:]}"))
    if fields.get(key, items) is not None:
        return None
    last = len(text[: end - 1].rstrip(_BLANKS))
    return {**fields, key: items}, head, text[last:]


def _as_object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("no object")
    return cast("dict[str, Any]", value)


def _encode_without(fields: Mapping[str, Any], left_out: Set[str]) -> bytes:
    """Return the same bytes for equal fields in any order."""
    return json.dumps({name: fields[name] for name in fields.keys() - left_out}, sort_keys=True).encode()
