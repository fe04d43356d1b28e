"""The content of a trajectory page, and its encoding as compact JSON.

64 k tokens take a few hundred kB and are unpacked when they are viewed. Tokens are indices into a vocabulary of the
page, two bytes each. The mask is a bit per token. Log-probs are kept for sampled tokens only, with four bytes where
that loses nothing and eight where it does. Versions are runs.
"""

import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MAX_TOKENS_PER_CHARACTER = 4
"""Bytes of UTF-8, and so the most tokens that can share one character."""

_MAX_SAFE_INTEGER = 2**53
"""Browsers round larger integers, which are therefore encoded as text."""

TokenDecoder = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens shown."""

Rating = Literal["good", "bad", "none"]
"""Rating of a verdict: a reward above zero, another reward, no reward to learn from."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One model call: ``[start, end)`` of its tokens were sampled."""

    start: int
    end: int
    turn: int
    facts: str = ""
    """Engine, time and the like, as text."""


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment. The lists have one length; a version is read only where the mask is 1."""

    ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    calls: Sequence[ModelCall] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message. ``turn`` is that of the model call that sampled it, or that it answers; -1 in the first prompt."""

    role: str
    text: str
    turn: int
    name: str = ""
    calls: Sequence[tuple[str, str]] = ()
    """Tools that were called, with their arguments."""


GradedKind = Literal["text", "diff", "report"]
"""``diff``: a unified diff; ``report``: a line for each test that begins with its outcome, or any other output."""


@dataclass(frozen=True, slots=True)
class GradedPart:
    """Something of what was graded, as people read it."""

    name: str
    text: str
    kind: GradedKind = "text"


@dataclass(frozen=True, slots=True)
class TrajectoryView:
    """A rollout as people read it."""

    title: str
    verdict: str
    rating: Rating
    outcome: str
    facts: Sequence[tuple[str, str]] = ()
    message: str = ""
    """The failure, if there was one."""
    why: str = ""
    """Why there is no reward above zero."""
    environment: str = ""
    problem: str = ""
    """The name that rollouts of one row share."""
    replica: int = 0
    reward: float | None = None
    graded: Sequence[GradedPart] = ()
    stages: Sequence[tuple[str, float, float]] = ()
    """Name, seconds queued, seconds active. Besides the stages: ``accepted``, the wait before the first of them, and
    ``attempts``, earlier ones."""
    segments: Sequence[SegmentView] = ()
    messages: Sequence[MessageView] = ()


def pack_trajectories(trajectories: Sequence[TrajectoryView], decode: TokenDecoder | None) -> Mapping[str, Any]:
    """Return the data that the page's script unpacks. Without ``decode``, ids are shown."""
    vocabulary = _Vocabulary(decode)
    rollouts = [
        {
            **{name: getattr(trajectory, name) for name in _COPIED_FIELDS},
            "mood": trajectory.rating,
            "graded": [[part.name, part.kind, part.text] for part in trajectory.graded],
            "messages": [asdict(message) for message in trajectory.messages],
            "segments": [_segment(segment, vocabulary) for segment in trajectory.segments],
        }
        for trajectory in trajectories
    ]
    ids = [token if token < _MAX_SAFE_INTEGER else str(token) for token in vocabulary.index]
    return {"ids": ids, "texts": vocabulary.texts, "rollouts": rollouts}


class _Vocabulary:
    """The distinct tokens of a page, in the order of their first use.

    A tokenizer may drop a blank at the beginning of a text, so a token is decoded behind a plain one.
    """

    def __init__(self, decode: TokenDecoder | None) -> None:
        self._decode = decode
        self.index: dict[int, int] = {}
        self._context: tuple[int, str] | None = None
        self.texts: list[str] | None = None if decode is None else []

    def add_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Return the indices of tokens, adding new ones."""
        for token in dict.fromkeys(tokens):
            if token not in self.index:
                self.index[token] = len(self.index)
                if self.texts is not None:
                    self.texts.append(self.text((token,)))
        return [self.index[token] for token in tokens]

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of neighbouring tokens; empty for ids that are not in the tokenizer."""
        if self._context is None:
            alone = self._decode_or_empty(tokens)
            if alone.strip() and alone.isascii():
                self._context = tokens[0], self._decode_or_empty(tokens[:1])
            return alone
        token, before = self._context
        both = self._decode_or_empty((token, *tokens))
        return both[len(before) :] if both.startswith(before) else self._decode_or_empty(tokens)

    def _decode_or_empty(self, tokens: Sequence[int]) -> str:
        assert self._decode is not None
        try:
            return self._decode(tokens)
        except (ArithmeticError, LookupError, TypeError, ValueError):  # ids of another tokenizer than the one given
            return ""


_COPIED_FIELDS = (
    *("title", "verdict", "outcome", "message", "why", "environment", "problem", "replica"),
    *("reward", "facts", "stages"),
)


def _segment(segment: SegmentView, vocabulary: _Vocabulary) -> Mapping[str, Any]:
    places = vocabulary.add_tokens(segment.ids)
    sampled = [position for position, is_sampled in enumerate(segment.mask) if is_sampled]
    versions = [version for version, is_sampled in zip(segment.versions, segment.mask, strict=True) if is_sampled]
    wide = max(places, default=0) >= 1 << 16
    return {
        "length": len(places),
        "wide": wide,
        "places": _base64(array("I" if wide else "H", places)),
        "mask": _bitmask(segment.mask),
        **_logprobs([segment.logprobs[position] for position in sampled]),
        "versions": [[len(list(run)), version] for version, run in groupby(versions)],
        "calls": [[call.start, call.end, call.turn, call.facts] for call in segment.calls],
        "shared": list(_shared_characters(segment, places, vocabulary)),
        "note": segment.note,
    }


def _logprobs(values: Sequence[float]) -> Mapping[str, Any]:
    short = array("f", (value if math.isfinite(value) and abs(value) < 1e38 else 0.0 for value in values))
    exact = all(map(float.__eq__, short, map(float, values)))
    return {"double": not exact, "logprobs": _base64(short if exact else array("d", values))}


def _bitmask(mask: Sequence[int]) -> str:
    packed = bytearray(-(-len(mask) // 8))
    for position, sampled in enumerate(mask):
        if sampled:
            packed[position >> 3] |= 1 << (position & 7)
    return b64encode(packed).decode()


def _base64(values: "array[Any]") -> str:
    if sys.byteorder == "big":
        values.byteswap()
    return b64encode(values.tobytes()).decode()


def _shared_characters(
    segment: SegmentView, places: Sequence[int], vocabulary: _Vocabulary
) -> Iterator[tuple[int, int, str]]:
    """Yield position, count and text of neighbouring tokens that share a character, and so are shown together."""
    if vocabulary.texts is None:
        return
    broken = {place for place, text in enumerate(vocabulary.texts) if _REPLACEMENT in text}
    position, length = 0, len(places)
    while position < length:
        if places[position] not in broken:
            position += 1
            continue
        count, text = _decode_character(segment, position, vocabulary)
        if count > 1:
            yield position, count, text
        position += count


def _decode_character(segment: SegmentView, start: int, vocabulary: _Vocabulary) -> tuple[int, str]:
    """Return how many tokens from ``start`` make up whole characters, and their text; one if none do."""
    for count in range(2, _MAX_TOKENS_PER_CHARACTER + 1):
        if start + count > len(segment.ids) or segment.mask[start + count - 1] != segment.mask[start]:
            break
        text = vocabulary.text(segment.ids[start : start + count])
        if not text.endswith(_REPLACEMENT):
            return count, text
    return 1, ""
