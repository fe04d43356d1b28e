"""Policies of rollouts whose turns are known beforehand, without a model."""

from collections.abc import Callable
from typing import Any

from prorl_gym.agents.scripted_policy import ScriptedPolicy
from prorl_gym.errors import RolloutError
from prorl_gym.inference.tokens.turn_log import TurnLog
from prorl_gym.records import RolloutRequest, Segment
from prorl_gym.rollout.protocol import Job
from prorl_gym.settings import ResolvedSettings


class ScriptedSession:
    """Implements ``PolicySession``: the turns of a script."""

    def __init__(self, steps: Any) -> None:
        self.policy = ScriptedPolicy(steps)

    async def failure_at_deadline(self) -> RolloutError | None: ...

    async def wait_for_room(self) -> None: ...

    def release_engine_slot(self) -> None: ...

    def mark_cancelled(self) -> None: ...

    async def close(self) -> None: ...

    def segments(self) -> list[Segment]:
        return []


class ScriptedPolicies:
    """Implements ``PolicySource``: each request gets the turns that a function says."""

    def __init__(self, steps: Callable[[RolloutRequest], Any]) -> None:
        self._steps = steps

    def open_session(self, job: Job, settings: ResolvedSettings, turn_log: TurnLog | None = None) -> ScriptedSession:
        return ScriptedSession(self._steps(job.request))
