"""The service's memory of its own work: counts of rollouts, reported mismatches, and figures over time.

All of it is in memory. Rates are over the time since the sample before, so that a sample that comes late is right, too.
"""

import asyncio
import logging
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Self

from prorl_gym.client.wire_models import HistoryResponse, MismatchBody, MismatchReport, OutcomeCount, RewardMean
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.records import Rollout
from prorl_gym.rollout.service import RolloutService

_LOG = logging.getLogger(__name__)

MAX_RUNS = 16
"""Runs of which reports are kept: those that reported last."""

MAX_VERSIONS = 256
"""Reports that are kept of a run: the latest."""

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
        """Those of ``sampled_tokens`` in records without a reward."""
        self.retries: Counter[str] = Counter()
        """Repeated attempts, by the failure of the one before."""
        self.outcomes: Counter[tuple[str, str, str, str]] = Counter()
        """By environment, status, cause and detail, each from a bounded set."""
        self.rewards: dict[str, tuple[int, float]] = {}
        """Number and sum of rewards by environment."""

    def count_rollout(self, rollout: Rollout) -> None:
        tokens = rollout.sampled_tokens
        self.finished += 1
        self.sampled_tokens += tokens
        self.wasted_tokens += 0 if rollout.score is not None else tokens
        self.retries.update(retry.kind.value for retry in rollout.retries)
        # The name of an unknown environment comes from a client: such names have no bound, and are left empty.
        environment = rollout.environment if rollout.settings is not None else ""
        self.tokens_by_environment[environment] += tokens
        outcome = rollout.outcome
        detail = outcome.kind or outcome.limit or outcome.reason
        cause = outcome.cause.value if outcome.cause else ""
        way = environment, outcome.status, cause, detail.value if detail else ""
        if way in self.outcomes or len(self.outcomes) < _MAX_OUTCOMES:
            self.outcomes[way] += 1
        if rollout.reward is not None:
            count, total = self.rewards.get(rollout.environment, (0, 0.0))
            self.rewards[rollout.environment] = count + 1, total + rollout.reward

    def outcome_counts(self) -> list[OutcomeCount]:
        """Return how many ended in which way, the most frequent first."""
        return [
            OutcomeCount(environment=environment, status=status, cause=cause, detail=detail, count=count)
            for (environment, status, cause, detail), count in self.outcomes.most_common()
        ]

    def reward_means(self) -> list[RewardMean]:
        return [
            RewardMean(environment=name, count=count, mean=total / count)
            for name, (count, total) in sorted(self.rewards.items())
        ]


class MismatchReports:
    """The mismatch of log-probs that trainers report, by run and policy version."""

    def __init__(self) -> None:
        self.count = 0
        """Reports since the start."""
        self._by_run: OrderedDict[str, OrderedDict[int, MismatchReport]] = OrderedDict()

    def add(self, run_id: str, body: MismatchBody) -> MismatchReport:
        """Keep a report; it replaces an earlier one of the same run and version."""
        report = MismatchReport(run_id=run_id, version=body.version, reported_at=time.time(), mismatch=body.mismatch)
        reports = self._by_run.setdefault(run_id, OrderedDict())
        reports[body.version] = report
        reports.move_to_end(body.version)
        self._by_run.move_to_end(run_id)
        if len(reports) > MAX_VERSIONS:
            reports.popitem(last=False)
        if len(self._by_run) > MAX_RUNS:
            self._by_run.popitem(last=False)
        self.count += 1
        return report

    def of_run(self, run_id: str) -> tuple[MismatchReport, ...]:
        """Return the reports of a run in the order in which they came."""
        return tuple(self._by_run[run_id].values()) if run_id in self._by_run else ()

    def latest(self) -> tuple[MismatchReport, ...]:
        """Return the latest report of each run; the newest is the last."""
        return tuple(next(reversed(reports.values())) for reports in self._by_run.values())


