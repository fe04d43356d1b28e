"""Rollouts whose work is drawn from a seed in their row: what an agent and its sandbox would do, as durations.

Lengths are log-normal, as agents' are. The spreads and the tokens of a turn are those of ``bench/balance_sim.py``
(public traces of agents on SWE tasks).
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from prorl_gym.agents.protocol import Artifacts, AssistantTurn, ToolSpec
from prorl_gym.environments.protocol import Episode, Leases, RunContext, ScriptedStep
from prorl_gym.errors import FailureKind, Limit, LimitReached, RolloutError
from prorl_gym.inference.protocol import GenerationResult
from prorl_gym.inference.tokens.turn_log import TurnLog
from prorl_gym.records import NOT_SAMPLED, Generation, Message, Score, Segment
from prorl_gym.rollout.protocol import Job
from prorl_gym.rollout.scheduling.model_source import PolicyPool
from prorl_gym.settings import ResolvedSettings, RolloutSettings
from simulation.engine import model_call

SYSTEM_TOKENS = GROUP_TOKENS = 2048
"""Tokens of the prompt that all rollouts share, and of what a group adds to it."""

Stage = Literal["init", "run", "eval"]

_INFRASTRUCTURE = (FailureKind.SANDBOX_LOST, FailureKind.SANDBOX_UNAVAILABLE, FailureKind.GRADER_FAILED)
"""Failures that a sandbox or a grader may show in any attempt."""


@dataclass(frozen=True, slots=True)
class Turn:
    output: int
    observation: int
    tool_seconds: float


@dataclass(frozen=True, slots=True)
class Shape:
    turns: float = 14.0
    turns_per_call: int = 1
    """How many turns one simulated call and its command stand for: fewer events, the same tokens and seconds."""
    failure_chance: float = 0.0
    """Chance that infrastructure fails an attempt, and that a row ends in another unusual way."""


@dataclass(frozen=True, slots=True)
class Plan:
    turns: tuple[Turn, ...]
    init_seconds: float
    eval_seconds: float
    reward: float
    ending: str
    """``ok``; ``limit``: truncated; ``policy``: the agent breaks its sandbox; ``hopeless``: every attempt fails."""


def draw_plan(shape: Shape, seed: int) -> Plan:
    dice = random.Random(seed)

    def about(median: float, sigma: float, most: float) -> float:
        return min(most, median * dice.lognormvariate(0.0, sigma))

    count, scale = max(1.0, about(shape.turns, 0.8, 99)), shape.turns_per_call
    turns = tuple(
        Turn(
            output=max(1, round(scale * about(180, 0.6, 2000))),
            observation=max(1, round(scale * about(450, 0.8, 6000))),
            tool_seconds=scale * about(1.0, 1.0, 60.0),
        )
        for _ in range(max(1, round(count / scale)))
    )
    unusual = dice.random() < shape.failure_chance
    return Plan(
        turns,
        init_seconds=about(5.0, 0.5, 300.0),
        eval_seconds=about(10.0, 0.5, 300.0),
        reward=dice.choice([0.0, 0.0, 0.5, 1.0]),
        ending=dice.choice(["limit", "policy", "hopeless"]) if unusual else "ok",
    )


class PlannedEnvironment:
    """Implements ``Environment``: lets the time of a plan pass."""

    name = "planned"
    settings = RolloutSettings(init_seconds=900, run_seconds=7200, eval_seconds=900)

    def __init__(self, shape: Shape, dice: random.Random) -> None:
        self._shape = shape
        self._dice = dice

    def parse_row(self, row: Mapping[str, Any]) -> Plan:
        return draw_plan(self._shape, row["seed"])

    async def init(self, task: Plan, leases: Leases, settings: ResolvedSettings) -> Episode:
        await self.pass_time("init", task.init_seconds)
        self._fail_sometimes()
        return Episode((), ())

    async def run(self, task: Plan, episode: Episode, context: RunContext) -> None:
        for turn in task.turns:
            await context.policy.respond(())
            await self.pass_time("run", turn.tool_seconds)
        self._fail_sometimes()
        if task.ending == "limit":
            raise LimitReached(Limit.TURNS)
        if task.ending == "policy":
            raise RolloutError(FailureKind.SANDBOX_LIMIT, "the agent filled its disk.")

    async def evaluate(self, task: Plan, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        await self.pass_time("eval", task.eval_seconds)
        self._fail_sometimes()
        if task.ending == "hopeless":
            raise RolloutError(FailureKind.GRADER_FAILED, "the grader is broken.")
        return Score(reward=task.reward)

    def gold_steps(self, row: Mapping[str, Any]) -> Sequence[ScriptedStep]:
        return [ScriptedStep(text="go")]

    async def pass_time(self, stage: Stage, seconds: float) -> None:
        """Let the time of a part of the plan pass."""
        await asyncio.sleep(seconds)

    def _fail_sometimes(self) -> None:
        if self._dice.random() < self._shape.failure_chance / 3:
            raise RolloutError(self._dice.choice(_INFRASTRUCTURE), "what the simulation's dice broke.")


@dataclass(slots=True)
class PlannedSession:
    """Implements ``PolicySession`` and ``Policy``: asks a pool for the turns of a plan, in token counts only."""

    job: Job
    turns: Sequence[Turn]
    pool: PolicyPool
    context: int
    results: list[GenerationResult] = field(default_factory=list[GenerationResult])
    calls: int = 0

    @property
    def policy(self) -> "PlannedSession":
        return self

    async def failure_at_deadline(self) -> RolloutError | None:
        return None

    async def wait_for_room(self) -> None:
        if not self.job.request.evaluation:
            await self.pool.wait_for_room(self.job.request.rollout_id)

    def release_engine_slot(self) -> None:
        self.pool.release_slot(self.job.request.rollout_id)

    def mark_cancelled(self) -> None:
        """See ``PolicySession.mark_cancelled``."""

    async def start_conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        return await self.respond(messages)

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        turn, request = self.turns[len(self.results)], self.job.request
        while True:  # a pause of the policy cuts a call short
            self.calls += 1
            name = f"{request.rollout_id}/{self.job.attempt}/{self.calls}"
            call = model_call(
                name,
                request.rollout_id,
                self.context,
                output=turn.output,
                group=f"{request.run_id}/{request.group_id}" if request.group_id else "",
                priority=int(request.evaluation),
            )
            result = await self.pool.generate(call)
            if result.finish_reason != "abort":
                break
        self.results.append(result)
        self.context += turn.output + turn.observation
        return AssistantTurn("")

    async def close(self) -> None:
        self.pool.forget_session(self.job.request.rollout_id)

    def segments(self) -> list[Segment]:
        """See ``PolicySession.segments``: one token of each turn stands for all of them."""
        if not self.results:
            return []
        generations = [
            Generation(start=n + 1, end=n + 2, turn=n, finish_reason="stop", engine=one.engine, seconds=one.seconds)
            for n, one in enumerate(self.results)
        ]
        return [
            Segment(
                token_ids=[0] * (len(self.results) + 1),
                mask=[0, *(1 for _ in self.results)],
                logprobs=[0.0] * (len(self.results) + 1),
                policy_versions=[NOT_SAMPLED, *(one.versions[0] for one in self.results)],
                generations=generations,
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                logprob_kind="raw",
            )
        ]


class PlannedPolicySource:
    """Implements ``PolicySource``."""

    def __init__(
        self,
        plan: Callable[[Job], Sequence[Turn]],
        pool: PolicyPool,
        *,
        prompt_tokens: int = SYSTEM_TOKENS + GROUP_TOKENS,
        on_open: Callable[[Job], object] = lambda job: None,
    ) -> None:
        self._plan, self._pool, self._prompt_tokens, self._on_open = plan, pool, prompt_tokens, on_open

    def open_session(self, job: Job, settings: ResolvedSettings, turn_log: TurnLog | None = None) -> PlannedSession:
        self._on_open(job)
        return PlannedSession(job, self._plan(job), self._pool, self._prompt_tokens)
