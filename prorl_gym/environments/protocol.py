"""The protocol of environments: three async methods, a row format, and gold answers that prove the rows.

``init`` prepares, ``run`` runs the agent, ``evaluate`` grades. Sandboxes come from ``Leases``, lazily: a math rollout
that calls no tool starts none, and grading uses a clean one. Answers and hidden tests stay in the task object on the
service's side; they never enter the agent's sandbox or its prompt.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from prorl_gym.agents.loop import run_agent
from prorl_gym.agents.protocol import Agent, Artifacts, Policy
from prorl_gym.agents.protocol import Episode as Episode
from prorl_gym.agents.scripted_policy import ScriptedStep as ScriptedStep
from prorl_gym.environments.judge import Judge
from prorl_gym.records import Score
from prorl_gym.sandbox.protocol import Sandbox, SandboxSpec
from prorl_gym.settings import ResolvedSettings, RolloutSettings

TaskT = TypeVar("TaskT")
ResourceT = TypeVar("ResourceT")


class Leases(Protocol):
    """Lends what a rollout needs. All sandboxes are closed when it ends, however it ends."""

    async def get_agent_sandbox(self, spec: SandboxSpec) -> Sandbox:
        """Return the agent's sandbox for this spec, started at the first call. Untrusted from then on."""
        ...

    async def start_clean_sandbox(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox that the agent has never touched. The caller may close it early."""
        ...

    def get_judge(self) -> Judge | None: ...

    async def enter_context(self, resource: AbstractAsyncContextManager[ResourceT]) -> ResourceT:
        """Enter something else that lives as long as the rollout, for example the session of a tool.

        It is left when the rollout ends, however it ends, and by another task than the one that entered it.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunContext:
    """Means of ``run``."""

    policy: Policy
    leases: Leases
    settings: ResolvedSettings
    artifacts: Artifacts
    """Filled while the agent works, so that a kill at any moment loses nothing before it."""
    agent: Agent | None = None
    """The agent that the settings name; ``None``: the built-in loop."""

    async def run_agent(self, episode: Episode) -> None:
        """Let the agent of this rollout work on an episode until it finishes.

        Raises ``LimitReached`` (turns, tokens or time), or ``RolloutError``; see ``prorl_gym.agents.loop.run_agent``.
        """
        if self.agent is None:
            compact = self.settings.compact_tokens
            await run_agent(episode.messages, episode.tools, self.policy, self.artifacts, compact)
        else:
            await self.agent.run(episode, self.artifacts)


class Environment(Protocol[TaskT]):
    """A task family. Stateless: one object serves every rollout."""

    @property
    def name(self) -> str:
        """Name in requests, for example ``math``."""
        ...

    @property
    def settings(self) -> RolloutSettings:
        """Sampling and limits of this family; a request's own win."""
        ...

    def parse_row(self, row: Mapping[str, Any]) -> TaskT:
        """Read a dataset row. Raises ``TaskError`` (BAD_ROW) with the missing or wrong field."""
        ...

    async def init(self, task: TaskT, leases: Leases, settings: ResolvedSettings) -> Episode: ...

    async def run(self, task: TaskT, episode: Episode, context: RunContext) -> None:
        """Let the agent work; fill ``context.artifacts``. ``context.run_agent`` runs the one that is configured."""
        ...

    async def evaluate(self, task: TaskT, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        """Grade. A wrong answer is a score.

        Raises ``GraderError`` or ``SandboxError`` only when grading itself could not be done: no reward, the attempt is
        retried.
        """
        ...

    def gold_steps(self, row: Mapping[str, Any]) -> Sequence[ScriptedStep]:
        """Return the turns that solve this row: ``prorl-gym validate`` and the oracle engine play them."""
        ...


@runtime_checkable
class SupportsReplay(Protocol):
    """An environment whose tools may be run again: what they change lies in the agent's sandbox alone."""

    def normalize_answer(self, text: str) -> str:
        """Return a tool's answer without what may differ from call to call, such as durations."""
        ...
