"""The ids of recent turns, found by what was said: for agents that do not send the token fields back.

Many harnesses keep only text (everything behind an OpenAI client does). Their next call shows the conversation and no
ids; rendering it again would give other ids than were sampled. So the server remembers, by a digest of the
conversation, which ids stand for it. Token fields, where they come back, are the truth, and this only tells whether
the history around them is unchanged.

Bounded in tokens, since a turn can be a hundred or a hundred thousand; the conversation that was not continued for
the longest time is forgotten first, because nobody tells this server when one is over.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from prorl_gym.gym_root.responses_api_models.prorl_model.equality import Thoughts

MOST_TOKENS = 32 << 20
"""128 MiB of ids: 1,000 conversations of 32 k tokens at once."""

MOST_TURNS = 1 << 17
"""Turns kept, however short: each costs about a kilobyte beside its ids."""

MOST_TWINS = 256
"""Conversations with the same words that are told apart: replicas of one prompt, say."""


@dataclass(frozen=True, slots=True)
class Known:
    """A turn of which the ids are known."""

    session_id: str | None
    """Whose it is; ``None``: that of whoever calls."""
    ids: Sequence[int]
    """The prompt and what was sampled on it."""
    start: int
    """Where in ``ids`` the sampled ones begin."""
    thoughts: Thoughts | None = None
    """Of the conversation with this turn at its end."""


class _Mark(NamedTuple):
    """Where a turn lies in the ids of its conversation."""

    start: int
    end: int
    ids: bytes
    """Digest of the ids up to ``end``."""
    thoughts: Thoughts | None


@dataclass(slots=True, eq=False)
class _Trail:
    """One conversation: ids that only grow, and where in them each turn lies."""

    session_id: str
    ids: "array[int]"
    marks: dict[bytes, _Mark] = field(default_factory=dict)


class TurnMemory:
    """Remembers turns.

    Args:
        most_tokens: ids kept, over all conversations.
        most_turns: turns kept.
    """

    def __init__(self, most_tokens: int = MOST_TOKENS, most_turns: int = MOST_TURNS) -> None:
        self._most_tokens = most_tokens
        self._most_turns = most_turns
        self._turns = 0
        self._trails: OrderedDict[int, _Trail] = OrderedDict()
        self._by_digest: dict[bytes, dict[int, _Trail]] = {}
        self._ids: Counter[bytes] = Counter()
        """Digests of the ids of all turns."""
        self.tokens = 0
        """Ids kept now."""

    def __len__(self) -> int:
        return len(self._trails)

    def remember(
        self,
        digest: bytes,
        session_id: str,
        prompt: Sequence[int],
        generation: Sequence[int],
        parent: bytes | None,
        thoughts: Thoughts | None = None,
    ) -> None:
        """Keep a turn.

        Args:
            digest: of the conversation with the turn at its end.
            session_id: whose it is.
            prompt: ids that were sent.
            generation: ids that were sampled.
            parent: digest of the turn before it that it was built on.
            thoughts: of the conversation with the turn at its end.
        """
        trail = self._parent(parent, session_id, prompt)
        if trail is None:
            trail = _Trail(session_id, array("i"))
        known = len(trail.ids)
        trail.ids.extend(array("i", prompt[known:]))
        start = len(trail.ids)
        trail.ids.extend(array("i", generation))
        self._turns += digest not in trail.marks
        mark = _Mark(start, len(trail.ids), _digest(trail.ids), thoughts)
        trail.marks[digest] = mark
        self._ids[mark.ids] += 1
        self.tokens += len(trail.ids) - known
        self._trails[id(trail)] = trail
        self._trails.move_to_end(id(trail))
        twins = self._by_digest.setdefault(digest, {})
        twins[id(trail)] = trail
        if len(twins) > MOST_TWINS:
            self._forget(next(iter(twins.values())))
        while (self.tokens > self._most_tokens or self._turns > self._most_turns) and self._trails:
            self._forget(next(iter(self._trails.values())))

    def recall(self, digest: bytes, session_id: str) -> Iterator[Known]:
        """Yield every turn with these words: the session's own first, then the others, each time the newest first."""
        newest_first = reversed(list(self._by_digest.get(digest, {}).values()))
        for trail in sorted(newest_first, key=lambda trail: trail.session_id != session_id):
            mark = trail.marks[digest]
            self._trails.move_to_end(id(trail))
            yield Known(trail.session_id, trail.ids[: mark.end].tolist(), mark.start, mark.thoughts)

    def holds(self, ids: Sequence[int]) -> bool:
        """Whether a turn that is remembered ends in exactly these ids, whatever was said around it."""
        return _digest(array("i", ids)) in self._ids

    def _parent(self, digest: bytes | None, session_id: str, prompt: Sequence[int]) -> _Trail | None:
        """Return the conversation that goes on here, when nothing else has gone on from it already."""
        for trail in self._by_digest.get(digest, {}).values() if digest else ():
            if trail.session_id == session_id and trail.marks[digest].end == len(trail.ids):
                if array("i", prompt[: len(trail.ids)]) == trail.ids:
                    return trail
        return None

    def _forget(self, trail: _Trail) -> None:
        del self._trails[id(trail)]
        self.tokens -= len(trail.ids)
        self._turns -= len(trail.marks)
        for digest, mark in trail.marks.items():
            twins = self._by_digest[digest]
            del twins[id(trail)]
            if not twins:
                del self._by_digest[digest]
            self._ids[mark.ids] -= 1
            if not self._ids[mark.ids]:
                del self._ids[mark.ids]


def _digest(ids: "array[int]") -> bytes:
    return blake2b(ids, digest_size=16).digest()
