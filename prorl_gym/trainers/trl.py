"""Rollouts as what TRL's ``GRPOTrainer(rollout_func=...)`` expects (written for 1.16.0).

TRL wants one completion for each prompt that it passed, in their order, and cannot drop one. A rollout without a reward
becomes a row without loss whose reward is ``None``: TRL leaves such rows out of the group's mean and deviation, and
gives them no advantage. Several segments become a row without loss, too, with their reward.
"""

from collections.abc import Sequence
from typing import Any

from prorl_gym.records import Rollout
from prorl_gym.trainers.training_sequence import single_sequences


def to_trl(rollouts: Sequence[Rollout], *, placeholder_id: int) -> dict[str, list[Any]]:
    """Return the answer of a ``rollout_func``; give the trainer ``reward_funcs=served_reward`` with it.

    The rollouts are one for each prompt that TRL passed, in their order. One that sampled nothing is the token
    ``placeholder_id``, without loss; the end-of-sequence id does.
    """
    sequences = single_sequences(rollouts, placeholder_id)
    return {
        "prompt_ids": [one.prompt_ids for one in sequences],
        "completion_ids": [one.response_ids for one in sequences],
        "logprobs": [[[value] for value in one.logprobs] for one in sequences],  # alternatives, of which there is one
        "env_mask": [one.loss_mask for one in sequences],
        "served_reward": [rollout.reward for rollout in rollouts],
    }


def served_reward(completions: Sequence[Any], served_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """Return the rewards of the records: a function for ``reward_funcs``."""
    return list(served_reward)
