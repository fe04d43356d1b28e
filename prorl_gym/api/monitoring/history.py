"""Counts of finished rollouts, and figures over time for the dashboard.

Rates are over the time since the sample before, so that a sample that comes late is still right.
"""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from prorl_gym.api.monitoring.mismatch_reports import MismatchReports
from prorl_gym.api.monitoring.problems import ProblemLog, find_problem
from prorl_gym.client.wire_models import HistoryResponse, OutcomeCount, RewardMean
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.records import Rollout
from prorl_gym.rollout.service import RolloutService

_LAG_INTERVAL_SECONDS = 0.25
"""Between two measurements of the event loop's lag."""

_MAX_LAG_MEASUREMENTS = 240
"""Measurements that are kept: one minute."""

_MAX_ENGINES = 64
"""Engines with columns of their own; more would make the answer large and the page unreadable."""

_MAX_OUTCOMES = 4096
"""Outcomes that are counted apart: a bound, though environments and kinds are few."""


class RolloutCounters:
    """Counts since the start, for the status, the dashboard's curves and the metrics."""

    def __init__(self) -> None:
        self.finished = 0
        self.sampled_tokens = 0
        self.tokens_by_environment: Counter[str] = Counter()
        """``sampled_tokens`` by environment."""
        self.wasted_tokens = 0
        """Of ``sampled_tokens``, those in records without a reward."""
        self.retries: Counter[str] = Counter()
        """Repeated attempts, by the failure of the one before."""
        self._outcomes: Counter[tuple[str, str, str, str]] = Counter()
        self._rewards: dict[str, _Rewards] = {}

    def count_rollout(self, rollout: Rollout) -> None:
        """Count a record."""
        tokens = rollout.sampled_tokens
        self.finished += 1
        self.sampled_tokens += tokens
        self.wasted_tokens += 0 if rollout.score is not None else tokens
        way = _outcome_labels(rollout)
        self.retries.update(retry.kind.value for retry in rollout.retries)
        self.tokens_by_environment[way[0]] += tokens
        if way in self._outcomes or len(self._outcomes) < _MAX_OUTCOMES:
            self._outcomes[way] += 1
        if rollout.reward is not None:
            rewards = self._rewards.setdefault(rollout.environment, _Rewards())
            rewards.count += 1
            rewards.total += rollout.reward

    def outcome_counts(self) -> list[OutcomeCount]:
        """Return how many ended in which way, the most frequent first."""
        return [
            OutcomeCount(environment=environment, status=status, cause=cause, detail=detail, count=count)
            for (environment, status, cause, detail), count in self._outcomes.most_common()
        ]

    def reward_means(self) -> list[RewardMean]:
        """Return the mean reward of each environment."""
        return [
            RewardMean(environment=name, count=one.count, mean=one.total / one.count)
            for name, one in sorted(self._rewards.items())
        ]

    @property
    def reward_totals(self) -> tuple[int, float]:
        """How many rewards there were, and their sum."""
        rewards = self._rewards.values()
        return sum(one.count for one in rewards), sum(one.total for one in rewards)


@dataclass(slots=True)
class _Rewards:
    count: int = 0
    total: float = 0.0


def _outcome_labels(rollout: Rollout) -> tuple[str, str, str, str]:
    """Return environment, status, cause and detail of a record, each from a bounded set.

    The name of an unknown environment comes from a client, so such names are unbounded; they are left empty.
    """
    outcome = rollout.outcome
    detail = outcome.kind or outcome.limit or outcome.reason
    cause = outcome.cause.value if outcome.cause else ""
    environment = rollout.environment if rollout.settings is not None else ""
    return environment, outcome.status, cause, detail.value if detail else ""


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    values: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class _Totals:
    at: float
    finished: int
    tokens: int
    rewards: int
    reward: float


