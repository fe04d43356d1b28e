"""Rollouts as SkyRL's ``GeneratorOutput`` (``skyrl.train.generators.base``, written for 0.4.0).

SkyRL wants an answer for each input, in their order, and cannot drop one. A rollout without a reward becomes a row
without loss that has the mean reward of its group: the group's baseline stays, its deviation shrinks a little. With
``step_wise`` (SkyRL's step-wise training) each segment is a step of its trajectory; otherwise several segments become a
row without loss, with their reward.
"""

from collections.abc import Sequence
from typing import Any

from prorl_gym.records import Rollout
from prorl_gym.trainers.training_sequence import (
    TrainingSequence,
    group_key,
    mean_reward,
    single_sequence,
    training_sequences,
)


def to_skyrl(
    rollouts: Sequence[Rollout], trajectory_ids: Sequence[Any], *, placeholder_id: int, step_wise: bool = False
) -> dict[str, Any]:
    """Return a ``GeneratorOutput``.

    Args:
        rollouts: one for each input, in their order; whole groups.
        trajectory_ids: those of the input.
        placeholder_id: the single token, without loss, of a rollout that sampled nothing.
        step_wise: a row for each segment instead of one for each rollout.

    Raises:
        NoRewardError: no rollout of a group has a reward.
    """
    groups: dict[tuple[str, str], list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(group_key(rollout), []).append(rollout)
    rewards = {key: mean_reward(group) for key, group in groups.items()}
    prompts = {group_key(one): found[0].prompt_ids for one in rollouts if (found := training_sequences(one))}
    rows: list[dict[str, Any]] = []
    for rollout, trajectory_id in zip(rollouts, trajectory_ids, strict=True):
        key = group_key(rollout)
        sequences = training_sequences(rollout) if step_wise else [single_sequence(rollout)]
        for step, sequence in enumerate(sequences or [None], 1):
            tokens = _tokens(sequence, prompts.get(key, [placeholder_id]), placeholder_id)
            rows.append(
                tokens
                | {
                    "rewards": rewards[key] if rollout.reward is None else rollout.reward,
                    "stop_reasons": {"completed": "stop", "truncated": "length"}.get(rollout.outcome.status, "error"),
                    "trajectory_ids": trajectory_id,
                    "is_last_step": step >= len(sequences),
                }
            )
    output: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[0]}
    output["rollout_expert_indices"] = _experts(output["rollout_expert_indices"])
    return output | {"rollout_metrics": None} | ({} if step_wise else {"is_last_step": None})


def _tokens(sequence: TrainingSequence | None, prompt: list[int], placeholder_id: int) -> dict[str, Any]:
    if sequence is None:
        prompt_ids, response_ids, loss_mask, logprobs, experts = prompt, [placeholder_id], [0], [0.0], None
    else:
        prompt_ids, response_ids, experts = sequence.prompt_ids, sequence.response_ids, sequence.routed_experts
        loss_mask, logprobs = sequence.loss_mask, sequence.logprobs
    return {
        "prompt_token_ids": prompt_ids,
        "response_ids": response_ids,
        "loss_masks": loss_mask,
        "rollout_logprobs": logprobs,
        "rollout_expert_indices": (experts, any(loss_mask)),
    }


def _experts(found: Sequence[tuple[Any, bool]]) -> list[Any] | None:
    """Return the arrays of all rows, or none where a row with loss has none; SkyRL pads short ones without loss."""
    known = [experts.to_numpy() for experts, _ in found if experts is not None]
    if not known or any(experts is None for experts, has_loss in found if has_loss):
        return None
    return [known[0][:1] if experts is None else experts.to_numpy() for experts, _ in found]
