"""The workloads of ``bench balance``: recorded nowhere, drawn once per seed, the same for every arm.

Multi-turn agents in groups: the samples of a group share system and task prompt, then go their own ways. Lengths are
log-normal, as agents' are: most sessions are short and a few are ten times as long. The shape (groups of 8, median 14
turns, outputs and observations of a few hundred tokens, tools of about a second) and the engines' figures are those
of the vllm-router's published fit and of public traces of SWE agents.

This file was committed before the first measurement; what is measured does not choose its workload. Since then only the
seeds of ``ROOMY`` have changed: five left open which of the sticky policies is the best, forty do not.
"""

import random
from dataclasses import dataclass

from prorl_gym.testing.simulation.planned_rollouts import Turn

SEEDS = (1, 2, 3, 4, 5)
MANY_SEEDS = tuple(range(101, 141))
"""Where systems differ by less than seeds do. Nothing was tuned on these."""


@dataclass(frozen=True, slots=True)
class Session:
    """One rollout."""

    id: str
    group: str
    turns: tuple[Turn, ...]

    @property
    def output(self) -> int:
        """Tokens sampled in the whole rollout."""
        return sum(turn.output for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions in the order in which they want to start."""

    sessions: tuple[Session, ...]
    system_tokens: int = 2048
    """Shared by all."""
    group_tokens: int = 2048
    """Shared by a group, after the system prompt."""

    @property
    def prompt_tokens(self) -> int:
        """Length of every first prompt."""
        return self.system_tokens + self.group_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace's shape and the fleet it meets."""

    name: str
    engines: int
    kv_tokens: int
    groups: int
    live: int
    """Sessions that the client keeps live at once, where nothing cleverer decides."""
    group_size: int = 8
    seeds: tuple[int, ...] = SEEDS


TIGHT = Workload("tight", engines=4, kv_tokens=200_000, groups=24, live=96)
ROOMY = Workload("roomy", engines=4, kv_tokens=400_000, groups=24, live=64, seeds=MANY_SEEDS)
CAPS = (16, 24, 32, 40, 48, 64, 96)
"""Caps at which every policy is also tried, for its own best one."""


def draw(workload: Workload, seed: int) -> Trace:
    """Return the trace of a seed."""
    rng = random.Random(f"{workload.name}/{seed}")
    sessions = tuple(
        Session(f"g{group}-{sample}", f"g{group}", _turns(rng))
        for group in range(workload.groups)
        for sample in range(workload.group_size)
    )
    return Trace(sessions)


def _turns(rng: random.Random) -> tuple[Turn, ...]:
    count = min(99, max(1, round(_around(rng, 14, 0.8))))
    return tuple(
        Turn(
            output=_tokens(_around(rng, 180, 0.6), 2000),
            observation=_tokens(_around(rng, 450, 0.8), 6000),
            tool_seconds=min(60.0, _around(rng, 1.0, 1.0)),
        )
        for _ in range(count)
    )


def _around(rng: random.Random, median: float, sigma: float) -> float:
    """Draw from a log-normal distribution."""
    return median * rng.lognormvariate(0.0, sigma)


def _tokens(value: float, largest: int) -> int:
    return min(largest, max(1, round(value)))
