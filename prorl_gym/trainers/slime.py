"""A rollout as slime's ``Sample``s (``slime.utils.types``, written for ``624b824a8``).

Each segment is a sample of its own; they share the ``rollout_id``, by which slime averages the loss. A rollout without
a reward becomes a sample with ``remove_sample`` and without a reward. slime's own normalisation takes neither: set
``--custom-reward-post-process-path prorl_gym.trainers.slime.normalize_rewards``.
"""

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from prorl_gym.records import NOT_SAMPLED, Rollout
from prorl_gym.routed_experts import RoutedExperts
from prorl_gym.trainers.training_sequence import training_sequences

_STATUS = {"completed": "completed", "truncated": "truncated", "cancelled": "aborted", "failed": "failed"}


def to_slime(
    rollout: Rollout,
    *,
    group_index: int,
    rollout_index: int,
    placeholder_id: int,
    expert_shape: tuple[int, int] | None = None,
) -> list[dict[str, Any]]:
    """Return what ``Sample.from_dict`` takes, for each segment.

    ``group_index`` is of its prompt in the step, ``rollout_index`` unique in the step. A rollout that sampled nothing
    is the token ``placeholder_id``, without loss. ``expert_shape`` (``num_layers``, ``moe_router_topk``) is needed for
    router replay, since SGLang does not report it.
    """
    common: dict[str, Any] = {
        "group_index": group_index,
        "index": rollout_index,
        "rollout_id": rollout_index,
        "reward": rollout.reward,
        "status": _STATUS[rollout.outcome.status],
        "remove_sample": rollout.reward is None,
        "session_id": rollout.rollout_id,
        "metadata": {"prorl_rollout_id": rollout.rollout_id, "environment": rollout.environment},
    }
    rows: list[dict[str, Any]] = [
        {
            "tokens": sequence.token_ids,
            "response_length": len(sequence.response_ids),
            "loss_mask": sequence.loss_mask,
            "rollout_log_probs": sequence.logprobs,
            "weight_versions": [str(version) for version in sorted({*sequence.versions} - {NOT_SAMPLED})],
            "rollout_routed_experts": None if experts is None else experts.to_numpy(expert_shape),
        }
        for sequence in training_sequences(rollout)
        for experts in (sequence.routed_experts,)
    ]
    if not rows:
        experts = RoutedExperts("int32", expert_shape, b"").padded(1).to_numpy() if expert_shape else None
        placeholder = {"tokens": [placeholder_id] * 2, "response_length": 1, "loss_mask": [0]}
        rows = [placeholder | {"rollout_log_probs": [0.0], "rollout_routed_experts": experts}]
    return [common | row for row in rows]


def normalize_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return rewards, and advantages by group: each rollout counts once, those without a reward not at all.

    A rollout without a reward is reported with the mean of all others, and its advantage is 0.
    ``args.grpo_std_normalization`` divides by the deviation.
    """
    by_group: dict[Any, dict[Any, float]] = {}
    for sample in samples:
        if not sample.remove_sample:
            by_group.setdefault(sample.group_index, {})[sample.rollout_id] = float(sample.reward)
    if not by_group:
        raise ValueError("no sample of this step has a reward: look at the service's status before training goes on")
    overall = mean(reward for group in by_group.values() for reward in group.values())
    raw: list[float] = []
    advantages: list[float] = []
    for sample in samples:
        group = list(by_group.get(sample.group_index, {}).values())
        has_reward = not sample.remove_sample
        raw.append(float(sample.reward) if has_reward else overall)
        deviation = stdev(group) if args.grpo_std_normalization and len(group) > 1 else math.nan
        scale = 1.0 if math.isnan(deviation) else deviation + 1e-6
        advantages.append((float(sample.reward) - mean(group)) / scale if has_reward else 0.0)
    return raw, advantages
