"""Work on many items at once, some at a time; and on one at a time, to its end."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


async def for_each(items: Sequence[Item], jobs: int, work: Callable[[Item], Awaitable[None]]) -> None:
    """Work on ``jobs`` items at a time, begun in their order. The first exception stops all work and is raised."""
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(jobs, len(items))):
                group.create_task(worker())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


class Slot:
    """Work that is done one at a time, and to its end where its caller is cancelled: no thread can be stopped."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(1)

    async def run(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Wait for the slot, and do the work in it."""
        await self._free.acquire()
        task = asyncio.ensure_future(work())
        task.add_done_callback(self._end)
        return await asyncio.shield(task)

    def _end(self, task: "asyncio.Future[Any]") -> None:
        self._free.release()
        if not task.cancelled():
            task.exception()  # its caller, who has it, may be gone
