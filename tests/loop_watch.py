"""Measures how long an event loop does not come round, without counting what the machine is busy with elsewhere."""

import asyncio
import gc
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_PERIOD = 0.005


class LoopWatch:
    """Wakes every few milliseconds and keeps the longest delay, as an async context manager.

    Time that a thread of this process was ready to run and had no processor is subtracted: other programs cause that,
    and the loop waits for a thread that has the interpreter's lock. So is time for which a virtual machine's processors
    were taken away. And what the process of the tests held before is no garbage to be looked for meanwhile.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        """Seconds."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LoopWatch":
        gc.collect()
        gc.freeze()
        self._task = asyncio.create_task(self._watch())
        await asyncio.sleep(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        await asyncio.sleep(0)  # a stall that has just ended is measured before the watch ends
        self._task.cancel()
        gc.unfreeze()
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
    """Return the seconds so far that threads of this process waited for a processor, or the machine for its own."""
    stolen = int(Path("/proc/stat").read_text("ascii").split(maxsplit=9)[8])
    nanoseconds = stolen * (10**9 // os.sysconf("SC_CLK_TCK"))
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            nanoseconds += int(file.read_text("ascii").split()[1])
    return nanoseconds / 1e9
