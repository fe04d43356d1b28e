"""An agent loop for verl's trainers of ``trainer/ppo/v1``.

Start verl with this file on ``PYTHONPATH`` and these settings:

    actor_rollout_ref.rollout.agent.agent_loop_config_path=verl_agent_loop.yaml
    actor_rollout_ref.rollout.agent.default_agent_loop=prorl
    actor_rollout_ref.rollout.calculate_log_probs=True

Each row of the data set has ``extra_info: {environment: ..., task: ...}``.
"""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from prorl_gym import Client, RolloutRequest, RolloutSettings
from prorl_gym.trainers.verl import to_verl


class ProrlAgentLoop(AgentLoopBase):
    """Makes each rollout in the service."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """Return an output for each segment.

        Raises:
            RuntimeError: the rollout has no reward. verl takes its group out and samples another prompt.
        """
        settings = RolloutSettings(**{key: sampling_params[key] for key in ("temperature", "top_p", "top_k")})
        task = row["extra_info"]
        request = RolloutRequest(environment=task["environment"], task=task["task"], settings=settings)
        async with Client() as client:
            await client.submit(request)
            rollout = await client.result(request.rollout_id)
        if not (outputs := to_verl(rollout)):
            raise RuntimeError(f"rollout {rollout.rollout_id} has no reward: {rollout.outcome.message}")
        return [AgentLoopOutput(**fields) for fields in outputs]
