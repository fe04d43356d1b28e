"""Checks between the records of a batch and the gradient that a trainer makes of them; each names the broken link.

A policy may learn although one of these links is broken, so that no curve shows it. Each check compares what a trainer
did with what the records say, and raises ``CheckError``. ``prorl_gym.trainers.mismatch`` checks log-probs and masks.

Needs numpy.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prorl_gym.errors import FailureKind, ProrlError
from prorl_gym.records import Rollout, Segment

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TOLERANCE = 1e-3
"""Relative difference of two results that were computed in another order or precision."""

Normalize = Callable[[Sequence[float]], Sequence[float]]
"""Turns the rewards of a group into advantages, in the same order."""


class CheckError(ProrlError):
    """A link between rollouts and gradient is broken."""

    def __init__(self, check: str, what: str, fix: str = "") -> None:
        super().__init__(f"{check}: {what}", fix)
        self.check = check


def check_history(groups: Iterable[Sequence[Rollout]]) -> None:
    """Check that the rollouts of each group begin with one prompt, and that the service repeated none for a defect.

    Raises ``CheckError`` (``history``).
    """
    for group in groups:
        for one in group:
            if any(retry.kind is FailureKind.INTERNAL for retry in one.retries):
                raise CheckError("history", f"the service made {one.rollout_id} again after a defect of its own.")
        first = [one.segments[0] for one in group if one.segments and 1 in one.segments[0].mask]
        prompts = {tuple(segment.token_ids[: segment.mask.index(1)]) for segment in first}
        if len(prompts) > 1:
            raise CheckError("history", f"the rollouts of {group[0].group_id} have {len(prompts)} different prompts.")


def normalize_group(rewards: Sequence[float]) -> list[float]:
    """Return GRPO's advantages of a group: ``(reward - mean) / (deviation + 1e-4)``."""
    import numpy as np

    values = np.asarray(rewards)
    return ((values - values.mean()) / (values.std() + 1e-4)).tolist() if rewards else []


def expected_advantages(group: Sequence[Rollout], normalize: Normalize = normalize_group) -> dict[str, float]:
    """Return the advantages of a group's rollouts by id, from the rewards in their records.

    A rollout without a reward has none and counts in neither mean nor deviation. One that is masked in spite of its
    reward has none either, but counts.
    """
    rewarded = {one.rollout_id: one.reward for one in group if one.reward is not None}
    masked = {one.rollout_id for one in group if one.masked}
    advantages = zip(rewarded, normalize([*rewarded.values()]), strict=True)
    return {name: value for name, value in advantages if name not in masked}


def check_advantages(
    groups: Iterable[Sequence[Rollout]], advantages: Mapping[str, float], normalize: Normalize = normalize_group
) -> None:
    """Compare a trainer's advantages (by rollout id, of those that carry loss) with those that follow from the records.

    ``groups`` are whole, with the rollouts that the trainer leaves out. Raises ``CheckError``: ``failures``, a rollout
    without a reward carries loss, or counts in its group's mean and deviation; ``advantages``, they follow from other
    rewards or by another rule.
    """
    for group in groups:
        failed = [one.rollout_id for one in group if one.reward is None]
        for name in failed:
            if advantages.get(name):
                raise CheckError(
                    "failures",
                    f"{name} has no reward and carries loss, with an advantage of {advantages[name]:.3g}.",
                    "Leave rollouts without a reward out: none of them is a 0.",
                )
        expected = expected_advantages(group, normalize)
        wrong = [name for name in expected if name in advantages and not _is_near(advantages[name], expected[name])]
        if not wrong:
            continue
        names, rewards = [one.rollout_id for one in group], [one.reward or 0.0 for one in group]
        as_zero = dict(zip(names, normalize(rewards), strict=True))
        if failed and all(_is_near(advantages[name], as_zero[name]) for name in wrong):
            raise CheckError(
                "failures",
                f"mean and deviation of {group[0].group_id} count {len(failed)} rollouts without a reward as 0.",
                "Normalise over the members that have a reward.",
            )
        own = next(one.reward for one in group if one.rollout_id == wrong[0])
        given = [f"{one.reward:g}" for one in group if one.reward is not None]
        raise CheckError(
            "advantages",
            f"those of {wrong[0]} do not follow from the rewards in the records of its group "
            f"(reward {own:g} of {given}: {advantages[wrong[0]]:.3g}, not {expected[wrong[0]]:.3g}).",
        )


def check_gradient(
    rows: Sequence[tuple[Rollout, Segment]],
    advantages: Mapping[str, float],
    logprobs: "Sequence[NDArray[Any]]",
    gradients: "Sequence[NDArray[Any]]",
    *,
    clip_low: float,
    clip_high: float,
) -> None:
    """Compare the gradient of a loss with respect to the log-probs with the one that follows from the records.

    That of the clipped objective with a token-level mean (DAPO): ``-advantage * ratio / tokens`` for a token that was
    sampled and is not clipped, 0 for any other, with the ratio to the served log-probs.

    ``rows`` are of the batch over which the loss is a mean; of ``logprobs`` (the trainer's) and ``gradients`` one array
    for each row, padding behind its tokens. ``advantages`` are the ``expected_advantages`` by rollout id. Raises
    ``CheckError``: ``mask``, tokens that were not sampled carry loss, or sampled ones do not; ``gradient``.
    """
    import numpy as np

    tokens = sum(sum(segment.mask) for _, segment in rows)
    for (rollout, segment), own, gradient in zip(rows, logprobs, gradients, strict=True):
        name, advantage = rollout.rollout_id, advantages[rollout.rollout_id]
        places = np.flatnonzero(segment.mask)
        actual = np.asarray(gradient, dtype=np.float64)[places]
        if (outside := np.setdiff1d(np.flatnonzero(gradient), places)).size:
            what = (
                f"{outside.size} tokens of {name} carry loss and were not sampled (the first at position {outside[0]})."
            )
            raise CheckError("mask", what)
        ratio = np.exp(np.asarray(own, dtype=np.float64)[places] - np.asarray(segment.logprobs)[places])
        bound = 1 + clip_high if advantage > 0 else 1 - clip_low
        clipped = (ratio - bound) * np.sign(advantage) > 0
        expected = np.where(clipped, 0.0, -advantage * ratio / tokens)
        near = np.abs(ratio - bound) < 1e-4  # either side of the clip is right
        if (np.isclose(actual, expected, rtol=_TOLERANCE, atol=1e-9) | near).all():
            continue
        lost = (actual == 0) & (expected != 0)
        if lost.any() and not lost.all():
            raise CheckError("mask", f"{int(lost.sum())} sampled tokens of {name} carry no loss.")
        raise CheckError("gradient", f"that of {name} does not follow from its advantage, {advantage:.3g}.")


def check_moved(before: "Sequence[NDArray[Any]]", after: "Sequence[NDArray[Any]]") -> None:
    """Compare the weights around an update, or the log-probs of the same tokens.

    Raises ``CheckError``: ``learning rate``, none has changed; ``weights``, one is not finite.
    """
    import numpy as np

    if not all(np.isfinite(one).all() for one in after):
        raise CheckError("weights", "the update made weights that are not finite.")
    if all(np.array_equal(one, other) for one, other in zip(before, after, strict=True)):
        raise CheckError("learning rate", "the update moved no weight.")


def _is_near(found: float, expected: float) -> bool:
    return abs(found - expected) <= _TOLERANCE * max(1.0, abs(expected))
