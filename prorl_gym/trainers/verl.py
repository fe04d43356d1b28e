"""A rollout as verl's ``AgentLoopOutput`` (``verl.experimental.agent_loop``, written for 0.9.1).

One output for each segment: verl's trainers of ``trainer/ppo/v1`` take a list from an agent loop and count its reward
once. A rollout without a reward gives an empty list. Raise then: verl takes that group out and samples another prompt.
Use numbers of verl's own ``global_steps`` as policy versions: it bounds staleness by the two that an output carries.
"""

from typing import Any

from prorl_gym.records import NOT_SAMPLED, Rollout, StageTime
from prorl_gym.trainers.training_sequence import training_sequences


def to_verl(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the arguments of an ``AgentLoopOutput`` for each segment; none for a rollout without a reward.

    ``reward_extra_info`` is ``{"score": reward}`` in each, for ``algorithm.filter_groups.metric: score``. verl itself
    does not read ``loss_weight``: a loss of your own finds it in the batch.
    """
    reward = rollout.reward
    if reward is None:
        return []
    sampling = sum(call.seconds for segment in rollout.segments for call in segment.generations)
    running = rollout.stages.get("run", StageTime()).seconds
    grading = rollout.stages.get("eval", StageTime()).seconds
    outputs: list[dict[str, Any]] = []
    for sequence in training_sequences(rollout):
        versions = [version for version in sequence.versions if version != NOT_SAMPLED]
        experts = sequence.routed_experts
        output: dict[str, Any] = {
            "prompt_ids": sequence.prompt_ids,
            "response_ids": sequence.response_ids,
            "response_mask": sequence.loss_mask,
            "response_logprobs": sequence.logprobs,
            "reward_score": reward,
            "num_turns": len(rollout.messages),
            "metrics": {  # seconds
                "generate_sequences": sampling,
                "tool_calls": max(0.0, running - sampling),
                "compute_score": grading,
            },
            "extra_fields": {
                "min_global_steps": min(versions),
                "max_global_steps": max(versions),
                "reward_extra_info": {"score": reward},
                "loss_weight": sequence.weight,
                "rollout_id": rollout.rollout_id,
            },
        }
        outputs.append(output if experts is None else output | {"routed_experts": experts.to_numpy()})
    return outputs
