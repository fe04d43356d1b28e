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
from prorl_gym.agents.protocol import Agent, Artifacts, Policy, Tool
from prorl_gym.agents.tools.agent_sandbox import SandboxSource
from prorl_gym.environments.judge import Judge
from prorl_gym.records import Message, Score
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

    def get_judge(self) -> Judge | None:
        """Return the service's judge, or ``None``."""
        ...

    async def enter_context(self, resource: AbstractAsyncContextManager[ResourceT]) -> ResourceT:
        """Enter something else that lives as long as the rollout, for example the session of a tool.

        It is left when the rollout ends, however it ends, and by another task than the one that entered it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Episode:
    """Result of ``init``: the first prompt and the tools.

    The prompt must be token-identical for every replica of a group: no paths, dates, ports or random ids in it.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    sandbox: SandboxSource | None = None
    """Leases the sandbox that the tools work in: where an agent program runs."""
    setup: str = ""
    """Bash commands that an agent program's environment comes from, such as the activation of an interpreter."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """What ``run`` may use."""

    policy: Policy
    leases: Leases
    settings: ResolvedSettings
    artifacts: Artifacts
    """Filled while the agent works, so that a kill at any moment loses nothing before it."""
    agent: Agent | None = None
    """The agent that the settings name; ``None``: the built-in loop."""

    async def run_agent(self, episode: Episode) -> None:
        """Let the agent of this rollout work on an episode until it finishes.

        Raises:
            LimitReached: turns, tokens or time.
            RolloutError: an engine, the sandbox or the agent failed. See ``prorl_gym.agents.loop.run_agent``.
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
        """Read a dataset row.

        Raises:
            TaskError: ``BAD_ROW``, naming the missing or wrong field.
        """
        ...

    async def init(self, task: TaskT, leases: Leases, settings: ResolvedSettings) -> Episode:
        """Prepare one rollout."""
        ...

    async def run(self, task: TaskT, episode: Episode, context: RunContext) -> None:
        """Let the agent work; fill ``context.artifacts``. ``context.run_agent`` runs the one that is configured."""
        ...

    async def evaluate(self, task: TaskT, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        """Grade. A wrong answer is a score; raise only when grading itself could not be done.

        Raises:
            GraderError, SandboxError: no reward, the attempt is made again.
        """
        ...

    def gold_steps(self, row: Mapping[str, Any]) -> Sequence["ScriptedStep"]:
        """Return the turns that solve this row: ``prorl-gym validate`` and the oracle engine play them."""
        ...


@runtime_checkable
class SupportsReplay(Protocol):
    """An environment whose tools may be run again: what they change lies in the agent's sandbox alone."""

    def normalize_answer(self, text: str) -> str:
        """Return a tool's answer without what may differ when the same call is made again, such as durations."""
        ...


@dataclass(frozen=True, slots=True)
class ScriptedStep:
    """One turn of a gold trajectory.

    ``{observation}`` in ``text`` and ``arguments`` is replaced with the text of the last tool result, so that the gold
    answer really depends on it.
    """

    text: str = ""
    tool: str | None = None
    arguments: Mapping[str, Any] | None = None
