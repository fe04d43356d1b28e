"""Work on many items at once, some at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


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
