"""Who may do something now: file locks between processes, one task for however many ask within one.

A lock belongs to an open file, shared with whoever inherits it. So waiting for one is left to a child that inherits the
file and blocks in the kernel: no thread that could not be cancelled, no polling, and at its end the lock is ours.
"""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from prorl_gym.sandbox.shielding import finish

T = TypeVar("T")


@asynccontextmanager
async def locked(path: Path) -> AsyncGenerator[int]:
    """Hold an exclusive lock on a file, made when missing and never removed. Yields its descriptor.

    Whoever inherits the descriptor holds the lock too: it ends with the last of them.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        if not try_lock(descriptor):
            await _wait_for_lock(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Take a lock on an open file if nobody holds it."""
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
            await finish(waiter.wait())


class NodeGate:
    """Lets a bounded number of jobs run at once on this node, over all processes.

    Args:
        directory: of the lock files, one per job.
        jobs: how many.
    """

    def __init__(self, directory: Path, jobs: int) -> None:
        self._files = [directory / f"job-{number}" for number in range(jobs)]
        self._local = asyncio.Semaphore(jobs)
        self._next = os.getpid()

    @asynccontextmanager
    async def job(self) -> AsyncGenerator[None]:
        """Wait for a turn and hold it."""
        async with self._local, contextlib.AsyncExitStack() as stack:
            for path in self._files:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
                if try_lock(descriptor):
                    stack.callback(os.close, descriptor)
                    break
                os.close(descriptor)
            else:
                # All taken: wait in one queue. Different processes start with different ones.
                self._next += 1
                await stack.enter_async_context(locked(self._files[self._next % len(self._files)]))
            yield


class SingleFlight(Generic[T]):
    """One run of the same work however many ask for it; cancelled when the last of them no longer waits."""

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
                self._forget(key, task)  # whoever asks from now on starts anew
                task.cancel()
                await finish(_ended(task))

    def _forget(self, key: str, task: asyncio.Task[T]) -> None:
        if key in self._running and self._running[key][0] is task:
            del self._running[key]


async def _ended(task: Awaitable[Any]) -> None:
    await asyncio.wait([asyncio.ensure_future(task)])
