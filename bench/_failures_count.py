"""Counts what rollouts came to under a fault, and whether their tokens are those that the engine sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from _failures_load import Batch, Call, Made


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer of the engine."""

    ids: list[int]
    logprobs: list[float]
    version: int


Log = Mapping[tuple[int, ...], Sequence[Sampled]]
"""All answers of the engine, by their prompts."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One system under one fault. The first four counts add up to ``rollouts``."""

    system: str
    row: str
    fault: str
    rollouts: int
    solved: int
    """Reward 1 and no mark: the failure was overcome, or did not touch it."""
    silent: int
    """A lower reward without a mark: a trainer takes the engine's failure for the policy's."""
    marked: int
    """Recorded as failed or masked, with or without a reward beside the mark."""
    lost: int
    """No result: an exception, an HTTP error, or no answer until the limit."""
    unanswered: int
    """Of the lost ones: no answer until the limit."""
    marked_zeros: int
    """Of the marked ones: with a reward of 0, which counts where the mark is not read."""
    kept_tokens: int
    """Solved or silent ones with token ids."""
    exact_tokens: int
    """Of these: ids and log-probs are what the engine sampled."""
    kept_versions: int
    """Of these: each sampled id has a version of the weights."""
    right_versions: int
    """Of these: it is the version that sampled it."""
    seconds: float
    """Until the last answer, or the limit."""
    has_died: bool
    """The system solved no row any more after the fault was over."""
    reasons: list[str]
    """Some of the marks and causes of losses."""


def count(system: str, row: str, fault: str, batch: Batch, log: Log, *, has_died: bool) -> Cell:
    """Return the counts of one batch."""
    lost = [made for made in batch.made if made.lost]
    marked = [made for made in batch.made if made.mark and not made.lost]
    rest = [made for made in batch.made if not made.mark and not made.lost]
    kept = [made for made in rest if made.calls]
    labelled = [made for made in kept if all(call.versions is not None for call in made.calls)]
    return Cell(
        system=system,
        row=row,
        fault=fault,
        rollouts=len(batch.made),
        solved=sum(made.reward == 1.0 for made in rest),
        silent=sum(made.reward != 1.0 for made in rest),
        marked=len(marked),
        lost=len(lost),
        unanswered=sum(not made.is_answered for made in lost),
        marked_zeros=sum(made.reward == 0.0 for made in marked),
        kept_tokens=len(kept),
        exact_tokens=sum(all(is_exact(call, log) for call in made.calls) for made in kept),
        kept_versions=len(labelled),
        right_versions=sum(all(has_right_versions(call, log) for call in made.calls) for made in labelled),
        seconds=batch.seconds,
        has_died=has_died,
        reasons=_reasons([*marked, *lost]),
    )


def is_exact(call: Call, log: Log) -> bool:
    """Whether ids and log-probs of a call are what the engine sampled, after the prompt that it saw."""
    return len(call.logprobs) == len(call.ids) and _sampled_versions(call, log) is not None


def has_right_versions(call: Call, log: Log) -> bool:
    """Whether each id of a call carries the version of the weights that sampled it."""
    return _sampled_versions(call, log) == call.versions


def _sampled_versions(call: Call, log: Log, start: int = 0) -> list[int] | None:
    """Return the versions that sampled ids and log-probs, in one answer or several on end; ``None``: none did.

    Several rollouts have the same prompt, so that an answer which was cut off may begin like another one.
    """
    if start == len(call.ids):
        return []
    for answer in log.get((*call.prompt, *call.ids[:start]), ()):
        end = start + len(answer.ids)
        if answer.ids and (call.ids[start:end], call.logprobs[start:end]) == (answer.ids, answer.logprobs):
            rest = _sampled_versions(call, log, end)
            if rest is not None:
                return [answer.version] * len(answer.ids) + rest
    return None


def _reasons(failed: Sequence[Made]) -> list[str]:
    return sorted({made.lost or made.mark for made in failed})[:3]
