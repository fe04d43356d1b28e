"""Finishes short work although the caller is cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end even when the caller is cancelled; the cancellation is raised afterwards.

    For short, bounded work that must not be left half done: killing a process tree, learning the pid of a child.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # marks it as retrieved: the caller gets the cancellation instead
    raise cancelled
