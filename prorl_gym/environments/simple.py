"""A base class for environments whose agent hands in an answer, and all names that such an environment imports.

A subclass names its row and its prompt and writes ``grade``. Whatever else it needs it overrides: ``messages``,
``tools``, ``evaluate``. An environment that fits no part of it implements ``Environment`` instead.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Generic

from prorl_gym.agents.protocol import Artifacts, Tool
from prorl_gym.agents.tools import FinishTool, PythonTool
from prorl_gym.agents.tools.agent_sandbox import SandboxSource
from prorl_gym.environments.protocol import Episode, Leases, RunContext, ScriptedStep
from prorl_gym.environments.row_format import Row, TaskRow, parse_row, to_scripted_steps
from prorl_gym.errors import FailureKind, GraderError, TaskError
from prorl_gym.records import Message, Score
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.settings import ResolvedSettings, RolloutSettings

__all__ = [
    "GraderError",
    "Leases",
    "Message",
    "RolloutSettings",
    "SandboxSpec",
    "Score",
    "ScriptedStep",
    "SimpleEnvironment",
    "TaskRow",
]


class SimpleEnvironment(Generic[Row]):
    """Implements ``Environment[Row]`` but for ``grade``. Stateless: one object serves every rollout."""

    name: str
    """Name in requests, and of the package's entry point."""
    row_model: type[Row]
    prompt: str
    """System prompt; the same for every replica of a group."""
    settings: RolloutSettings = RolloutSettings()
    """Sampling and limits; a request's own win."""
    sandbox: SandboxSpec = SandboxSpec()
    """Sandbox of the agent: by default the service's image without a network."""
    finish: str = "Hand in your final answer and end."
    """Description of the ``finish`` tool: how to hand in the answer."""
    gold_field: str = "answer"
    """Field of the row with the gold answer, for ``gold_answer``; named in the error about a row that lacks it."""

    def messages(self, task: Row) -> tuple[Message, ...]:
        """Return the first prompt, token-identical for every replica: no paths, dates, ports or random ids."""
        return Message(role="system", content=self.prompt), Message(role="user", content=task.question)

    def tools(self, sandbox: SandboxSource, settings: ResolvedSettings) -> Sequence[Tool]:
        """Return the agent's tools: ``python`` and ``finish``. ``sandbox`` starts at a tool's first call."""
        return PythonTool(sandbox, settings.action_seconds), FinishTool(self.finish)

    async def grade(self, task: Row, answer: str, leases: Leases) -> Score:
        """Grade what the agent handed in, which may be anything; empty when it handed in nothing.

        A wrong or hostile answer is a score of 0.0. Run an answer only in
        ``await leases.start_clean_sandbox(self.sandbox)``, which the agent has never touched. Raises ``GraderError`` or
        ``SandboxError`` when grading itself could not be done: no reward, the attempt is retried.
        """
        raise NotImplementedError

    def gold_answer(self, task: Row) -> str:
        """Return the answer that solves the row: the field ``gold_field``; empty when the row has none."""
        gold = getattr(task, self.gold_field, None)
        return "" if gold is None else str(gold)

    def wrong_answer(self, task: Row, seed: int) -> str:
        """Return a plausible answer that does not solve the row; ``validate`` hands it in."""
        return f"I could not find an answer ({seed})."

    # Called by the rest of prorl-gym

    def parse_row(self, row: Mapping[str, Any]) -> Row:
        return parse_row(self.row_model, self.name, row)

    def plan_episode(self, task: Row, leases: Leases, settings: ResolvedSettings) -> Episode:
        source = partial(leases.get_agent_sandbox, self.sandbox)
        return Episode(self.messages(task), tuple(self.tools(source, settings)), source)

    async def init(self, task: Row, leases: Leases, settings: ResolvedSettings) -> Episode:
        return self.plan_episode(task, leases, settings)

    async def run(self, task: Row, episode: Episode, context: RunContext) -> None:
        await context.run_agent(episode)

    async def evaluate(self, task: Row, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        return await self.grade(task, artifacts.answer or "", leases)

    def gold_steps(self, row: Mapping[str, Any]) -> Sequence[ScriptedStep]:
        """Return the row's own trajectory, or one that hands in the gold answer. Raises ``TaskError`` for neither."""
        task = self.parse_row(row)
        steps = to_scripted_steps(task.gold_steps) or _finish(self.gold_answer(task))
        if not steps:
            what = f"{self.name} row {task.id or 'without id'}: no gold answer."
            raise TaskError(FailureKind.BAD_ROW, what, f"Add 'gold_steps' or '{self.gold_field}'.")
        return steps

    def wrong_steps(self, row: Mapping[str, Any], seed: int) -> Sequence[ScriptedStep]:
        """Return turns that do not solve the row: its own, or one that hands in a wrong answer."""
        task = self.parse_row(row)
        return to_scripted_steps(task.wrong_steps) or _finish(self.wrong_answer(task, seed))


def _finish(answer: str) -> list[ScriptedStep]:
    return [ScriptedStep(tool="finish", arguments={"answer": answer})] if answer else []
