"""Watches the engines of a pool: takes failed ones out of service until they sample again, and reads their metrics.

A server that hangs may answer every route but the one that samples. So before it takes calls again it has to sample a
few tokens. The delay between trials grows with each failure and shrinks with calls that the engine answers. It does not
grow with calls that fail at once among answered ones: they cost little, and one engine may be all there is.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from prorl_gym.backoff import backoff_delay
from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.members import PoolMember, PoolMembers
from prorl_gym.inference.protocol import EngineHealth, ModelMissing
from prorl_gym.records import EngineLoad

log = logging.getLogger(__name__)

FAILOVER_KINDS = frozenset(
    {
        FailureKind.ENGINE_UNREACHABLE,
        FailureKind.ENGINE_TIMEOUT,
        FailureKind.ENGINE_OVERLOADED,
        FailureKind.ENGINE_CONTRACT,
    }
)
"""Not ``ENGINE_REFUSED``: every engine of a pool would refuse the same request."""

_SKIPPED_ROUNDS = 12
"""Reads of metrics that skip an engine without any before it is tried again."""

_JITTER = 0.1
"""Share of the interval by which it varies, so that the pools of many services do not read in step."""


@dataclass(frozen=True, slots=True)
class FailoverOptions:
    """How often a call is retried on other engines. Times in seconds."""

    max_attempts: int = 3
    """Engines that one call is tried on."""
    recovery_seconds: float = 30.0
    """Longest wait for an engine to recover when none is well."""
    first_probe_seconds: float = 0.05
    """Delay before a failed engine is probed; doubled after each failed probe."""
    max_probe_seconds: float = 10.0
    trial_seconds: float = 5.0
    """Longest time that an engine may take to show that it samples."""

    def backoff_seconds(self, failures: int, retry_after: float | None = None) -> float:
        """Return the seconds before the next probe after so many failures, or the ``Retry-After``; bounded."""
        if retry_after is not None:
            return min(retry_after, self.max_probe_seconds)
        return backoff_delay(failures, first=self.first_probe_seconds, longest=self.max_probe_seconds)


class HealthMonitor:
    """Takes members of a pool out of service, and back. ``on_healthy`` gets the health of each engine that is well."""

    def __init__(
        self, pool: str, members: PoolMembers, failover: FailoverOptions, on_healthy: Callable[[EngineHealth], None]
    ) -> None:
        self._pool = pool
        self._members = members
        self._failover = failover
        self._on_healthy = on_healthy
        self._probes: dict[PoolMember, asyncio.Task[None]] = {}
        self._trials: dict[PoolMember, asyncio.Task[float | EngineError]] = {}

    async def check(self, member: PoolMember) -> EngineHealth:
        """Check an engine; one that is not well gets no calls until a probe finds it well."""
        health = await self._check_member(member)
        if health.ok:
            self._on_healthy(health)
        else:
            self.take_out_of_service(member, health.detail or "not well")
        return health

    def take_out_of_service(
        self, member: PoolMember, detail: str, delay: float | None = None, *, failed_at_once: bool = False
    ) -> None:
        """Give an engine no calls, for at least so many seconds. Ignored if it has left the pool."""
        if not self._members.has(member):
            return
        member.unhealthy_reason, member.unhealthy_since = detail, member.unhealthy_since or time.time()
        self._members.changes.notify_all()  # calls may now wait for something else
        if member not in self._probes:
            pause = self._failover.backoff_seconds(member.backoff_level, delay)
            is_broken = delay is None  # one with Retry-After is busy
            member.backoff_level += is_broken and not (failed_at_once and member.answered_since_failure)
            member.answered_since_failure = 0
            self._probes[member] = asyncio.create_task(self._probe_until_healthy(member, pause))

    async def run_trial(self, member: PoolMember) -> float | EngineError:
        """Have an engine sample a few tokens; return the seconds of each, or the error. Callers share a trial."""
        trial = self._trials.get(member)
        if trial is None:
            trial = self._trials[member] = asyncio.create_task(self._run_trial(member))
            trial.add_done_callback(lambda _: self._trials.pop(member, None))
        return await asyncio.shield(trial)

    def stop_probing(self, member: PoolMember) -> None:
        for task in (self._probes.pop(member, None), self._trials.pop(member, None)):
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any]] = [*self._probes.values(), *self._trials.values()]
        self._probes.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _check_member(self, member: PoolMember, *, trial: bool = False) -> EngineHealth:
        """Check an engine, with a trial of whether it samples where its health route does not show it."""
        shown = None
        try:
            health = await member.engine.health()
        except Exception as error:  # an adapter's defect
            log.exception("engine %s: its health check broke", member.name)
            health = EngineHealth(ok=False, detail=f"its health check broke ({type(error).__name__})")
        if health.ok and (trial or health.unlisted_model):
            shown = await self.run_trial(member)
        if isinstance(shown, EngineError):
            missing = health.unlisted_model or (shown.what if isinstance(shown, ModelMissing) else "")
            health = EngineHealth(ok=False, detail=missing or shown.what, unlisted_model=missing)
        member.lacks_model = not health.ok and bool(health.unlisted_model)
        return health

    async def _probe_until_healthy(self, member: PoolMember, delay: float) -> None:
        while True:
            await asyncio.sleep(delay)
            health = await self._check_member(member, trial=True)
            if health.ok:
                break
            member.unhealthy_reason = health.detail or "not well"
            self._members.changes.notify_all()
            delay = min(max(2 * delay, self._failover.first_probe_seconds), self._failover.max_probe_seconds)
        del self._probes[member]
        self._on_healthy(health)
        member.unhealthy_reason, member.unhealthy_since = "", None
        log.info("pool %s: engine %s is well again", self._pool, member.name)
        self._members.announce_member(member)

    async def _run_trial(self, member: PoolMember) -> float | EngineError:
        seconds = self._failover.trial_seconds
        try:
            async with asyncio.timeout(seconds):
                return await member.engine.sample_trial(seconds)
        except EngineError as error:
            return error
        except TimeoutError:
            reason = f"sampled nothing for {seconds:g} s"
        except Exception as error:  # an adapter's defect: the engine cannot be used either way
            log.exception("engine %s: the trial broke", member.name)
            reason = f"its trial broke ({type(error).__name__})"
        return EngineError(FailureKind.ENGINE_TIMEOUT, f"engine {member.name}: {reason}.")


class MetricsScraper:
    """Reads the metrics of a pool's engines at intervals, for balancing and admission.

    ``on_loads`` gets the metrics of every engine that showed some at a read, ``on_restart`` each engine whose counters
    started over, and ``on_silence`` each engine that showed metrics before and now does not: it may be gone.
    """

    def __init__(
        self,
        name: str,
        members: PoolMembers,
        seconds: float,
        on_loads: Callable[[Mapping[str, EngineLoad]], None],
        on_restart: Callable[[PoolMember], None],
        on_silence: Callable[[PoolMember], Awaitable[object]],
    ) -> None:
        self._name = name
        self._members = members
        self._seconds = seconds
        self._on_loads = on_loads
        self._on_restart = on_restart
        self._on_silence = on_silence
        self._random = Random(name)
        self._rounds_to_skip: dict[PoolMember, int] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"metrics of pool {self._name}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def scrape_once(self) -> None:
        members = [member for member in self._members.all if not member.unhealthy_reason and self._is_due(member)]
        answers = await asyncio.gather(*(member.engine.read_load() for member in members))
        loads: dict[str, EngineLoad] = {}
        for member, load in zip(members, answers, strict=True):
            if not self._members.has(member):
                continue
            before = member.load
            if load is None:
                self._rounds_to_skip[member] = _SKIPPED_ROUNDS
                if before is not None:
                    await self._on_silence(member)
                continue
            if before is not None and (
                load.preemptions < before.preemptions or load.prefix_queries < before.prefix_queries
            ):
                self._on_restart(member)
            member.load = loads[member.name] = load
        self._on_loads(loads)

    async def _run(self) -> None:
        while True:
            try:
                await self.scrape_once()
            except Exception:  # an adapter's defect: this read is lost
                log.exception("pool %s: reading the engines' metrics broke", self._name)
            await asyncio.sleep(self._seconds * self._random.uniform(1 - _JITTER, 1 + _JITTER))

    def _is_due(self, member: PoolMember) -> bool:
        rest = self._rounds_to_skip.pop(member, 0)
        if rest > 1:
            self._rounds_to_skip[member] = rest - 1
        return rest <= 1
