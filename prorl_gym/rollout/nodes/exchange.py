"""One end of an ordered message channel over requests that may be lost, repeated or late. No I/O, no clock.

Each direction has its own requests, one at a time: the sender repeats everything from the first message that is not
acknowledged, the receiver drops what it has. So every message is processed once and in order.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from pydantic import BaseModel

MessageT = TypeVar("MessageT")

PAGE_CHARS = 16 << 20
"""Characters of messages after which a page ends."""


class Outbox:
    """Encoded messages that the other end has not acknowledged, numbered from 1."""

    def __init__(self) -> None:
        self._messages: deque[str] = deque()
        self._acknowledged = 0
        self.not_empty = asyncio.Event()
        """Set while there are messages."""

    def send(self, message: BaseModel) -> None:
        """Add a message, for the next exchange."""
        self._messages.append(message.model_dump_json())
        self.not_empty.set()

    def restart(self) -> None:
        """Begin again at 1, with no messages: for another session."""
        self._messages.clear()
        self._acknowledged = 0
        self.not_empty.clear()

    def acknowledge(self, number: int) -> None:
        """Drop the messages up to this one. Older acknowledgements than the last are ignored."""
        while self._acknowledged < number and self._messages:
            self._messages.popleft()
            self._acknowledged += 1
        if not self._messages:
            self.not_empty.clear()

    def page(self) -> tuple[int, list[str]]:
        """Return the first messages and the number of the first of them."""
        texts: list[str] = []
        size = 0
        for text in self._messages:
            if texts and size + len(text) > PAGE_CHARS:
                break
            texts.append(text)
            size += len(text)
        return self._acknowledged + 1, texts


class Inbox(Generic[MessageT]):
    """Which messages of the other end were processed."""

    def __init__(self) -> None:
        self.acknowledged = 0
        """Number of the last one."""

    def accept(self, first: int, messages: Sequence[MessageT]) -> Sequence[MessageT]:
        """Return those that are new, in order; nothing while one before them is missing.

        Args:
            first: number of the first message.
            messages: a page.
        """
        new = messages[max(0, self.acknowledged + 1 - first) :] if first <= self.acknowledged + 1 else ()
        self.acknowledged += len(new)
        return new
