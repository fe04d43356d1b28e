"""Rollouts as what TRL's ``GRPOTrainer(rollout_func=...)`` expects (written for 1.16.0).

TRL wants one completion for each prompt that it passed, in their order, and cannot drop one. A rollout without a reward
becomes a row without loss whose reward is ``None``: TRL leaves such rows out of the group's mean and deviation, and
gives them no advantage. Several segments become a row without loss, too, with their reward.
"""

from collections.abc import Sequence
from typing import Any

from prorl_gym.records import Rollout
from prorl_gym.trainers.training_sequence import TrainingSequence, group_key, single_sequence


def to_trl(rollouts: Sequence[Rollout], *, placeholder_id: int) -> dict[str, list[Any]]:
    """Return the answer of a ``rollout_func``; give the trainer ``reward_funcs=served_reward`` with it.

    Args:
        rollouts: one for each prompt that TRL passed, in their order.
        placeholder_id: the single token, without loss, of a rollout that sampled nothing; the end-of-sequence id does.
    """
    sequences = [single_sequence(rollout) for rollout in rollouts]
    prompts = {
        group_key(rollout): one.prompt_ids for rollout, one in zip(rollouts, sequences, strict=True) if one is not None
    }
    rows = [
        _row(one, prompts.get(group_key(rollout), [placeholder_id]), placeholder_id)
        for rollout, one in zip(rollouts, sequences, strict=True)
    ]
    columns = {key: [row[key] for row in rows] for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
    return columns | {"served_reward": [rollout.reward for rollout in rollouts]}


def served_reward(completions: Sequence[Any], served_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """Return the rewards of the records: a function for ``reward_funcs``."""
    return list(served_reward)


def _row(sequence: TrainingSequence | None, prompt: list[int], placeholder_id: int) -> dict[str, list[Any]]:
    if sequence is None:
        return {"prompt_ids": prompt, "completion_ids": [placeholder_id], "logprobs": [[0.0]], "env_mask": [0]}
    return {
        "prompt_ids": sequence.prompt_ids,
        "completion_ids": sequence.response_ids,
        "logprobs": [[value] for value in sequence.logprobs],  # TRL's lists of alternatives, of which there is one
        "env_mask": sequence.loss_mask,
    }
