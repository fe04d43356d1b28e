"""Pools of slots: how many attempts a runner has in each stage at once, and in which order they get there.

A pool counts slots on one event loop. A free slot goes to agents that were parked first, then to evaluation, then to
training; within the last two, environments get fair shares of the time for which they hold slots (``FairQueue``).
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from prorl_gym.rollout.scheduling.fair_queue import Charge, FairQueue

WorkStage = Literal["init", "run", "eval"]


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Slots of one pool at one moment."""

    size: int
    busy: int
    """More than ``size`` while an agent that was parked goes on beyond it."""
    waiting: int


Waiter = asyncio.Future[Charge]
"""Resolved with the charge of the slot that was granted."""


class Slot:
    """A slot of a pool, held by one attempt. Every slot needs one ``release``.

    Args:
        pool: of the slot.
        charge: what its holder's environment is charged in the pool's queue.
    """

    def __init__(self, pool: "StagePool", charge: Charge) -> None:
        self._pool = pool
        self._charge = charge
        charge.resume()

    def release(self) -> None:
        """Return the slot; the next in the queue gets it.

        Raises:
            RuntimeError: the slot was returned before.
        """
        if self._charge.is_over:
            raise RuntimeError("a slot was returned twice")
        self._charge.end()
        self._pool.on_slot_released()


class StagePool:
    """The slots of one stage.

    Args:
        size: how many may hold a slot at once.
        weights: weights of environments. See ``FairQueue``.
    """

    def __init__(self, size: int, weights: Mapping[str, float] | None = None) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one slot, not {size}")
        self.size = size
        self.busy = 0
        self._resuming: OrderedDict[Waiter, str] = OrderedDict()
        self._urgent_queue: FairQueue[Waiter] = FairQueue(weights)
        self._queue: FairQueue[Waiter] = FairQueue(weights)

    @property
    def free(self) -> int:
        """Free slots."""
        return max(0, self.size - self.busy)

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return len(self._resuming) + len(self._urgent_queue) + len(self._queue)

    def usage(self) -> PoolUsage:
        """Return the pool's figures now."""
        return PoolUsage(self.size, self.busy, self.waiting)

    @asynccontextmanager
    async def slot(self, environment: str = "", *, urgent: bool = False) -> AsyncGenerator[Slot, None]:
        """Wait for a slot, hold it for the block, return it."""
        slot = await self.acquire_slot(environment, urgent=urgent)
        try:
            yield slot
        finally:
            slot.release()

    async def acquire_slot(self, environment: str = "", *, urgent: bool = False, resuming: bool = False) -> Slot:
        """Wait for a slot. A cancelled wait needs no ``release``.

        Args:
            environment: the slot counts towards its share.
            urgent: evaluation, which is served before training.
            resuming: a parked agent goes on; served before all that begin.
        """
        queue = self._urgent_queue if urgent else self._queue
        if self.free:  # then the queue is empty
            self.busy += 1
            return Slot(self, queue.charge_immediately(environment))
        waiter: Waiter = asyncio.get_running_loop().create_future()
        if resuming:
            self._resuming[waiter] = environment
        else:
            queue.push(environment, waiter)
        try:
            return Slot(self, await waiter)
        except asyncio.CancelledError:
            self._resuming.pop(waiter, None)
            queue.remove(environment, waiter)
            if waiter.done() and not waiter.cancelled():
                # The slot was granted as the wait was cancelled: nothing else returns it.
                waiter.result().cancel()
                self.on_slot_released()
            raise

    def force_acquire_slot(self, environment: str = "") -> Slot:
        """Take a slot at once, beyond the size if none is free: for an attempt that began before."""
        self.busy += 1
        return Slot(self, self._queue.charge_immediately(environment))

    def on_slot_released(self) -> None:
        """Count a slot as free again. Only ``Slot`` calls this."""
        self.busy -= 1
        self._grant_free_slots()

    def _grant_free_slots(self) -> None:
        while self.free:
            if self._resuming:
                waiter, environment = self._resuming.popitem(last=False)
                charge = self._queue.charge_immediately(environment)
            elif self._urgent_queue:
                waiter, charge = self._urgent_queue.pop()
            elif self._queue:
                waiter, charge = self._queue.pop()
            else:
                return
            if waiter.done():  # cancelled, and its task has not run yet to leave the queue
                charge.cancel()
                continue
            self.busy += 1
            waiter.set_result(charge)


class SharedExclusiveLock:
    """A readers-writer lock: most attempts run payloads side by side (shared), single ones alone (exclusive).

    An exclusive holder waits until all shared ones have released; those that come later wait for it.
    """

    def __init__(self) -> None:
        self._shared_holders = 0
        self._exclusive = asyncio.Lock()
        self._no_shared_holders = asyncio.Event()
        self._no_shared_holders.set()

    async def acquire(self, *, exclusive: bool) -> Callable[[], None]:
        """Wait for the lock; return the function that releases it."""
        await self._exclusive.acquire()
        try:
            if exclusive:
                await self._no_shared_holders.wait()
                return self._exclusive.release
        except BaseException:
            self._exclusive.release()
            raise
        self._exclusive.release()
        self._shared_holders += 1
        self._no_shared_holders.clear()
        return self._release_shared

    def _release_shared(self) -> None:
        self._shared_holders -= 1
        if self._shared_holders == 0:
            self._no_shared_holders.set()


class StagePools:
    """The slots of one runner.

    Args:
        queue: how many may wait for INIT.
        init: slots of INIT.
        prepared: how many may be prepared and wait for RUN, which bounds idle sandboxes.
        run: slots of RUN.
        evaluate: slots of EVAL.
        weights: weights of environments. See ``FairQueue``.
    """

    def __init__(
        self,
        *,
        queue: int,
        init: int,
        prepared: int,
        run: int,
        evaluate: int,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.jobs = StagePool(queue + init + prepared + run + evaluate, weights)
        self.prepared = StagePool(init + prepared, weights)
        self.payload_lock = SharedExclusiveLock()
        self.stages: dict[WorkStage, StagePool] = {
            "init": StagePool(init, weights),
            "run": StagePool(run, weights),
            "eval": StagePool(evaluate, weights),
        }

    def usage(self) -> dict[str, PoolUsage]:
        """Return the figures of every pool: ``jobs``, ``prepared`` and the stages."""
        pools = {"jobs": self.jobs, "prepared": self.prepared, **self.stages}
        return {name: pool.usage() for name, pool in pools.items()}
