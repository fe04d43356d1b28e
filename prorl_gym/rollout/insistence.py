"""Calling a ledger that may fail for a while (full disk): again after a pause, until it works or the service stops."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from prorl_gym.rollout.ledger_file import LedgerError

_LOG = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class Insistence:
    """Makes calls until they work.

    Args:
        pause_seconds: after each failure.
    """

    def __init__(self, pause_seconds: float) -> None:
        self.problem = ""
        """How the ledger fails at the moment; empty while it works."""
        self._pause_seconds = pause_seconds
        self._stopping = asyncio.Event()

    @property
    def stopping(self) -> bool:
        """Whether failures are final by now."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Let the next failure of each call be its last."""
        self._stopping.set()

    async def __call__(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Call the ledger until it works.

        Raises:
            LedgerError: the service stops while the ledger still fails.
        """
        while True:
            try:
                result = await call()
            except LedgerError as error:
                self.problem = str(error)
                _LOG.error("the ledger fails: %s", error)
                if self.stopping:
                    raise
            else:
                self.problem = ""
                return result
            await pause(self._stopping, self._pause_seconds)


async def pause(unless: asyncio.Event, seconds: float) -> None:
    """Wait so long, or until the event."""
    try:
        async with asyncio.timeout(seconds):
            await unless.wait()
    except TimeoutError:
        return
