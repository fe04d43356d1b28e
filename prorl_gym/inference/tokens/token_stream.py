"""The tokens of one rollout: appended, never changed.

``TokenStream`` keeps four lists of equal length and the generations inside them: one segment. What it sends in one turn
is a prefix of what it sends in the next, and what it exports is what it sent: both are checked for every rollout, on
digests that grow with the stream, so the work stays linear in the number of tokens.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, cast

from prorl_gym.errors import FailureKind, RolloutError
from prorl_gym.inference.protocol import GenerationResult
from prorl_gym.records import NOT_SAMPLED, Generation, Segment


@dataclass(slots=True)
class DriftCounter:
    """Exported trajectories that were compared with what was sent, and those that differed."""

    checked: int = 0
    drifted: int = 0


DRIFT = DriftCounter()
"""Drift in this process; shown with the metrics. ``drifted`` must stay 0."""


class TokenStream:
    """Token ids of one rollout, as sent to the engine.

    ``closing_ids`` end an assistant turn in place of its terminator (Llama's ``<|eom_id|>``). The sampling settings are
    recorded with the tokens.
    """

    def __init__(
        self,
        *,
        terminator_id: int,
        temperature: float,
        top_p: float,
        top_k: int,
        closing_ids: frozenset[int] = frozenset(),
        drift: DriftCounter = DRIFT,
    ) -> None:
        self._terminator_id = terminator_id
        self._closing_ids = closing_ids | {terminator_id}
        self._sampling = (temperature, top_p, top_k)
        self._drift = drift
        self._ids: list[int] = []
        self._mask = bytearray()
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._generations: list[Generation] = []
        self._logprob_kind: Literal["raw", "processed"] = "raw"
        self._digest = blake2b(digest_size=16)
        self._ids_json = bytearray()
        self._digested_count = 0
        self._sent: list[tuple[int, bytes]] = []
        self.is_open = False
        """The last assistant turn lacks its terminator (cut by length, by an abort, by another end token)."""

    def __len__(self) -> int:
        return len(self._ids)

    def is_prefix_of(self, ids: Sequence[int]) -> bool:
        """Whether other ids begin with these, the last turn closed."""
        mine = [*self._ids, self._terminator_id] if self.is_open else self._ids
        return list(ids[: len(mine)]) == mine

    def added_length(self, delta: Sequence[int]) -> int:
        """Tokens that ``append_unsampled(delta)`` would add."""
        return len(delta) + (1 if self.is_open else 0)

    def append_unsampled(self, ids: Sequence[int]) -> None:
        """Append ids that the policy did not sample: the first prompt, or a delta.

        An open turn is closed first, with a terminator that carries no loss: the policy did not choose it.
        """
        if self.is_open:
            ids = [self._terminator_id, *ids]
            self.is_open = False
        self._ids.extend(ids)
        self._mask.extend(bytes(len(ids)))
        self._logprobs.extend([0.0] * len(ids))
        self._versions.extend([NOT_SAMPLED] * len(ids))

    def record_sent(self) -> Sequence[int]:
        """Return the ids to send now. The list is live: it is only appended to, and only after the answer is in."""
        self._sent.append((len(self._ids), self._update_digest()))
        return self._ids

    @property
    def sent_ids_json(self) -> bytes:
        """The ids that ``record_sent`` returned last, as JSON without brackets; only what is new is written out."""
        return bytes(self._ids_json)

    def extended_json(self, ids: Sequence[int]) -> bytes:
        """Return ids that begin with these as ``sent_ids_json`` would be: only what is new is written out."""
        self._update_digest()
        return b",".join(part for part in (bytes(self._ids_json), _as_json(ids[len(self._ids) :])) if part)

    def first_ids(self, count: int) -> list[int]:
        return self._ids[:count]

    def digest(self) -> str:
        return self._update_digest().hex()

    def append_sampled(self, result: GenerationResult, *, turn: int, seed: int | None = None) -> list[int]:
        """Append what an engine sampled, verbatim; return the ids that were kept.

        What an engine sampled beyond the first terminator belongs to no turn and is cut. Ids that only encode an
        engine's text (``result.text_turn``) were not sampled and never carry loss.

        Raises ``ValueError``: the lists of the result differ in length. The adapter has checked them: a defect.
        """
        if not len(result.token_ids) == len(result.logprobs) == len(result.versions):
            raise ValueError("token ids, log-probs and versions of a generation differ in length")
        start, ends = len(self._ids), (n for n, token in enumerate(result.token_ids, 1) if token in self._closing_ids)
        count = next(ends, len(result.token_ids))
        sampled = result.text_turn is None
        self._ids.extend(result.token_ids[:count])
        self._mask.extend((b"\x01" if sampled else b"\x00") * count)
        self._logprobs.extend(result.logprobs[:count] if sampled else [0.0] * count)
        self._versions.extend(result.versions[:count] if sampled else [NOT_SAMPLED] * count)
        self._logprob_kind = result.logprob_kind
        self.is_open = not count or self._ids[-1] not in self._closing_ids
        self._generations.append(
            Generation(
                start=start,
                end=start + count,
                turn=turn,
                finish_reason=result.finish_reason,
                engine=result.engine,
                seconds=result.seconds,
                cached_tokens=result.cached_tokens,
                seed=seed,
                routed_experts=result.routed_experts,
            )
        )
        return result.token_ids[:count]

    def export_segments(self) -> list[Segment]:
        """Return the segments: none before there is a prompt, otherwise one. May be called at any time.

        Raises ``RolloutError`` (``INTERNAL``) when the ids are not those that were sent. The counter is raised then.
        """
        if not self._ids:
            return []
        self._drift.checked += 1
        if not self._matches_sent():
            self._drift.drifted += 1
            raise RolloutError(FailureKind.INTERNAL, "the trajectory differs from what the engine was sent.")
        temperature, top_p, top_k = self._sampling
        return [
            Segment(
                token_ids=list(self._ids),
                mask=cast("list[Literal[0, 1]]", list(self._mask)),
                logprobs=list(self._logprobs),
                policy_versions=list(self._versions),
                generations=list(self._generations),
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                logprob_kind=self._logprob_kind,
            )
        ]

    def _update_digest(self) -> bytes:
        new = self._ids[self._digested_count :]
        self._digest.update(_as_bytes(new))
        self._ids_json += (b"," if self._ids_json and new else b"") + _as_json(new)
        self._digested_count = len(self._ids)
        return self._digest.digest()

    def _matches_sent(self) -> bool:
        """Digest the ids once more from the start; at each length that was sent it must be what it was then."""
        digest, position = blake2b(digest_size=16), 0
        for length, expected in self._sent:
            digest.update(_as_bytes(self._ids[position:length]))
            position = length
            if length > len(self._ids) or digest.digest() != expected:
                return False
        return len(self._ids) == len(self._mask) == len(self._logprobs) == len(self._versions)


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many ids (or characters) two sequences have in common, from the first on."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _as_json(ids: Sequence[int]) -> bytes:
    return ",".join(map(str, ids)).encode()


def _as_bytes(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()
