"""Calls that several requests may wait for: a program that sends a call again gets the same answer.

Programs repeat a call when a connection breaks or when they lose patience. Sampling again would give another turn, and
the one that was sampled first would be in no history. So an equal body joins the call while it runs, and gets its
answer until one request has received it. When the last request that waits has gone, the call is stopped.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from prorl_gym.gateway.answer import AnswerHead, CompletedTurn
from prorl_gym.gateway.turn_stream import Piece
from prorl_gym.inference.balance.members import ChangeSignal

MAX_UNDELIVERED = 32
"""Answers kept that no request has received; the oldest is dropped."""


@dataclass(slots=True, eq=False)
class SharedCall:
    """One call, and its answer as far as it is sampled."""

    head: AnswerHead = field(default_factory=AnswerHead)
    pieces: list[Piece] = field(default_factory=list[Piece])
    """Of the answer so far."""
    changes: ChangeSignal = field(default_factory=ChangeSignal)
    """Notified when there are new pieces, and at the end."""
    is_delivered: bool = False
    """A request has received the whole answer."""
    waiting: int = 0
    """Requests that wait for it."""
    turn: "asyncio.Task[CompletedTurn] | None" = None

    def add_pieces(self, pieces: list[Piece]) -> None:
        """Add pieces of the answer."""
        if pieces:
            self.pieces += pieces
            self.changes.notify_all()

    @property
    def task(self) -> "asyncio.Task[CompletedTurn]":
        """What makes the call."""
        assert self.turn is not None
        return self.turn

    async def wait_for_pieces(self, known: int, seconds: float) -> bool:
        """Wait until there are more than so many pieces, or the call is over; whether it came to that in time."""
        try:
            async with asyncio.timeout(seconds):
                await self.changes.wait_for(lambda: len(self.pieces) > known or self.task.done())
        except TimeoutError:
            return False
        return True


class SharedCalls:
    """The calls of one rollout, by what was sent.

    Args:
        context: of the rollout: calls are made in it, since deadlines are part of it.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._calls: dict[bytes, SharedCall] = {}

    @property
    def running(self) -> int:
        """Calls that are not over."""
        return sum(not call.task.done() for call in self._calls.values())

    def __contains__(self, key: bytes) -> bool:
        return key in self._calls

    @asynccontextmanager
    async def join(
        self, key: bytes, make: Callable[[SharedCall], Coroutine[Any, Any, CompletedTurn]]
    ) -> AsyncGenerator[SharedCall]:
        """Wait for a call with others, for the block: the one that was sent before, or a new one.

        Args:
            key: digest of what was sent.
            make: makes the call; it may add pieces on the way.
        """
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = SharedCall()
            call.turn = asyncio.get_running_loop().create_task(make(call), context=self._context)
            call.turn.add_done_callback(lambda _: call.changes.notify_all())
        call.waiting += 1
        try:
            yield call
        finally:
            call.waiting -= 1
            await self._leave(key, call)

    async def close(self) -> None:
        """Stop all calls."""
        tasks = [call.task for call in self._calls.values()]
        self._calls.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave(self, key: bytes, call: SharedCall) -> None:
        """Forget a call that is delivered or has failed, and stop one that no request waits for."""
        task = call.task
        if call.is_delivered or (task.done() and (task.cancelled() or task.exception() is not None)):
            self._forget(key, call)
        elif not call.waiting and not task.done():
            self._forget(key, call)
            task.cancel()
            await asyncio.wait({task})  # until its tokens are kept
        elif task.done():
            undelivered = [key for key, one in self._calls.items() if one.task.done() and not one.waiting]
            for old in undelivered[:-MAX_UNDELIVERED]:
                del self._calls[old]

    def _forget(self, key: bytes, call: SharedCall) -> None:
        if self._calls.get(key) is call:
            del self._calls[key]
