"""A rollout as sequences of a prompt and a response, from which the shapes of trainers derive.

What holds in each shape:

- Token ids, log-probs and versions are the record's own; nothing is rendered, encoded or cut.
- The loss mask is 1 where the policy sampled the token, and 0 throughout in a rollout that is ``masked``: without a
  reward, or truncated by a limit that its settings mask. Of several segments, those that ``Rollout.trained_segments``
  leaves out have 0 throughout, too.
- A rollout without a reward never gets one of 0. It is left out, or, where a trainer needs a row for each rollout, its
  row has no loss and a reward that its trainer ignores or that leaves the baseline where it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prorl_gym.errors import ProrlError
from prorl_gym.records import NOT_SAMPLED, Generation, Rollout
from prorl_gym.routed_experts import RoutedExperts, join_routed_experts
from prorl_gym.trainers.sampled_turns import expert_calls


class NoRewardError(ProrlError):
    """No rollout of a group has a reward, so no row of it can be trained on or stand in for one."""


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One segment: a prompt, and a response that begins with the first sampled token and includes observations."""

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    """One value per token of the response: 1 where it carries loss."""
    logprobs: list[float]
    """One per token of the response, as the engine gave them; 0.0 where nothing was sampled."""
    versions: list[int]
    """Policy versions of the response's tokens, ``NOT_SAMPLED`` where nothing was sampled."""
    generations: tuple[Generation, ...] = ()
    weight: float = 1.0
    """Factor of the loss (``Rollout.segment_weight``)."""

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """Experts of prompt and response, for all tokens but those that no model call has run; ``None``: not known."""
        return join_routed_experts(expert_calls(self.generations))


def training_sequences(rollout: Rollout) -> list[TrainingSequence]:
    """Return a sequence for each segment in which the policy sampled something."""
    return [_sequence(n, rollout) for n, segment in enumerate(rollout.segments) if any(segment.mask)]


def loss_mask(rollout: Rollout, index: int) -> list[int]:
    """Return the mask to train a segment with: its own, or 0 throughout where it carries no loss."""
    segment = rollout.segments[index]
    trains = not rollout.masked and index in rollout.trained_segments
    return [*segment.mask] if trains else [0] * len(segment.mask)


def single_sequences(rollouts: Sequence[Rollout], placeholder_id: int) -> list[TrainingSequence]:
    """Return one sequence for each rollout of whole groups, for trainers that cannot do without.

    Of several segments it is the main one. Where others carry loss, too, it goes without: a part of them would stand
    for all, and its reward still measures the policy. A rollout that sampled nothing has the prompt of its group and
    the token ``placeholder_id``, without loss.
    """
    mains = [(one, None if one.main_segment is None else _sequence(one.main_segment, one)) for one in rollouts]
    prompts = {_group_key(rollout): main.prompt_ids for rollout, main in mains if main is not None}
    single: list[TrainingSequence] = []
    for rollout, main in mains:
        if main is None:
            prompt = prompts.get(_group_key(rollout), [placeholder_id])
            single.append(TrainingSequence(prompt, [placeholder_id], [0], [0.0], [NOT_SAMPLED]))
        elif len(rollout.trained_segments) == 1:
            single.append(main)
        else:
            single.append(replace(main, loss_mask=[0] * len(main.loss_mask)))
    return single


def rewards_or_means(rollouts: Sequence[Rollout]) -> list[float]:
    """Return rewards; a rollout without one has the mean of its group, which leaves the group's baseline where it is.

    The groups are whole, in any order. Raises ``NoRewardError``: no rollout of a group has a reward.
    """
    groups: dict[tuple[str, str], list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(_group_key(rollout), []).append(rollout)
    means = {key: _mean_reward(group) for key, group in groups.items()}
    return [means[_group_key(rollout)] if rollout.reward is None else rollout.reward for rollout in rollouts]


def _group_key(rollout: Rollout) -> tuple[str, str]:
    """Return what rollouts of one prompt share; a rollout without a group is a group by itself."""
    return rollout.run_id, rollout.group_id or rollout.rollout_id


def _mean_reward(group: Sequence[Rollout]) -> float:
    rewards = [one.reward for one in group if one.reward is not None]
    if not rewards:
        names = ", ".join(one.rollout_id for one in group)
        raise NoRewardError(
            f"no rollout of the group {names} has a reward.", "Submit the group again under fresh ids, or leave it out."
        )
    return sum(rewards) / len(rewards)


def _sequence(index: int, rollout: Rollout) -> TrainingSequence:
    segment = rollout.segments[index]
    start = segment.prompt_length
    return TrainingSequence(
        prompt_ids=segment.token_ids[:start],
        response_ids=segment.token_ids[start:],
        loss_mask=loss_mask(rollout, index)[start:],
        logprobs=segment.logprobs[start:],
        versions=segment.policy_versions[start:],
        generations=tuple(segment.generations),
        weight=rollout.segment_weight,
    )
