"""A model API of a rollout that nobody can call."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from socket import socket

from prorl_gym.records import Message


class FakeGateway:
    """Implements ``ModelGateway`` without a server.

    Args:
        messages: the main conversation; all but the first were sampled.
        reason: why it answers no more calls; ``None``: it does, until ``stopped`` is set.
    """

    token = "secret"

    def __init__(self, messages: Sequence[Message] = (), reason: Exception | None = None) -> None:
        self.stopped: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        if reason is not None:
            self.stopped.set_result(reason)
        self.port = 0
        """Of the latest listener."""
        self.serving_count = 0
        self._messages = messages

    @asynccontextmanager
    async def serving(self, listener: socket) -> AsyncGenerator[None]:
        with listener:
            self.port = listener.getsockname()[1]
            self.serving_count += 1
            try:
                yield
            finally:
                self.serving_count -= 1

    async def wait_stopped(self) -> Exception:
        return await asyncio.shield(self.stopped)

    def conversation(self) -> tuple[Sequence[Message], int]:
        return list(self._messages), min(1, len(self._messages))
