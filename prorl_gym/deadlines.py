"""Deadlines whose clock stops while the work waits in a queue.

Time in a queue is never charged to a rollout, but some queues lie deep inside its work: a turn waits until the engines
have room, or until an update of the weights is over. Code that waits there does so under ``paused_deadline``, which
stops the clock of the current deadline, if there is one. The deadline is found through the context of the running task,
which tasks inherit, so it need not be passed through environments and agents.

Nor is time charged for which this process did not run: SIGSTOP, a frozen cgroup, a suspended job. What would have ended
in time ends then, for its answer is there.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context, ContextVar, Token
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.5
_STANDSTILL_SECONDS = 2.0
"""A tick that comes this much late shows that the process stood still."""

_CURRENT: ContextVar["Deadline | None"] = ContextVar("deadline", default=None)


class Timeout:
    """``asyncio.timeout`` that does not count time for which this process stood still. For one block, in one task."""

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(None)
        self._remaining = seconds
        self._running_since = 0.0

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        _ticker().add(self)
        self._start_clock()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        _ticker().remove(self)
        return await self._timeout.__aexit__(kind, error, traceback)

    def expired(self) -> bool:
        """Whether the block was over its time."""
        return self._timeout.expired()

    def give_back(self, seconds: float) -> None:
        """Do not count these seconds, which have just passed."""
        if not self.expired():
            self._remaining += seconds - (_now() - self._running_since)
            self._start_clock()

    def _start_clock(self) -> None:
        self._running_since = _now()
        self._timeout.reschedule(self._running_since + self._remaining)


class _Ticker:
    """Notices that the process stood still, and gives that time back to all that count it.

    Its tick is due before what ends meanwhile, and so comes first when the process goes on.
    """

    def __init__(self) -> None:
        self._running: set[Timeout] = set()
        self._next: asyncio.TimerHandle | None = None

    def add(self, timeout: Timeout) -> None:
        self._running.add(timeout)
        if self._next is None:
            self._schedule()

    def remove(self, timeout: Timeout) -> None:
        self._running.discard(timeout)
        if not self._running and self._next is not None:
            self._next.cancel()
            self._next = None

    def _schedule(self) -> None:
        due, loop = _now() + _TICK_SECONDS, asyncio.get_running_loop()
        self._next = loop.call_at(due, self._tick, due, context=Context())  # the current one keeps a rollout alive

    def _tick(self, due: float) -> None:
        late = _now() - due
        if late > _STANDSTILL_SECONDS:
            log.warning("the process stood still for %.1f s, which are charged to no rollout", late)
            for timeout in self._running:
                timeout.give_back(late)
        self._schedule()


_TICKERS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Ticker] = WeakKeyDictionary()


def _ticker() -> _Ticker:
    return _TICKERS.setdefault(asyncio.get_running_loop(), _Ticker())


class Deadline(Timeout):
    """A timeout whose clock can be stopped, and which the tasks below its block find."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self._seconds = seconds
        self.paused_seconds = 0.0
        """Seconds that were not charged."""
        self._pauses = 0
        self._active = False
        self._context_token: Token[Deadline | None] | None = None

    async def __aenter__(self) -> Self:
        self._active = True
        self._context_token = _CURRENT.set(self)
        return await super().__aenter__()

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
        return await super().__aexit__(kind, error, traceback)

    @property
    def charged_seconds(self) -> float:
        running = self._active and not self._pauses
        return self._seconds - self._remaining + (_now() - self._running_since if running else 0.0)

    def give_back(self, seconds: float) -> None:
        """See ``Timeout``; while its clock is stopped, they are among the paused ones already."""
        if not self._pauses and not self.expired():
            self.paused_seconds += seconds
            super().give_back(seconds)

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
