"""What the rollouts of the service's bench do: nothing, or wait. All workloads and sizes stand here.

Fixed before the first measurement. A record is 20 kB of JSON: 900 tokens, each with id, mask, log-prob and version.
"""

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from _report import SHORT
from simulation.planned_rollouts import Plan, PlannedEnvironment, Shape, Stage, Turn

from prorl_gym.inference.tokens.turn_log import TurnLog
from prorl_gym.records import NOT_SAMPLED, Generation, RolloutRequest, Segment
from prorl_gym.rollout.protocol import Job
from prorl_gym.settings import ResolvedSettings, RolloutSettings
from prorl_gym.testing.rollout.fake_rollout import FakePolicySource, FakeSession

ENVIRONMENT = "timed"
TOKENS, PROMPT = 900, 300
"""Of a record; how many of them are its prompt."""
SEED = 20
RUNS = 1 if SHORT else 3

BATCH = 64
BATCHED = 640 if SHORT else 6400
WINDOW = 8 * BATCH
"""Rollouts under way at most, when they are submitted in batches."""
SINGLE = 400 if SHORT else 4000
CALLERS = 64
TARGETS = {"batches": 2000.0, "single": 1200.0, "gym": 200.0}
"""Rollouts per second."""
ARRIVAL_RATE = 200.0
"""Rollouts per second, posted one by one, while their latency is measured."""
LATENCY_SECONDS = 2.0 if SHORT else 20.0
P50_MS, P99_MS = 3.0, 15.0

QUEUED, RUNNING = (1000, 100) if SHORT else (10_000, 1000)
SPARE = 200 if SHORT else 2000
"""Beyond them, so that as many are queued when the look ends."""
WATCHED_SECONDS = 3.0 if SHORT else 30.0
TURNS, TURN_SECONDS = 20, 2.0
"""Of an agent that waits: how often, and for how long on average (exponential)."""
RSS_MB, LAG_MS = 500.0, 50.0


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

CANCELLED = 8 if SHORT else 64
"""Rollouts at work, cancelled one by one; then as many again, in groups."""
GROUP = 8
DEAD_MS, GONE_S = 200.0, 3.0


@dataclass(frozen=True, slots=True)
class Span:
    """A wait as it happened."""

    began: float
    ended: float
    seconds: float
    """That were asked for: a late event loop is no work."""


class TimedEnvironment(PlannedEnvironment):
    """Every stage takes as many seconds as the row says: ``init``, ``run`` after each model call, and ``eval``."""

    name = ENVIRONMENT
    settings = RolloutSettings()

    def __init__(self, *, record: bool = False) -> None:
        super().__init__(Shape(), random.Random(0))
        self.spans: dict[Stage, list[Span]] = {"init": [], "run": [], "eval": []}
        self._record = record

    def parse_row(self, row: Mapping[str, Any]) -> Plan:
        turns = tuple(Turn(output=0, observation=0, tool_seconds=seconds) for seconds in row.get("run", (0.0,)))
        return Plan(turns, row.get("init", 0.0), row.get("eval", 0.0), reward=1.0, ending="ok")

    async def pass_time(self, stage: Stage, seconds: float) -> None:
        if not seconds:
            return
        began = time.monotonic()
        await asyncio.sleep(seconds)
        if self._record:
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
        self.opened += 1
        return _Session(self, evaluation=job.request.evaluation)


_RNG = random.Random(SEED)
_SAMPLED = TOKENS - PROMPT
_IDS = [_RNG.randrange(10_000, 100_000) for _ in range(TOKENS)]
_MASK: list[Literal[0, 1]] = [0 if place < PROMPT else 1 for place in range(TOKENS)]
_LOGPROBS = [0.0] * PROMPT + [-round(_RNG.expovariate(2.0), 12) for _ in range(_SAMPLED)]
_VERSIONS = [NOT_SAMPLED] * PROMPT + [0] * _SAMPLED


def request(run_id: str, task: Mapping[str, Any] | None = None) -> RolloutRequest:
    return RolloutRequest(run_id=run_id, environment=ENVIRONMENT, task=dict(task or {"question": "q" * 200}))


def waiting(count: int, run_id: str) -> list[RolloutRequest]:
    rng = random.Random(SEED)
    rows = [[round(rng.expovariate(1 / TURN_SECONDS), 3) for _ in range(TURNS)] for _ in range(count)]
    return [request(run_id, {"run": row}) for row in rows]


def mixed(mix: Mix, run_id: str) -> list[RolloutRequest]:
    rng = random.Random(SEED)

    def draw(stage: Stage) -> float:
        sigma = SIGMAS[stage]
        return mix.means[stage] * rng.lognormvariate(-sigma * sigma / 2, sigma)

    return [request(run_id, {"init": draw("init"), "run": [draw("run")], "eval": draw("eval")}) for _ in range(MIXED)]
