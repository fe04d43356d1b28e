"""Tasks whose first step runs at once, for work that mostly ends without waiting."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def start_eagerly(work: Coroutine[Any, Any, ResultT], name: str | None = None) -> asyncio.Task[ResultT]:
    """Start a task and run it up to its first wait before this returns; the task is done if there was none.

    An ordinary task begins in the loop's next iteration, and what waits for it goes on two iterations later: a rollout
    passes through many. On Python 3.11 this is one.
    """
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=loop, name=name, eager_start=True)
    return loop.create_task(work, name=name)
