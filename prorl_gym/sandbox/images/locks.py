"""Mutual exclusion: file locks and slots between processes, shared work between the tasks of one.

A lock belongs to an open file, which child processes inherit. Waiting for one is therefore done by a child that
inherits the file and blocks in the kernel: no thread that could not be cancelled, no polling, and when the child ends,
this process holds the lock.
"""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from prorl_gym.sandbox.cancellation import run_shielded

T = TypeVar("T")


@asynccontextmanager
async def locked(path: Path) -> AsyncGenerator[int]:
    """Hold an exclusive lock on a file, made when missing and never removed. Yields its descriptor.

    A process that inherits the descriptor holds the lock too, until it closes it or ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        if not try_lock(descriptor):
            await _wait_for_lock(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file if no other process holds a conflicting lock; return whether it is locked."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _wait_for_lock(descriptor: int) -> None:
    waiter = await asyncio.create_subprocess_exec(
        "flock", "--exclusive", str(descriptor), pass_fds=[descriptor], stdin=asyncio.subprocess.DEVNULL
    )
    try:
        if await waiter.wait():
            raise OSError(f"flock ended with status {waiter.returncode}")
    finally:
        if waiter.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                waiter.kill()
            await run_shielded(waiter.wait())


class NodeSemaphore:
    """Bounds the number of jobs that run at once on this node, over all processes, by a lock file for each slot."""

    def __init__(self, directory: Path, slots: int) -> None:
        self._lock_files = [directory / f"job-{number}" for number in range(slots)]
        self._local = asyncio.Semaphore(slots)
        self._next_file = os.getpid()

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        async with self._local, contextlib.AsyncExitStack() as stack:
            for path in self._lock_files:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
                if try_lock(descriptor):
                    stack.callback(os.close, descriptor)
                    break
                os.close(descriptor)
            else:
                # All are taken: wait for one of them, each process for a different one.
                self._next_file += 1
                await stack.enter_async_context(locked(self._lock_files[self._next_file % len(self._lock_files)]))
            yield


class SingleFlight(Generic[T]):
    """Runs the same work once for concurrent callers; cancels it when the last of them has gone."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[asyncio.Task[T], list[object]]] = {}

    async def do(self, key: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Join the run of ``key``, or start it."""
        if key not in self._running:
            started = asyncio.ensure_future(work())
            self._running[key] = (started, [])
            started.add_done_callback(lambda done: self._forget(key, done))
        task, waiting = self._running[key]
        ticket = object()
        waiting.append(ticket)
        try:
            return await asyncio.shield(task)
        finally:
            waiting.remove(ticket)
            if not waiting and not task.done():
                self._forget(key, task)  # later callers start again
                task.cancel()
                await run_shielded(asyncio.wait([task]))

    def _forget(self, key: str, task: asyncio.Task[T]) -> None:
        if key in self._running and self._running[key][0] is task:
            del self._running[key]
