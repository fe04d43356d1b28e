"""Which sessions are alive: those with a call in flight, and those that made one recently.

A session holds a place near its cached prefix, and counts against what the engines' caches hold. A rollout of ours
gives both up when it ends; other agents just stop calling. So a session without a call for a while is over. If it was
not, it has lost only its place: its next call makes it a new session.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

MAX_IDLE = 10_000
"""Idle sessions kept at once, however recent their last call."""


@dataclass(slots=True)
class _Session:
    calls: int = 0
    """In flight."""
    idle_since: float = 0.0
    """When its last call ended, on the loop's clock."""


class SessionTracker:
    """Counts the calls of sessions and expires the idle ones.

    Args:
        on_expire: called with each session that is over.
        idle_seconds: how long a session may go without a call.
    """

    def __init__(self, on_expire: Callable[[str], None], idle_seconds: float) -> None:
        self._on_expire = on_expire
        self._idle_seconds = idle_seconds
        self._busy: dict[str, _Session] = {}
        self._idle: OrderedDict[str, _Session] = OrderedDict()
        """Longest idle first."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._busy) + len(self._idle)

    @contextmanager
    def track_call(self, session_id: str) -> Generator[None]:
        """Keep a session alive during a call."""
        session = self._busy.get(session_id) or self._idle.pop(session_id, None) or _Session()
        self._busy[session_id] = session
        session.calls += 1
        try:
            yield
        finally:
            session.calls -= 1
            if not session.calls:
                del self._busy[session_id]
                self._mark_idle(session_id, session)

    def close(self) -> None:
        """Stop expiring sessions."""
        if self._timer is not None:
            self._timer.cancel()

    def _mark_idle(self, session_id: str, session: _Session) -> None:
        session.idle_since = asyncio.get_running_loop().time()
        self._idle[session_id] = session
        if len(self._idle) > MAX_IDLE:
            self._expire(next(iter(self._idle)))
        self._set_timer()

    def _expire(self, session_id: str) -> None:
        del self._idle[session_id]
        self._on_expire(session_id)

    def _set_timer(self) -> None:
        """Set the one timer to the moment at which the longest idle session expires."""
        if self._timer is None and self._idle:
            due = next(iter(self._idle.values())).idle_since + self._idle_seconds
            self._timer = asyncio.get_running_loop().call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for session_id, session in list(self._idle.items()):
            if session.idle_since + self._idle_seconds > now:
                break
            self._expire(session_id)
        self._set_timer()
