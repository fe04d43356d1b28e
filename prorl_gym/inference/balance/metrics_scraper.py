"""Reads the engines' own metrics at intervals, for balancing and admission."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from random import Random

from prorl_gym.inference.balance.members import PoolMember, PoolMembers
from prorl_gym.records import EngineLoad

log = logging.getLogger(__name__)

_SKIPPED_ROUNDS = 12
"""Reads that skip an engine without metrics before it is tried again."""

_JITTER = 0.1
"""Share of the interval by which it varies, so that the pools of many services do not read in step."""


class MetricsScraper:
    """Reads the metrics of a pool's engines.

    Args:
        name: of the pool.
        members: its members.
        seconds: between two looks.
        on_loads: given the figures of every engine that showed some at a look.
        on_restart: called with each engine whose counters began anew: it was restarted.
        on_silence: awaited with each engine that showed figures before and now does not: it may be gone.
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
        """Start reading. Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"figures of pool {self._name}")

    async def close(self) -> None:
        """Stop. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def scrape_once(self) -> None:
        """Read the metrics of all engines that are well once."""
        members = [member for member in self._members.all if not member.unhealthy_reason and self._is_due(member)]
        answers = await asyncio.gather(*(member.engine.read_load() for member in members))
        loads: dict[str, EngineLoad] = {}
        for member, load in zip(members, answers, strict=True):
            if not self._members.has(member):
                continue
            if load is None:
                self._rounds_to_skip[member] = _SKIPPED_ROUNDS
                if member.load is not None:
                    await self._on_silence(member)
                continue
            if member.load is not None and _was_restarted(member.load, load):
                self._on_restart(member)
            member.load = loads[member.name] = load
        self._on_loads(loads)

    async def _run(self) -> None:
        while True:
            try:
                await self.scrape_once()
            except Exception:  # an adapter's defect: this read is lost
                log.exception("pool %s: reading the engines' figures broke", self._name)
            await asyncio.sleep(self._seconds * self._random.uniform(1 - _JITTER, 1 + _JITTER))

    def _is_due(self, member: PoolMember) -> bool:
        rest = self._rounds_to_skip.pop(member, 0)
        if rest > 1:
            self._rounds_to_skip[member] = rest - 1
        return rest <= 1


def _was_restarted(before: EngineLoad, now: EngineLoad) -> bool:
    return now.preemptions < before.preemptions or now.prefix_queries < before.prefix_queries
