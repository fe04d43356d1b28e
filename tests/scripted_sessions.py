"""Policies of rollouts whose turns are known beforehand, without a model."""

from collections.abc import Callable
from typing import Any

from prorl_gym.agents.scripted_policy import ScriptedPolicy
from prorl_gym.inference.tokens.turn_log import TurnLog
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.protocol import Job
from prorl_gym.settings import ResolvedSettings
from prorl_gym.testing.rollout.fake_rollout import FakePolicySource, FakeSession


class ScriptedSession(FakeSession):
    """Its policy plays the turns of a script."""

    def __init__(self, source: FakePolicySource, steps: Any) -> None:
        super().__init__(source)
        self.policy: Any = ScriptedPolicy(steps)


class ScriptedPolicies(FakePolicySource):
    """Each request gets the turns that a function says."""

    def __init__(self, steps: Callable[[RolloutRequest], Any]) -> None:
        super().__init__()
        self._steps = steps

    def open_session(self, job: Job, settings: ResolvedSettings, turn_log: TurnLog | None = None) -> ScriptedSession:
        return ScriptedSession(self, self._steps(job.request))
