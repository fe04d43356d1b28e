"""Measures how long an event loop does not come round, without counting what the machine is busy with elsewhere."""

import asyncio
import time
from types import TracebackType

_PERIOD = 0.005


class LoopWatch:
    """Wakes every few milliseconds and keeps the longest delay, as an async context manager.

    Time that the loop's thread was ready to run and had no processor is subtracted: other programs cause that.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        """Seconds."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LoopWatch":
        self._task = asyncio.create_task(self._watch())
        await asyncio.sleep(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        await asyncio.sleep(0)  # a stall that has just ended is measured before the watch ends
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while True:
            began, starved = time.monotonic(), _starved()
            try:
                await asyncio.sleep(_PERIOD)
            finally:
                late = time.monotonic() - began - _PERIOD - (_starved() - starved)
                self.longest = max(self.longest, late)


def _starved() -> float:
    """Return the seconds that this thread has waited for a processor so far."""
    with open("/proc/thread-self/schedstat", encoding="ascii") as file:
        return int(file.read().split()[1]) / 1e9
