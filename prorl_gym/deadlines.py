"""Deadlines whose clock stops while the work waits in a queue.

Time in a queue is never charged to a rollout, but some queues lie deep inside its work: a turn waits until the engines
have room, or until an update of the weights is over. Code that waits there does so under ``paused_deadline``, which
stops the clock of the current deadline, if there is one. The deadline is found through the context of the running task,
which tasks inherit, so it need not be passed through environments and agents.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self

_CURRENT: ContextVar["Deadline | None"] = ContextVar("deadline", default=None)


class Deadline:
    """``asyncio.timeout`` whose clock can be stopped. For one ``async with``, in one task."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)
        self._remaining = seconds
        self._running_since = 0.0
        self.paused_seconds = 0.0
        """Seconds that were not charged."""
        self._pauses = 0
        self._active = False
        self._context_token: Token[Deadline | None] | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._active = True
        self._context_token = _CURRENT.set(self)
        self._start_clock()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._context_token is not None
        _CURRENT.reset(self._context_token)
        self._active = False
        if self._pauses:
            self.paused_seconds += _now() - self._running_since
        else:
            self._remaining -= _now() - self._running_since
        return await self._timeout.__aexit__(kind, error, traceback)

    def expired(self) -> bool:
        """Whether the block was over its time."""
        return self._timeout.expired()

    @property
    def charged_seconds(self) -> float:
        running = self._active and not self._pauses
        return self._seconds - self._remaining + (_now() - self._running_since if running else 0.0)

    def refund(self, charged_before: float) -> None:
        """Refund the time charged since ``charged_before`` was read, which a failure of infrastructure took."""
        lost = self.charged_seconds - charged_before
        if lost <= 0 or not self._active or self.expired():
            return
        self.paused_seconds += lost
        self._remaining = self._seconds - charged_before
        if not self._pauses:
            self._start_clock()

    def set_charged(self, seconds: float) -> None:
        """Set the time charged so far, in place of what was: that was work of another kind."""
        if self._active and not self.expired():
            self.paused_seconds += self.charged_seconds
            self._remaining = self._seconds - seconds
            if not self._pauses:
                self._start_clock()

    def pause(self) -> None:
        """Stop the clock. Every ``pause`` needs one ``resume``."""
        self._pauses += 1
        if self._active and self._pauses == 1 and not self.expired():
            self._remaining -= _now() - self._running_since
            self._running_since = _now()
            self._timeout.reschedule(None)

    def resume(self) -> None:
        """Undo one ``pause``; after the last, the clock goes on."""
        self._pauses -= 1
        if self._active and not self._pauses and not self.expired():
            self.paused_seconds += _now() - self._running_since
            self._start_clock()

    def _start_clock(self) -> None:
        self._running_since = _now()
        self._timeout.reschedule(self._running_since + self._remaining)


def current_deadline() -> Deadline | None:
    return _CURRENT.get()


@contextmanager
def use_deadline(deadline: Deadline) -> Generator[None, None, None]:
    """Make this the current deadline of the running task for the block."""
    token = _CURRENT.set(deadline)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def paused_deadline() -> Generator[None, None, None]:
    """Stop the clock of the running task's deadline for the block."""
    deadline = current_deadline()
    if deadline is None:
        yield
        return
    deadline.pause()
    try:
        yield
    finally:
        deadline.resume()


@asynccontextmanager
async def hold_uncharged(permit: asyncio.Lock | asyncio.Semaphore) -> AsyncGenerator[None]:
    """Hold a permit for the block. The wait for it, behind other rollouts, is charged to no deadline."""
    with paused_deadline():
        await permit.acquire()
    try:
        yield
    finally:
        permit.release()


def _now() -> float:
    return asyncio.get_running_loop().time()
