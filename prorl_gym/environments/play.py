"""Playing a scripted trajectory through the real loop, tools, sandboxes and grader: how rows are proved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from prorl_gym.agents.fake import ScriptedPolicy
from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments.protocol import Environment, Episode, GoldStep, Leases, RunContext
from prorl_gym.errors import LimitReached
from prorl_gym.records import Score
from prorl_gym.settings import resolve


@dataclass(frozen=True, slots=True)
class Played:
    """What came of a script."""

    episode: Episode
    artifacts: Artifacts
    score: Score
    turns: int


async def play(
    environment: Environment[Any], row: Mapping[str, Any], steps: Sequence[GoldStep], leases: Leases
) -> Played:
    """Play ``steps`` on a row with the environment's own settings, then grade. The caller closes the leases.

    Raises:
        RolloutError: the row is bad, a sandbox or the grader failed.
    """
    task = environment.parse(row)
    settings = resolve(environment.settings)
    episode = await environment.init(task, leases, settings)
    policy, artifacts = ScriptedPolicy(steps, settings.max_turns), Artifacts()
    try:
        await environment.run(task, episode, RunContext(policy, leases, settings, artifacts))
    except LimitReached:
        pass  # graded as it stands, as in a rollout
    score = await environment.evaluate(task, artifacts, leases, settings)
    return Played(episode, artifacts, score, policy.turns)


@runtime_checkable
class ChecksRow(Protocol):
    """An environment that can find faults of a row that no trajectory shows."""

    async def check_row(self, row: Mapping[str, Any], leases: Leases) -> str:
        """Return what is wrong with a row whose gold trajectory is paid; empty when nothing is."""
        ...


async def check(environment: Environment[Any], row: Mapping[str, Any], leases: Leases) -> str:
    """Return what an environment finds wrong with a row beside its trajectories. The caller closes the leases.

    Raises:
        RolloutError: a sandbox or the grader failed.
    """
    return await environment.check_row(row, leases) if isinstance(environment, ChecksRow) else ""
