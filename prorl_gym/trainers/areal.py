"""Rollouts of a group as the tensors that an AReaL ``RolloutWorkflow`` returns (written for ``4aef98d8d``).

AReaL normalises rewards over a fixed number of rows, ``reward_norm.group_size``. A group therefore has a row for each
rollout, never fewer or more: a rollout without a reward is a row without loss that has the mean reward of its group,
and several segments are a row without loss, with their reward. Versions are per token, -1 where nothing was sampled,
which is AReaL's own convention; its decoupled objective reads them.
"""

from collections.abc import Sequence
from typing import Any

from prorl_gym.records import NOT_SAMPLED, Rollout
from prorl_gym.trainers.training_sequence import rewards_or_means, single_sequences


def to_areal(group: Sequence[Rollout], *, placeholder_id: int) -> dict[str, list[Any]] | None:
    """Return rows of one length, or ``None``, which rejects the group, when no rollout of it has a reward.

    Convert them with ``{key: torch.tensor(rows) for key, rows in found.items()}``. A rollout that sampled nothing is
    the single token ``placeholder_id``, without loss.
    """
    if all(rollout.reward is None for rollout in group):
        return None
    sequences = single_sequences(group, placeholder_id)
    width = max(len(one.token_ids) for one in sequences)
    columns: dict[str, list[Any]] = {"rewards": rewards_or_means(group)}
    for one in sequences:
        prompt, length = len(one.prompt_ids), len(one.token_ids)
        padding = width - length
        row: dict[str, list[Any]] = {
            "input_ids": one.token_ids + [0] * padding,
            "loss_mask": [0] * prompt + one.loss_mask + [0] * padding,
            "logprobs": [0.0] * prompt + one.logprobs + [0.0] * padding,
            "versions": [NOT_SAMPLED] * prompt + one.versions + [NOT_SAMPLED] * padding,
            "attention_mask": [True] * length + [False] * padding,
        }
        for key, values in row.items():
            columns.setdefault(key, []).append(values)
    return columns
