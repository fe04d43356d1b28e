"""What stands around the real service in ``bench ablation``: engines and the environment."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from _ablation_workload import FAST, SLOW, Plan

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments.protocol import Episode, Leases, RunContext, ScriptedStep
from prorl_gym.inference.protocol import CallOutcome, GenerationRequest
from prorl_gym.records import EngineLoad, Message, Score
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.settings import ResolvedSettings, RolloutSettings

Plans = Mapping[str, Plan]


class RoundRobin:
    """Implements ``BalancePolicy``: no balancing, as published: each engine is given as many rollouts as the others."""

    def __init__(self) -> None:
        self._homes: dict[str, str] = {}
        self._given = 0

    def choose(self, request: GenerationRequest, healthy: Sequence[str]) -> str:
        """Return the engine of a rollout: that of its first call."""
        if request.session_id not in self._homes:
            self._homes[request.session_id] = healthy[self._given % len(healthy)]
            self._given += 1
        return self._homes[request.session_id]

    def release(self, request: GenerationRequest, engine: str, outcome: CallOutcome) -> None:
        """Nothing was reserved."""

    def forget_session(self, session_id: str) -> None:
        """See ``BalancePolicy.forget_session``."""
        self._homes.pop(session_id, None)

    def invalidate_cache(self, engine: str) -> None:
        """Nothing is believed."""

    def observe_load(self, engine: str, load: EngineLoad) -> None:
        """Nothing is learnt."""


class TimedToolEnvironment:
    """Implements ``Environment``: actions take as long as its shell needs for them.

    Args:
        plans: what rollouts do, by id.
        slow: with the slow shell: every action takes so much longer as its mean is.
        real: actions are commands in a real sandbox's shell.
    """

    name = "tools"
    settings = RolloutSettings()

    def __init__(self, plans: Plans, *, slow: bool, real: bool = False) -> None:
        self._plans = plans
        self._more = SLOW - FAST if slow else 0.0
        self._real = real

    def parse_row(self, row: Mapping[str, Any]) -> Plan:
        """See ``Environment.parse_row``."""
        return self._plans[row["id"]]

    async def init(self, task: Plan, leases: Leases, settings: ResolvedSettings) -> Episode:
        """See ``Environment.init``."""
        await asyncio.sleep(task.init_seconds)
        return Episode((Message(role="user", content="go"),), ())

    async def run(self, task: Plan, episode: Episode, context: RunContext) -> None:
        """See ``Environment.run``."""
        shell = await (await context.leases.get_agent_sandbox(SandboxSpec())).shell() if self._real else None
        for turn in task.turns:
            await context.policy.respond(())
            if shell is None:
                await asyncio.sleep(turn.tool_seconds + self._more)
            else:
                await shell.run_command(f"sleep {turn.tool_seconds:.3f}", timeout=60)
                await asyncio.sleep(self._more)

    async def evaluate(self, task: Plan, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        """See ``Environment.evaluate``."""
        await asyncio.sleep(task.eval_seconds)
        return Score(reward=task.reward)

    def gold_steps(self, row: Mapping[str, Any]) -> Sequence[ScriptedStep]:
        """See ``Environment.gold_steps``."""
        return [ScriptedStep(text="go")]
