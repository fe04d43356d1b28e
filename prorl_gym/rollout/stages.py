"""A stage's pool of slots. Each slot that is taken is returned exactly once, whatever happens to who took it."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

from prorl_gym.rollout.fair import Charge, FairLine

Waiter = asyncio.Future[Charge]


class Slot:
    """A place in a pool. Whoever took it owes one ``give_back``.

    Args:
        pool: whose place it is.
        charge: what the pool's line reckons for it.
    """

    def __init__(self, pool: "StagePool", charge: Charge) -> None:
        self._pool = pool
        self._charge = charge
        charge.go()

    def give_back(self) -> None:
        """Return it; the next in line gets it.

        Raises:
            RuntimeError: it was returned before.
        """
        if self._charge.over:
            raise RuntimeError("a slot was returned twice")
        self._charge.end()
        self._pool.returned()


class Company:
    """Lets attempts run payloads side by side, and single ones without any other.

    One that is to be alone waits until those at work have ended; whoever comes later waits for it.
    """

    def __init__(self) -> None:
        self._present = 0
        self._alone = asyncio.Lock()
        self._empty = asyncio.Event()
        self._empty.set()

    async def enter(self, *, alone: bool) -> Callable[[], None]:
        """Wait until it may begin; return what ends its stay."""
        await self._alone.acquire()
        try:
            if alone:
                await self._empty.wait()
                return self._alone.release
        except BaseException:
            self._alone.release()
            raise
        self._alone.release()
        self._present += 1
        self._empty.clear()
        return self._leave

    def _leave(self) -> None:
        self._present -= 1
        if self._present == 0:
            self._empty.set()


class StagePool:
    """Counts slots on one event loop.

    Who comes back is served before who begins, evaluation before training, and environments in fair shares of the time
    for which they hold slots.

    Args:
        size: how many may hold a slot at once.
        shares: weights of environments. See ``fair``.
    """

    def __init__(self, size: int, shares: Mapping[str, float] | None = None) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one slot, not {size}")
        self.size = size
        self.busy = 0
        self._returning: OrderedDict[Waiter, str] = OrderedDict()
        self._urgent: FairLine[Waiter] = FairLine(shares)
        self._waiting: FairLine[Waiter] = FairLine(shares)

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return max(0, self.size - self.busy)

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return len(self._returning) + len(self._urgent) + len(self._waiting)

    @asynccontextmanager
    async def slot(self, environment: str = "", *, urgent: bool = False) -> AsyncGenerator[Slot, None]:
        """Wait for a slot, hold it for the block, return it."""
        slot = await self.take(environment, urgent=urgent)
        try:
            yield slot
        finally:
            slot.give_back()

    async def take(self, environment: str = "", *, urgent: bool = False, returning: bool = False) -> Slot:
        """Wait for a slot. A cancelled wait owes nothing.

        Args:
            environment: whose share it comes out of.
            urgent: evaluation, which is served before training.
            returning: it gave its slot away and goes on: served before anybody who begins.
        """
        line = self._urgent if urgent else self._waiting
        if self.free:  # then nobody waits
            self.busy += 1
            return Slot(self, line.charge(environment))
        waiter: Waiter = asyncio.get_running_loop().create_future()
        if returning:
            self._returning[waiter] = environment
        else:
            line.push(environment, waiter)
        try:
            return Slot(self, await waiter)
        except asyncio.CancelledError:
            self._returning.pop(waiter, None)
            line.remove(environment, waiter)
            if waiter.done() and not waiter.cancelled():
                # The slot was granted in the very moment of the cancel: nobody else will return it.
                waiter.result().drop()
                self.returned()
            raise

    def take_over(self, environment: str = "") -> Slot:
        """Take a slot at once, beyond the size if there is none: for work that is here already."""
        self.busy += 1
        return Slot(self, self._waiting.charge(environment))

    def returned(self) -> None:
        """A slot is free again; only ``Slot`` says so."""
        self.busy -= 1
        self._grant()

    def _grant(self) -> None:
        while self.free:
            if self._returning:
                waiter, environment = self._returning.popitem(last=False)
                charge = self._waiting.charge(environment)
            elif self._urgent:
                waiter, charge = self._urgent.pop()
            elif self._waiting:
                waiter, charge = self._waiting.pop()
            else:
                return
            if waiter.done():  # cancelled, and not awake yet to leave the line
                charge.drop()
                continue
            self.busy += 1
            waiter.set_result(charge)
