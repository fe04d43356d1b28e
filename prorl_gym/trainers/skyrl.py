"""Rollouts as SkyRL's ``GeneratorOutput`` (``skyrl.train.generators.base``, written for 0.4.0).

SkyRL wants an answer for each input, in their order, and cannot drop one. A rollout without a reward becomes a row
without loss that has the mean reward of its group: the group's baseline stays, its deviation shrinks a little. With
``step_wise`` (SkyRL's step-wise training) each segment is a step of its trajectory; otherwise several segments become a
row without loss, with their reward.
"""

from collections.abc import Sequence
from typing import Any

from prorl_gym.records import Rollout
from prorl_gym.trainers.training_sequence import rewards_or_means, single_sequences, training_sequences


def to_skyrl(
    rollouts: Sequence[Rollout], trajectory_ids: Sequence[Any], *, placeholder_id: int, step_wise: bool = False
) -> dict[str, Any]:
    """Return a ``GeneratorOutput`` of whole groups, one rollout for each input, in their order.

    ``trajectory_ids`` are those of the input. A rollout that sampled nothing is the token ``placeholder_id``, without
    loss. ``step_wise``: a row for each segment instead of one for each rollout. Raises ``NoRewardError``: no rollout of
    a group has a reward.
    """
    singles, rewards = single_sequences(rollouts, placeholder_id), rewards_or_means(rollouts)
    rows: list[dict[str, Any]] = []
    for rollout, single, reward, trajectory_id in zip(rollouts, singles, rewards, trajectory_ids, strict=True):
        steps = (training_sequences(rollout) if step_wise else []) or [single]
        for position, step in enumerate(steps, 1):
            rows.append(
                {
                    "prompt_token_ids": step.prompt_ids,
                    "response_ids": step.response_ids,
                    "loss_masks": step.loss_mask,
                    "rollout_logprobs": step.logprobs,
                    "rollout_expert_indices": (step.routed_experts, any(step.loss_mask)),
                    "rewards": reward,
                    "stop_reasons": {"completed": "stop", "truncated": "length"}.get(rollout.outcome.status, "error"),
                    "trajectory_ids": trajectory_id,
                    "is_last_step": position == len(steps),
                }
            )
    output: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[0]}
    output["rollout_expert_indices"] = _experts(output["rollout_expert_indices"])
    return output | {"rollout_metrics": None} | ({} if step_wise else {"is_last_step": None})


def _experts(found: Sequence[tuple[Any, bool]]) -> list[Any] | None:
    """Return the arrays of all rows, or none where a row with loss has none; SkyRL pads short ones without loss."""
    known = [experts.to_numpy() for experts, _ in found if experts is not None]
    if not known or any(experts is None for experts, has_loss in found if has_loss):
        return None
    return [known[0][:1] if experts is None else experts.to_numpy() for experts, _ in found]
