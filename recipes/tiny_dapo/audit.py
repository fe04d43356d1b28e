"""Checks between record and gradient: what the learner did is compared with what the records say.

None of them shares code with the learner. A recipe whose curve still rises can be wrong in each of these ways.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from prorl_gym.client import CompletedGroup
from prorl_gym.errors import FailureKind
from prorl_gym.records import Rollout, Segment


class LearnError(Exception):
    """Learning cannot be trusted, or did not happen; the message names the reason."""


class TrainedRow(Protocol):
    """A row of a batch: where it comes from. What the learner made of it is not read."""

    @property
    def group(self) -> CompletedGroup:
        """The group of its rollout."""
        ...

    @property
    def rollout(self) -> Rollout:
        """Its rollout."""
        ...

    @property
    def segment(self) -> Segment:
        """Its tokens."""
        ...


def check_records(groups: Sequence[CompletedGroup]) -> None:
    """Look for drift: tokens that are not one history, as the engine saw it, from the prompt that a group shares.

    Raises:
        LearnError: naming the rollout.
    """
    for group in groups:
        prompts = set[tuple[int, ...]]()
        for rollout in group.rollouts:
            if len(rollout.segments) != 1 and not rollout.masked:
                raise LearnError(f"drift: {rollout.rollout_id} has {len(rollout.segments)} segments, one was expected")
            if any(retry.kind is FailureKind.INTERNAL for retry in rollout.retries):
                raise LearnError(f"drift: the service made {rollout.rollout_id} again after a defect of its own")
            prompts |= {tuple(one.token_ids[: one.mask.index(1)]) for one in rollout.segments if 1 in one.mask}
        if len(prompts) > 1:
            raise LearnError(f"drift: the rollouts of {group.group_id} have {len(prompts)} different prompts")


def check_gradient(
    rows: Sequence[TrainedRow], logprobs: torch.Tensor, gradient: torch.Tensor | None, clip_low: float, clip_high: float
) -> None:
    """Compare the gradient of the loss with respect to the log-probs with DAPO's, derived from the records by hand.

    The gradient of a token that was sampled and is not clipped is ``-advantage * ratio / tokens``, that of any other 0.

    Args:
        rows: of the batch.
        logprobs: the learner's, one row for each segment, padded.
        gradient: of the loss, likewise.
        clip_low: how far a ratio may be below 1.
        clip_high: how far it may be above.

    Raises:
        LearnError: naming the mask or the advantages.
    """
    assert gradient is not None
    own, found = logprobs.numpy().astype(np.float64), gradient.numpy().astype(np.float64)
    tokens = sum(sum(one.segment.mask) for one in rows)
    for row, one in enumerate(rows):
        segment, rollout = one.segment, one.rollout
        length = len(segment.token_ids)
        sampled = np.zeros(found.shape[1], dtype=bool)
        sampled[:length] = np.asarray(segment.mask) == 1
        if (outside := np.flatnonzero(found[row] * ~sampled)).size:
            raise LearnError(
                f"mask: {outside.size} tokens of {rollout.rollout_id} carry loss and were not sampled "
                f"(the first at position {outside[0]})"
            )
        rewards = [member.reward for member in one.group.rollouts if member.reward is not None and not member.masked]
        reward = float("nan") if rollout.reward is None else rollout.reward
        advantage = (reward - np.mean(rewards)) / (np.std(rewards) + 1e-4)
        ratio = np.exp(own[row, :length][sampled[:length]] - np.asarray(segment.logprobs)[sampled[:length]])
        bound = 1 + clip_high if advantage > 0 else 1 - clip_low
        clipped = (ratio - bound) * np.sign(advantage) > 0
        expected = np.where(clipped, 0.0, -advantage * ratio / tokens)
        near = np.abs(ratio - bound) < 1e-4  # either side of the clip is right
        close = np.isclose(found[row][sampled], expected, rtol=1e-3, atol=1e-9) | near
        if close.all():
            continue
        actual = found[row][sampled]
        lost = (actual == 0) & ~clipped & (expected != 0)
        if lost.any() and not lost.all():
            raise LearnError(f"mask: {int(lost.sum())} sampled tokens of {rollout.rollout_id} carry no loss")
        raise LearnError(
            f"advantages: those of {rollout.rollout_id} do not follow from the rewards in the records of its group "
            f"(reward {reward:g} of {[f'{reward:g}' for reward in rewards]})"
        )


def check_moved(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> None:
    """Compare the weights around an update.

    Raises:
        LearnError: none has changed, or one is not finite.
    """
    if not all(bool(torch.isfinite(one).all()) for one in after):
        raise LearnError("weights: the update made weights that are not finite")
    if all(torch.equal(one, other) for one, other in zip(before, after, strict=True)):
        raise LearnError("learning rate: the update moved no weight")
