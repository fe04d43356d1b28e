"""A stage's pool of slots. Each slot that is taken is returned exactly once, whatever happens to who took it."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class StagePool:
    """Counts slots on one event loop; evaluation traffic is served before training traffic.

    Args:
        size: how many may hold a slot at once.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one slot, not {size}")
        self.size = size
        self.busy = 0
        self._urgent: deque[asyncio.Future[None]] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return self.size - self.busy

    @asynccontextmanager
    async def slot(self, *, urgent: bool = False) -> AsyncGenerator[None, None]:
        """Wait for a slot, hold it for the block, return it."""
        await self.take(urgent=urgent)
        try:
            yield
        finally:
            self.give_back()

    async def take(self, *, urgent: bool = False) -> None:
        """Wait for a slot. Who takes one owes exactly one ``give_back``; a cancelled wait owes none."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._urgent if urgent else self._waiting).append(waiter)
        self._grant()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                # The slot was granted in the very moment of the cancel: nobody else will return it.
                self.give_back()
            raise

    def give_back(self) -> None:
        """Return a slot and hand it to the next in line."""
        if self.busy == 0:
            raise RuntimeError("a slot was returned twice")
        self.busy -= 1
        self._grant()

    def _grant(self) -> None:
        while self.free:
            line = self._urgent or self._waiting
            if not line:
                return
            waiter = line.popleft()
            if not waiter.done():
                self.busy += 1
                waiter.set_result(None)
