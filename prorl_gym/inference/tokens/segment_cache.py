"""A bounded cache of the token ids of recent conversations, found by what was said in them.

A segment is a list of ids that only grows, and holds every turn sampled in it. A turn is found by a digest of the whole
history up to it (``history_equality``). A turn that extends the last one of a segment is appended to that segment;
where two calls continue the same turn, the second begins a segment of its own, with a copy of the ids that the two
share. The least recently used segment is evicted first.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from prorl_gym.inference.tokens.history_equality import ThinkingChain

MAX_TOKENS = 32 << 20
"""128 MiB of ids: 1,000 conversations of 32 k tokens at once."""

MAX_TURNS = 1 << 17
"""Turns kept, however short: each costs about a kilobyte on top of its ids."""

MAX_DUPLICATES = 256
"""Segments kept of conversations with the same words, for example replicas of one prompt."""


@dataclass(frozen=True, slots=True)
class KnownTurn:
    session_id: str | None
    """``None``: that of the caller."""
    ids: Sequence[int]
    """The prompt and what was sampled on it."""
    start: int
    """Where in ``ids`` the sampled ones begin."""
    thinking: ThinkingChain | None = None
    """Thoughts of the conversation, this turn included."""


class _TurnSpan(NamedTuple):
    """A turn's place in the ids of its segment."""

    start: int
    end: int
    ids_digest: bytes
    """Digest of the ids up to ``end``."""
    thinking: ThinkingChain | None


@dataclass(slots=True, eq=False)
class _Segment:
    """Ids that only grow, and the turns in them by the digest of the history up to each."""

    session_id: str
    ids: "array[int]"
    turns: dict[bytes, _TurnSpan] = field(default_factory=dict[bytes, _TurnSpan])


class SegmentCache:
    """The segments of recent conversations, and the turns in them by digest.

    It serves harnesses that keep only text (everything behind an OpenAI client does): their next call shows the
    conversation and no ids. Bounded in tokens, since a turn can be a hundred or a hundred thousand, and evicted by age
    of use, since callers do not report the end of a conversation.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS, max_turns: int = MAX_TURNS) -> None:
        self._max_tokens = max_tokens
        self._max_turns = max_turns
        self._turn_count = 0
        self._segments: OrderedDict[int, _Segment] = OrderedDict()
        self._by_digest: dict[bytes, dict[int, _Segment]] = {}
        self._id_digests: Counter[bytes] = Counter()
        """Digests of the ids of all turns."""
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._segments)

    def add_turn(
        self,
        digest: bytes,
        session_id: str,
        prompt: Sequence[int],
        generation: Sequence[int],
        parent: bytes | None,
        thinking: ThinkingChain | None = None,
    ) -> None:
        """Add a turn to the segment of the turn that it extends, or as a segment of its own.

        ``digest`` is that of the history with the turn at its end, ``parent`` that of the history up to the turn that
        the prompt extends. Turns of other sessions are never extended.
        """
        segment = self._find_open_segment(parent, session_id, prompt)
        if segment is None:
            segment = _Segment(session_id, array("i"))
        known = len(segment.ids)
        segment.ids.extend(array("i", prompt[known:]))
        start = len(segment.ids)
        segment.ids.extend(array("i", generation))
        self._turn_count += digest not in segment.turns
        span = _TurnSpan(start, len(segment.ids), _digest(segment.ids), thinking)
        segment.turns[digest] = span
        self._id_digests[span.ids_digest] += 1
        self.tokens += len(segment.ids) - known
        self._segments[id(segment)] = segment
        self._segments.move_to_end(id(segment))
        duplicates = self._by_digest.setdefault(digest, {})
        duplicates[id(segment)] = segment
        if len(duplicates) > MAX_DUPLICATES:
            self._evict(next(iter(duplicates.values())))
        while (self.tokens > self._max_tokens or self._turn_count > self._max_turns) and self._segments:
            self._evict(next(iter(self._segments.values())))

    def find_turns(self, digest: bytes, session_id: str) -> Iterator[KnownTurn]:
        """Yield every turn with this digest: those of the session first, then the others; of each, the newest first."""
        newest_first = reversed(list(self._by_digest.get(digest, {}).values()))
        for segment in sorted(newest_first, key=lambda segment: segment.session_id != session_id):
            span = segment.turns[digest]
            self._segments.move_to_end(id(segment))
            yield KnownTurn(segment.session_id, segment.ids[: span.end].tolist(), span.start, span.thinking)

    def has_ids(self, ids: Sequence[int]) -> bool:
        """Whether some remembered turn ends in exactly these ids, whatever its history."""
        return _digest(array("i", ids)) in self._id_digests

    def _find_open_segment(self, digest: bytes | None, session_id: str, prompt: Sequence[int]) -> _Segment | None:
        """Return the segment that ends in this turn, unless another turn extends it already."""
        if digest is None:
            return None
        for segment in self._by_digest.get(digest, {}).values():
            if segment.session_id == session_id and segment.turns[digest].end == len(segment.ids):
                if array("i", prompt[: len(segment.ids)]) == segment.ids:
                    return segment
        return None

    def _evict(self, segment: _Segment) -> None:
        del self._segments[id(segment)]
        self.tokens -= len(segment.ids)
        self._turn_count -= len(segment.turns)
        for digest, span in segment.turns.items():
            duplicates = self._by_digest[digest]
            del duplicates[id(segment)]
            if not duplicates:
                del self._by_digest[digest]
            self._id_digests[span.ids_digest] -= 1
            if not self._id_digests[span.ids_digest]:
                del self._id_digests[span.ids_digest]


def _digest(ids: "array[int]") -> bytes:
    return blake2b(ids, digest_size=16).digest()
