"""A verifiers environment that makes its episodes in the service, for ``eval`` and for prime-rl's orchestrator.

Each row of its taskset has ``environment`` and ``task`` beside what verifiers itself wants.
"""

from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import WireAgentConfig
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.episode import EnvInfo
from verifiers.v1.task import WireTaskData
from verifiers.v1.trace import TraceTask

from prorl_gym import Client, RolloutRequest, RolloutSettings
from prorl_gym.trainers.verifiers import to_verifiers


class ProrlEnv(SingleAgentEnv):
    """An environment whose agent runs in the service; no harness and no runtime of verifiers is started."""

    async def run_episode(self, task: vf.Task, ctx: Any, *, on_trace: Any = None, on_discard: Any = None) -> vf.Episode:
        """Return the episode of one task."""
        row = task.data.model_dump()
        settings = RolloutSettings(temperature=ctx.sampling.temperature, top_p=ctx.sampling.top_p)
        request = RolloutRequest(environment=row["environment"], task=row["task"], settings=settings)
        async with Client() as client:
            await client.submit(request)
            rollout = await client.result(request.rollout_id)
        trace_class = vf.Trace[WireTaskData, vf.State, WireAgentConfig]
        trace = trace_class.model_validate(to_verifiers(rollout, row))
        if on_trace is not None:
            on_trace(trace)
        recorded = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        return vf.Episode(env=EnvInfo(id=self.config.env_id), task=recorded, traces=[trace], ok=trace.ok)
