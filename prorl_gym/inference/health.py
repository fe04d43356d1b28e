"""Engines that failed are left alone until a trial in the background shows that they sample again.

A server that hangs may answer every route but the one that samples, so its word is not enough: before it takes calls
again it has to sample a few tokens. One that fails again and again is left alone for longer each time; what it is
forgiven, it is forgiven for calls that it answered.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.failover import Failover, look
from prorl_gym.inference.faults import ModelMissing
from prorl_gym.inference.members import Member, Roster
from prorl_gym.inference.protocol import EngineHealth

log = logging.getLogger(__name__)


class HealthWatch:
    """Takes members of a pool out of service, and back.

    Args:
        pool: its name.
        roster: its members.
        failover: how often to probe.
        well: told what an engine said that is well.
    """

    def __init__(self, pool: str, roster: Roster, failover: Failover, well: Callable[[EngineHealth], None]) -> None:
        self._pool = pool
        self._roster = roster
        self._failover = failover
        self._well = well
        self._probes: dict[Member, asyncio.Task[None]] = {}
        self._trials: dict[Member, asyncio.Task[float | EngineError]] = {}

    async def check(self) -> dict[str, EngineHealth]:
        """Ask every engine how it is; those that are not well are left out until a probe finds them well."""
        members = self._roster.all
        answers = await asyncio.gather(*(self._ask(member) for member in members))
        for member, health in zip(members, answers, strict=True):
            if health.ok:
                self._well(health)
            else:
                self.take_out(member, health.detail or "not well")
        return {member.name: health for member, health in zip(members, answers, strict=True)}

    def take_out(self, member: Member, detail: str, delay: float | None = None) -> None:
        """Leave an engine alone, at least for so many seconds. One that has left the pool is nobody's concern."""
        if not self._roster.has(member):
            return
        member.trouble = detail
        self._roster.changes.announce()  # calls may now wait for something else
        if member not in self._probes:
            pause = self._failover.rest(member.relapses, delay)
            member.relapses += delay is None  # one that asks to be left alone is busy, not broken
            member.proven = 0
            self._probes[member] = asyncio.create_task(self._probe(member, pause))

    async def try_out(self, member: Member) -> float | EngineError:
        """Let an engine sample a few tokens: return the seconds of each, or why it did not. Callers share a trial."""
        trial = self._trials.get(member)
        if trial is None:
            trial = self._trials[member] = asyncio.create_task(self._try_out(member))
            trial.add_done_callback(lambda _: self._trials.pop(member, None))
        return await asyncio.shield(trial)

    def give_up(self, member: Member) -> None:
        """It has left the pool."""
        for task in (self._probes.pop(member, None), self._trials.pop(member, None)):
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        """Stop probing. Idempotent."""
        tasks: list[asyncio.Task[Any]] = [*self._probes.values(), *self._trials.values()]
        self._probes.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, member: Member, *, trial: bool = False) -> EngineHealth:
        """Ask an engine how it is, and let it show that it samples where its word is not enough."""
        health, shown = await look(member.engine), None
        if health.ok and (trial or health.unlisted):
            shown = await self.try_out(member)
        if isinstance(shown, EngineError):
            missing = health.unlisted or (shown.what if isinstance(shown, ModelMissing) else "")
            health = EngineHealth(ok=False, detail=missing or shown.what, unlisted=missing)
        member.lacks_model = not health.ok and bool(health.unlisted)
        return health

    async def _probe(self, member: Member, delay: float) -> None:
        """Ask a failed engine until it is well, ever less often, then take it back into service."""
        while True:
            await asyncio.sleep(delay)
            health = await self._ask(member, trial=True)
            if health.ok:
                break
            member.trouble = health.detail or "not well"
            self._roster.changes.announce()
            delay = min(max(2 * delay, self._failover.first_probe), self._failover.slowest_probe)
        del self._probes[member]
        self._well(health)
        member.trouble = ""
        log.info("pool %s: engine %s is well again", self._pool, member.name)
        self._roster.arrived(member)

    async def _try_out(self, member: Member) -> float | EngineError:
        seconds = self._failover.trial_seconds
        try:
            async with asyncio.timeout(seconds):
                return await member.engine.sample_some(seconds)
        except EngineError as error:
            return error
        except TimeoutError:
            reason = f"sampled nothing for {seconds:g} s"
        except Exception as error:  # an adapter's defect: the engine cannot be used either way, and the log has it
            log.exception("engine %s: the trial broke", member.name)
            reason = f"its trial broke ({type(error).__name__})"
        return EngineError(FailureKind.ENGINE_TIMEOUT, f"engine {member.name}: {reason}.")
