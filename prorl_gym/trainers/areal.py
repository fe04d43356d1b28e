"""A rollout as the tensors that an AReaL ``RolloutWorkflow`` returns (written for ``4aef98d8d``).

``None`` rejects the episode: AReaL then trains on the others of the group. Versions are per token, -1 where nothing was
sampled, which is AReaL's own convention; its decoupled objective reads them.
"""

from typing import Any

from prorl_gym.records import NOT_SAMPLED, Rollout
from prorl_gym.trainers.training_sequence import training_sequences


def to_areal(rollout: Rollout) -> dict[str, list[Any]] | None:
    """Return rows of one length, one for each segment; ``None`` without a reward, or when nothing was sampled.

    Convert them with ``{key: torch.tensor(rows) for key, rows in found.items()}``.
    """
    sequences = training_sequences(rollout)
    if rollout.reward is None or not sequences:
        return None
    width = max(len(one.segment.token_ids) for one in sequences)
    columns: dict[str, list[Any]] = {}
    for one in sequences:
        prompt, padding = len(one.prompt_ids), width - len(one.segment.token_ids)
        row: dict[str, Any] = {
            "input_ids": one.segment.token_ids + [0] * padding,
            "loss_mask": [0] * prompt + one.loss_mask + [0] * padding,
            "logprobs": [0.0] * prompt + one.logprobs + [0.0] * padding,
            "versions": [NOT_SAMPLED] * prompt + one.versions + [NOT_SAMPLED] * padding,
            "attention_mask": [True] * (width - padding) + [False] * padding,
            "rewards": rollout.reward,
        }
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    return columns