def pool_problem(pools: Sequence[EnginePool]) -> str:
    """Return why the first pool that samples nothing does not; empty if all do. The cause follows the first colon."""
    return next(filter(None, (pool.problem for pool in pools)), "")


def find_problem(service: RolloutService, pools: Sequence[EnginePool]) -> str:
    """Return what keeps rollouts from being made, its cause and what to do, in one line; empty if nothing does."""
    return service.problem or pool_problem(pools)


class ProblemLog:
    """Logs a line when a problem begins, changes or ends."""

    def __init__(self) -> None:
        self._last = ""

    def report(self, problem: str) -> None:
        """Report the problem there is now; empty: there is none."""
        if problem and problem != self._last:
            _LOG.warning("%s", problem)
        elif self._last and not problem:
            _LOG.info("over: %s", self._last.partition(":")[0])
        self._last = problem


class LoopLagMonitor:
    """Measures how late the event loop runs a timer."""

    def __init__(self) -> None:
        self._measurements: deque[float] = deque(maxlen=_MAX_LAG_MEASUREMENTS)
        self.observers: list[Callable[[float], None]] = []
        """Called with each measurement, in seconds."""

    @property
    def max_seconds(self) -> float | None:
        """Seconds, of the last minute; ``None`` while it is not measured."""
        return max(self._measurements, default=None)

    async def measure(self) -> None:
        """Measure until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_INTERVAL_SECONDS
            await asyncio.sleep(_LAG_INTERVAL_SECONDS)
            late = max(0.0, loop.time() - due)
            self._measurements.append(late)
            for observer in self.observers:
                observer(late)


class History:
    """A ring of samples, one column per figure: the last hour."""

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
        self._samples: deque[tuple[float, dict[str, float | None]]] = deque(maxlen=max_samples)
        self._last_totals = self._totals()
        self._problems = ProblemLog()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._last_totals = self._totals()
        self._tasks = {asyncio.create_task(self._run(), name="history"), asyncio.create_task(self.lag.measure())}
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def record_sample(self) -> None:
        status = await self._service.status()
        now, before = self._totals(), self._last_totals
        self._last_totals = now
        seconds, finished, tokens, rewards, reward = (new - old for new, old in zip(now, before, strict=True))
        past = max(seconds, 1e-9)
        capacity = status.capacity
        values: dict[str, float | None] = {
            "queued": status.queued,
            "running": status.running,
            "runner_queue": capacity.queued,
            "init": capacity.init,
            "run": capacity.run,
            "eval": capacity.eval,
            "parked": capacity.parked,
            "finished_per_second": finished / past,
            "tokens_per_second": tokens / past,
            "mean_reward": reward / rewards if rewards else None,
            "event_loop_lag_seconds": self.lag.max_seconds,
            **self._mismatch_values(),
            **self._engine_values(),
        }
        self._samples.append((time.time(), values))

    def snapshot(self) -> HistoryResponse:
        """Return all samples, oldest first."""
        samples = self._samples
        names = dict.fromkeys(name for _, values in samples for name in values)
        return HistoryResponse(
            interval_seconds=self._interval_seconds,
            times=[round(at, 3) for at, _ in samples],
            # Four digits are plenty for a curve, and keep the answer small.
            columns={
                name: [None if (value := values.get(name)) is None else float(f"{value:.5g}") for _, values in samples]
                for name in names
            },
        )

    async def _run(self) -> None:
        while True:
            await self.record_sample()
            self._problems.report(find_problem(self._service, self._pools))
            await asyncio.sleep(self._interval_seconds)

    def _totals(self) -> tuple[float, ...]:
        """Return the time, the numbers of rollouts, tokens and rewards so far, and the sum of the rewards."""
        counters, rewards = self._counters, self._counters.rewards.values()
        count, total = sum(count for count, _ in rewards), sum(total for _, total in rewards)
        return time.monotonic(), counters.finished, counters.sampled_tokens, count, total

    def _mismatch_values(self) -> dict[str, float | None]:
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
