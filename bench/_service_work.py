"""What the rollouts of the service's bench do: nothing, or wait. All workloads and sizes stand here.

Fixed before the first measurement. A record is 20 kB of JSON: 900 tokens, each with id, mask, log-prob and version.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from _report import SHORT

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments.protocol import Episode, Leases, RunContext, ScriptedStep
from prorl_gym.inference.tokens.turn_log import TurnLog
from prorl_gym.records import NOT_SAMPLED, Generation, Message, RolloutRequest, Score, Segment
from prorl_gym.rollout.protocol import Job
from prorl_gym.settings import ResolvedSettings, RolloutSettings
from prorl_gym.testing.rollout.fake_rollout import FakePolicySource, FakeSession

ENVIRONMENT = "timed"
Stage = Literal["init", "run", "eval"]

TOKENS, PROMPT = 900, 300
"""Of a record; how many of them are its prompt."""
SEED = 20
RUNS = 1 if SHORT else 3

# --- throughput and latency over HTTP ---------------------------------------------------------------------------------

BATCH = 64
BATCHED = 640 if SHORT else 6400
"""Rollouts of one run in batches."""
WINDOW = 8 * BATCH
"""Rollouts under way at most, when they are submitted in batches."""
SINGLE = 400 if SHORT else 4000
CALLERS = 64
TARGETS = {"batches": 2000.0, "single": 1200.0, "gym": 200.0}
"""Rollouts per second."""
ARRIVALS = {"batches": 500.0, "single": 200.0}
"""Rollouts per second, while their latency is measured."""
LATENCY_SECONDS = 2.0 if SHORT else 20.0
P50_MS, P99_MS = 3.0, 15.0

# --- a long queue -----------------------------------------------------------------------------------------------------

QUEUED, RUNNING = (1000, 100) if SHORT else (10_000, 1000)
SPARE = 200 if SHORT else 2000
"""Beyond them, so that as many are queued when the look ends."""
WATCHED_SECONDS = 3.0 if SHORT else 30.0
TURNS, TURN_SECONDS = 20, 2.0
"""Of an agent that waits: how often, and for how long on average (exponential)."""
RSS_MB, LAG_MS = 500.0, 50.0

# --- overlap ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mix:
    """Stage times, log-normal: mean seconds and sigma of the logarithm."""

    name: str
    slowest: Stage
    means: Mapping[Stage, float]


SLOTS: dict[Stage, int] = {"init": 16, "run": 64, "eval": 16}
SIGMAS: dict[Stage, float] = {"init": 0.5, "run": 1.0, "eval": 0.7}
MIXES = (
    Mix("INIT-bound", "init", {"init": 0.4, "run": 1.0, "eval": 0.2}),
    Mix("RUN-bound", "run", {"init": 0.3, "run": 2.0, "eval": 0.3}),
    Mix("EVAL-bound", "eval", {"init": 0.25, "run": 1.0, "eval": 0.4}),
)
MIXED = 200 if SHORT else 1200
"""Rollouts of one mix, all waiting from the first moment on."""
STEADY = (0.2, 0.8)
"""Between these shares of finished rollouts the overlap is looked at: not while it fills up and drains."""
OVERLAP_PERCENT = 95.0

# --- cancel -----------------------------------------------------------------------------------------------------------

CANCELLED = 8 if SHORT else 64
"""Rollouts at work, cancelled one by one; then as many again, in groups."""
GROUP = 8
DEAD_MS, GONE_S = 200.0, 3.0


@dataclass(frozen=True, slots=True)
class Times:
    """What a row asks for, in seconds."""

    init: float = 0.0
    run: tuple[float, ...] = (0.0,)
    """Before each model call."""
    eval: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """A wait as it happened."""

    began: float
    ended: float
    seconds: float
    """That were asked for: a late event loop is no work."""


@dataclass(slots=True)
class TimedEnvironment:
    """Implements ``Environment``: every stage waits for as long as the row says."""

    name: str = ENVIRONMENT
    settings: RolloutSettings = field(default_factory=RolloutSettings)
    spans: dict[Stage, list[Span]] = field(default_factory=lambda: {"init": [], "run": [], "eval": []})
    record: bool = False
    """Keep ``spans``."""

    def parse_row(self, row: Mapping[str, Any]) -> Times:
        """See ``Environment.parse_row``."""
        return Times(row.get("init", 0.0), tuple(row.get("run", (0.0,))), row.get("eval", 0.0))

    async def init(self, task: Times, leases: Leases, settings: ResolvedSettings) -> Episode:
        """See ``Environment.init``."""
        await self._wait("init", task.init)
        return Episode((Message(role="user", content="go"),), ())

    async def run(self, task: Times, episode: Episode, context: RunContext) -> None:
        """See ``Environment.run``."""
        context.artifacts.messages.extend(episode.messages)
        for turn, seconds in enumerate(task.run):
            await self._wait("run", seconds)
            answer = await (
                context.policy.respond(()) if turn else context.policy.start_conversation(episode.messages, ())
            )
            context.artifacts.answer = answer.text
        context.artifacts.messages.append(Message(role="assistant", content=context.artifacts.answer or ""))

    async def evaluate(self, task: Times, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        """See ``Environment.evaluate``."""
        await self._wait("eval", task.eval)
        return Score(reward=1.0)

    def gold_steps(self, row: Mapping[str, Any]) -> Sequence[ScriptedStep]:
        """See ``Environment.gold_steps``."""
        return [ScriptedStep(text="go")]

    async def _wait(self, stage: Stage, seconds: float) -> None:
        if not seconds:
            return
        began = time.monotonic()
        await asyncio.sleep(seconds)
        if self.record:
            self.spans[stage].append(Span(began, time.monotonic(), seconds))


class _Session(FakeSession):
    def segments(self) -> list[Segment]:
        """Return tokens like those of a real policy: large ids, log-probs with six digits."""
        return [
            Segment(
                token_ids=_IDS,
                mask=_MASK,
                logprobs=_LOGPROBS,
                policy_versions=_VERSIONS,
                generations=[
                    Generation(start=PROMPT, end=TOKENS, turn=0, finish_reason="stop", engine="fake", seconds=0.0)
                ],
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                logprob_kind="raw",
            )
        ]


class RecordPolicySource(FakePolicySource):
    """An instant policy whose records have the stated size."""

    def open_session(self, job: Job, settings: ResolvedSettings, turn_log: TurnLog | None = None) -> FakeSession:
        """See ``PolicySource.open_session``."""
        self.opened += 1
        return _Session(self, evaluation=job.request.evaluation)


_RNG = random.Random(SEED)
_SAMPLED = TOKENS - PROMPT
_IDS = [_RNG.randrange(10_000, 100_000) for _ in range(TOKENS)]
_MASK: list[Literal[0, 1]] = [0 if place < PROMPT else 1 for place in range(TOKENS)]
_LOGPROBS = [0.0] * PROMPT + [-round(_RNG.expovariate(2.0), 12) for _ in range(_SAMPLED)]
_VERSIONS = [NOT_SAMPLED] * PROMPT + [0] * _SAMPLED


def request(run_id: str, task: Mapping[str, Any] | None = None) -> RolloutRequest:
    """Return a rollout; without a task it does nothing."""
    return RolloutRequest(run_id=run_id, environment=ENVIRONMENT, task=dict(task or {"question": "q" * 200}))


def waiting(count: int, run_id: str) -> list[RolloutRequest]:
    """Return rollouts of agents that wait in every turn."""
    rng = random.Random(SEED)
    rows = [[round(rng.expovariate(1 / TURN_SECONDS), 3) for _ in range(TURNS)] for _ in range(count)]
    return [request(run_id, {"run": row}) for row in rows]


def mixed(mix: Mix, run_id: str) -> list[RolloutRequest]:
    """Return the rollouts of a mix."""
    rng = random.Random(SEED)

    def draw(stage: Stage) -> float:
        sigma = SIGMAS[stage]
        return mix.means[stage] * rng.lognormvariate(-sigma * sigma / 2, sigma)

    return [request(run_id, {"init": draw("init"), "run": [draw("run")], "eval": draw("eval")}) for _ in range(MIXED)]
