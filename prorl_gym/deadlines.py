"""Deadlines that stand still while the work waits for its turn.

Time in a queue is never charged to a rollout, but some queues lie deep inside its work: a turn that waits until the
engines have room, or until an update of the weights is over. Whoever holds work up there says so with ``uncharged``,
and the deadline that it runs under, if there is one, is given the time back. The deadline is found through the context
of the running task, which tasks inherit, so nothing has to be handed through environments and agents.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self

_CURRENT: ContextVar["Deadline | None"] = ContextVar("deadline", default=None)


class Deadline:
    """``asyncio.timeout`` with a clock that can be stopped. For one ``async with``, in one task.

    Args:
        seconds: that the block may take, held time not counted.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)
        self._left = seconds
        self._since = 0.0
        self._held_for = 0.0
        self._holds = 0
        self._open = False
        self._token: Token[Deadline | None] | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._open = True
        self._token = _CURRENT.set(self)
        self._go()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._token is not None
        _CURRENT.reset(self._token)
        self._open = False
        if self._holds:
            self._held_for += _now() - self._since
        else:
            self._left -= _now() - self._since
        return await self._timeout.__aexit__(kind, error, traceback)

    def expired(self) -> bool:
        """Whether the block was over its time."""
        return self._timeout.expired()

    @property
    def held(self) -> float:
        """Seconds that were not charged."""
        return self._held_for

    @property
    def spent(self) -> float:
        """Seconds charged so far."""
        running = self._open and not self._holds
        return self._seconds - self._left + (_now() - self._since if running else 0.0)

    def refund(self, spent: float) -> None:
        """Take back what was charged since ``spent`` was read: the work lost that time to a failure of others."""
        lost = self.spent - spent
        if lost <= 0 or not self._open or self.expired():
            return
        self._held_for += lost
        self._left = self._seconds - spent
        if not self._holds:
            self._go()

    def hold(self) -> None:
        """Stop the clock. Several may hold it; each owes one ``release``."""
        self._holds += 1
        if self._open and self._holds == 1 and not self.expired():
            self._left -= _now() - self._since
            self._since = _now()
            self._timeout.reschedule(None)

    def release(self) -> None:
        """Let it go on, once nobody holds it any more."""
        self._holds -= 1
        if self._open and not self._holds and not self.expired():
            self._held_for += _now() - self._since
            self._go()

    def _go(self) -> None:
        self._since = _now()
        self._timeout.reschedule(self._since + self._left)


def current_deadline() -> Deadline | None:
    """Return the innermost deadline that the running task is under."""
    return _CURRENT.get()


@contextmanager
def uncharged() -> Generator[None, None, None]:
    """Stop the clock of the running task's deadline for the block."""
    deadline = current_deadline()
    if deadline is None:
        yield
        return
    deadline.hold()
    try:
        yield
    finally:
        deadline.release()


def _now() -> float:
    return asyncio.get_running_loop().time()
