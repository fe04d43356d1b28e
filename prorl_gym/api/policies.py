"""The policy as a trainer steers it over HTTP: one steady hand on each pool's lifecycle and fleet.

An update is what its body says: the same body again, after a lost answer, joins the update that is under way or repeats
what it came to. Another body for the version that is served is refused, as it is for a rollout's id.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

from prorl_gym.api.answers import Refusal
from prorl_gym.api.fleet import Fleet
from prorl_gym.api.schema import (
    AdmissionState,
    EngineAnswer,
    EngineState,
    PausedAnswer,
    PolicyAnswer,
    PolicyBody,
    PoolState,
    UpdateAnswer,
)
from prorl_gym.inference.lifecycle import PolicyLifecycle, Updated
from prorl_gym.inference.pool import EnginePool


class PolicyDesk:
    """One pool.

    Args:
        pool: its engines.
        lifecycle: pauses and updates it.
        fleet: who belongs to it.
        told: called with each version that engines serve from now on, and the name of the pool.
    """

    def __init__(
        self,
        pool: EnginePool,
        lifecycle: PolicyLifecycle,
        fleet: Fleet | None = None,
        told: Callable[[int, str], Awaitable[None]] | None = None,
    ) -> None:
        self.pool = pool
        self.fleet = fleet or Fleet(pool)
        self._lifecycle = lifecycle
        self._told = told
        self._last: tuple[PolicyBody, asyncio.Task[Updated]] | None = None

    def look(self) -> PolicyAnswer:
        """Return what serves the policy."""
        return PolicyAnswer(pool=self.state(), probe_ids=list(self._lifecycle.probe_ids))

    def state(self) -> PoolState:
        """Return how the pool stands."""
        return pool_state(self.pool, self.fleet)

    async def update(self, body: PolicyBody) -> UpdateAnswer:
        """See ``PolicyLifecycle.update``, which this outlives: a trainer that hangs up does not undo it.

        Raises:
            Refusal: an engine is not allowed.
            LifecycleError: see there.
        """
        if self._last is not None and self._last[0] != body and not self._last[1].done():
            raise Refusal(
                409,
                f"pool {self.pool.name}: the update to version {self._last[0].version} is under way.",
                "Wait for it.",
            )
        if self._last is None or self._last[0] != body or _failed(self._last[1]):
            self._last = (body, asyncio.create_task(self._update(body), name=f"update {self.pool.name}"))
        updated = await asyncio.shield(self._last[1])
        return UpdateAnswer(
            version=updated.version,
            serving=list(updated.serving),
            quarantined=dict(updated.quarantined),
            unproven=list(updated.unproven),
            leaving=self.fleet.leaving,
        )

    async def pause(self, mode: Literal["abort", "drain", "keep"]) -> PausedAnswer:
        """See ``PolicyLifecycle.pause``."""
        await self._lifecycle.pause(mode)
        return PausedAnswer(pool=self.pool.name, paused=True)

    async def resume(self) -> PausedAnswer:
        """See ``PolicyLifecycle.resume``."""
        await self._lifecycle.resume()
        return PausedAnswer(pool=self.pool.name, paused=False)

    def add_engine(self, url: str) -> EngineAnswer:
        """See ``Fleet.add``."""
        name = self.fleet.add(url)
        return EngineAnswer(name=name, url=self.fleet.url(name), draining=False)

    def remove_engine(self, name: str) -> EngineAnswer:
        """See ``Fleet.drain``."""
        self.fleet.drain(name)
        return EngineAnswer(name=name, url=self.fleet.url(name), draining=True)

    async def close(self) -> None:
        """End what is under way. Idempotent."""
        if self._last is not None and not self._last[1].done():
            self._last[1].cancel()
            await asyncio.wait({self._last[1]})
        await self.fleet.close()

    async def _update(self, body: PolicyBody) -> Updated:
        if body.engines is not None:
            self.fleet.become(body.engines)
        updated = await self._lifecycle.update(
            body.version, reference=body.reference, caches_dropped=body.caches_dropped
        )
        if self._told is not None:
            await self._told(updated.version, self.pool.name)
        return updated


class Policies:
    """All pools of a service, by name. ``load`` before use: until then requests for one wait."""

    def __init__(self) -> None:
        self._desks: Mapping[str, PolicyDesk] = {}
        self._loaded = asyncio.Event()
        self._closed = False

    def load(self, desks: Sequence[PolicyDesk]) -> None:
        """Set the desks, one per pool."""
        self._desks = {desk.pool.name: desk for desk in desks}
        self._loaded.set()

    async def of(self, name: str) -> PolicyDesk:
        """Return the one of this name.

        Raises:
            Refusal: 404; 503, the service stops before its pools are loaded.
        """
        await self._loaded.wait()
        if self._closed and not self._desks:
            raise Refusal(503, "The service stops before its engines were loaded.", "Send it again when it is back.")
        desk = self._desks.get(name)
        if desk is None:
            known = ", ".join(list(self._desks)[:20]) or "none"
            raise Refusal(404, f"This service has no pool '{name[:64]}'.", f"It has: {known}.")
        return desk

    @property
    def all(self) -> Mapping[str, PolicyDesk]:
        """Every one."""
        return self._desks

    async def close(self) -> None:
        """End what is under way on any of them, and what waits for one. Idempotent."""
        self._closed = True
        self._loaded.set()
        for desk in self._desks.values():
            await desk.close()


def pool_state(pool: EnginePool, fleet: Fleet | None = None) -> PoolState:
    """Return how a pool stands, in the form in which it is told."""
    seen = pool.snapshot()
    door = seen.admission
    engines = [
        EngineState(
            name=engine.name,
            url=None if fleet is None else fleet.url(engine.name),
            serves=engine.serves,
            trouble=engine.trouble,
            quarantine=engine.quarantine,
            draining=engine.draining,
            version=engine.version,
            in_flight=engine.in_flight,
            calls=engine.calls,
            failures=engine.failures,
            sampled_tokens=engine.sampled_tokens,
            hit_rate=engine.hit_rate,
            load=engine.load,
        )
        for engine in seen.engines
    ]
    return PoolState(
        name=seen.name,
        version=seen.version,
        paused=seen.paused,
        failovers=seen.failovers,
        lacking=seen.lacking,
        unserved=seen.unserved,
        admission=AdmissionState(
            budget=door.budget if math.isfinite(door.budget) else None,
            in_tokens=door.in_tokens,
            filled=door.filled,
            live=door.live,
            waiting=door.waiting,
        ),
        engines=engines,
    )


def _failed(task: asyncio.Task[Updated]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
