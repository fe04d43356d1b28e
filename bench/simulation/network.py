"""Messages between simulated processes: late, lost, cut off, and broken off where a process dies."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from simulation.virtual_clock import SimulatedProcess

ResultT = TypeVar("ResultT")

_DELAY_SECONDS = 0.0005
"""Shortest time of one way; doubled at random."""
_PATIENCE_SECONDS = 30.0
"""After which a caller gives up on an answer that was lost."""

_OUTSIDE = Context()


class Network:
    """Carries requests between processes, as HTTP over TCP does."""

    def __init__(self, dice: random.Random) -> None:
        self.loss = 0.0
        """Chance that a request is lost, and again that its answer is."""
        self.repeats = 0.0
        """Chance that a request arrives once more, later; what the second one returns is lost."""
        self.cut: set[str] = set()
        """Names of processes that nothing reaches and that reach nothing."""
        self._dice = dice

    async def request(
        self,
        caller: SimulatedProcess,
        target: SimulatedProcess,
        handle: Callable[[], Coroutine[Any, Any, ResultT]],
        *,
        cancels: bool = False,
    ) -> ResultT:
        """Have a process handle a request; return or raise what that returns or raises."""
        loop = asyncio.get_running_loop()
        exchange = _Exchange(loop.create_future())

        def arrive() -> None:
            if target.state == "killed":
                loop.call_later(self._travel(), exchange.settle, None, context=_OUTSIDE)
                return
            target.on_killed[exchange] = lambda: loop.call_later(
                self._travel(), exchange.settle, None, context=_OUTSIDE
            )
            target.call_later(0.0, begin)

        def begin() -> None:
            if not exchange.is_abandoned:
                exchange.work = loop.create_task(handle())
                exchange.work.add_done_callback(reply)

        def reply(done: asyncio.Task[ResultT]) -> None:
            del target.on_killed[exchange]
            self._carry(caller, target, exchange.settle, exchange, done)

        self._carry(caller, target, arrive, exchange)
        if not cancels and self.repeats and self._dice.random() < self.repeats:
            again = self._dice.uniform(0.0, _PATIENCE_SECONDS)
            loop.call_later(again, target.call_later, 0.0, lambda: loop.create_task(handle()), context=_OUTSIDE)
        if cancels:
            caller.on_killed[exchange] = exchange.abandon
        try:
            return await exchange.answer
        finally:
            if cancels:
                caller.on_killed.pop(exchange, None)
                if exchange.answer.cancelled():
                    loop.call_later(self._travel(), exchange.abandon, context=_OUTSIDE)

    def _carry(
        self,
        caller: SimulatedProcess,
        target: SimulatedProcess,
        deliver: Callable[..., object],
        exchange: "_Exchange[Any]",
        *message: object,
    ) -> None:
        loop = asyncio.get_running_loop()
        if caller.name in self.cut or target.name in self.cut or self._dice.random() < self.loss:
            loop.call_later(_PATIENCE_SECONDS, exchange.settle, None, context=_OUTSIDE)
        else:
            loop.call_later(self._travel(), deliver, *message, context=_OUTSIDE)

    def _travel(self) -> float:
        return _DELAY_SECONDS * (1 + self._dice.random())


@dataclass(slots=True, eq=False)
class _Exchange(Generic[ResultT]):
    answer: asyncio.Future[ResultT]
    work: asyncio.Task[ResultT] | None = None
    is_abandoned: bool = False

    def settle(self, done: asyncio.Task[ResultT] | None) -> None:
        """Pass on how the work ended; ``None``: the caller does not learn it."""
        if self.answer.done():
            return
        if done is None or done.cancelled():
            self.answer.set_exception(ConnectionError("no answer"))
        elif (error := done.exception()) is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(done.result())

    def abandon(self) -> None:
        self.is_abandoned = True
        if self.work is not None:
            self.work.cancel()