class LoopLagMonitor:
    """Measures how late the event loop runs a timer."""

    def __init__(self) -> None:
        self._measurements: deque[float] = deque(maxlen=_MAX_LAG_MEASUREMENTS)
        self._timer: asyncio.TimerHandle | None = None
        self.observers: list[Callable[[float], None]] = []
        """Called with each measurement, in seconds."""

    @property
    def max_seconds(self) -> float | None:
        """Seconds, of the last minute; ``None`` while it is not measured."""
        return max(self._measurements, default=None)

    def start_measuring(self) -> None:
        """Start measuring. Idempotent."""
        if self._timer is None:
            self._schedule()

    def stop_measuring(self) -> None:
        """Stop measuring. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + _LAG_INTERVAL_SECONDS
        self._timer = loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        late = max(0.0, asyncio.get_running_loop().time() - due)
        self._measurements.append(late)
        for observer in self.observers:
            observer(late)
        self._schedule()


class History:
    """A ring of samples, one column per figure: the last hour.

    Args:
        service: of its occupancy.
        counters: of its finished rollouts.
        pools: of its engines.
        mismatches: that trainers reported.
        interval_seconds: between two samples.
        max_samples: samples that are kept.
    """

    def __init__(
        self,
        service: RolloutService,
        counters: RolloutCounters,
        pools: Sequence[EnginePool] = (),
        mismatches: MismatchReports | None = None,
        *,
        interval_seconds: float = 5.0,
        max_samples: int = 720,
    ) -> None:
        self.lag = LoopLagMonitor()
        self._service = service
        self._counters = counters
        self._pools = pools
        self._mismatches = mismatches or MismatchReports()
        self._interval_seconds = interval_seconds
        self._samples: deque[_Sample] = deque(maxlen=max_samples)
        self._last_totals = self._totals()
        self._problems = ProblemLog()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.lag.start_measuring()
        self._last_totals = self._totals()
        self._task = asyncio.create_task(self._run(), name="history")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.lag.stop_measuring()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def record_sample(self) -> None:
        """Take one sample now."""
        status = await self._service.status()
        now, before = self._totals(), self._last_totals
        self._last_totals = now
        past = max(now.at - before.at, 1e-9)
        rewards = now.rewards - before.rewards
        capacity = status.capacity
        values: dict[str, float | None] = {
            "queued": status.queued,
            "running": status.running,
            "runner_queue": capacity.queued,
            "init": capacity.init,
            "run": capacity.run,
            "eval": capacity.eval,
            "parked": capacity.parked,
            "finished_per_second": (now.finished - before.finished) / past,
            "tokens_per_second": (now.tokens - before.tokens) / past,
            "mean_reward": (now.reward - before.reward) / rewards if rewards else None,
            "event_loop_lag_seconds": self.lag.max_seconds,
            **self._mismatch_values(),
            **self._engine_values(),
        }
        self._samples.append(_Sample(time.time(), values))

    def snapshot(self) -> HistoryResponse:
        """Return all samples, oldest first."""
        names = dict.fromkeys(name for sample in self._samples for name in sample.values)
        return HistoryResponse(
            interval_seconds=self._interval_seconds,
            times=[round(sample.at, 3) for sample in self._samples],
            columns={name: [_rounded(sample.values.get(name)) for sample in self._samples] for name in names},
        )

    async def _run(self) -> None:
        while True:
            await self.record_sample()
            self._problems.report(find_problem(self._service, self._pools))
            await asyncio.sleep(self._interval_seconds)

    def _totals(self) -> _Totals:
        rewards, total = self._counters.reward_totals
        return _Totals(time.monotonic(), self._counters.finished, self._counters.sampled_tokens, rewards, total)

    def _mismatch_values(self) -> dict[str, float | None]:
        """Return the figures of the report that came last."""
        totals = [report.mismatch.total for report in self._mismatches.latest()[-1:]]
        figures = {f"mismatch_{name}": getattr(one, name) for one in totals for name in ("max_abs_diff", "kl")}
        return {name: value if math.isfinite(value) else None for name, value in figures.items()}

    def _engine_values(self) -> dict[str, float | None]:
        values: dict[str, float | None] = {}
        engines = [engine for pool in self._pools for engine in pool.snapshot().engines]
        for engine in engines[:_MAX_ENGINES]:
            values[f"engine.{engine.name}.in_flight"] = engine.in_flight
            values[f"engine.{engine.name}.kv_usage"] = None if engine.load is None else engine.load.kv_usage
            values[f"engine.{engine.name}.hit_rate"] = engine.cache_hit_rate
            values[f"engine.{engine.name}.version"] = engine.version
        return values


def _rounded(value: float | None) -> float | None:
    """Four digits are plenty for a curve, and keep the answer small."""
    return None if value is None else float(f"{value:.5g}")
