"""The stream of terminal records: lines of JSON that are read once, resumed after the last whole one."""

import logging
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Self

import aiohttp
from pydantic_core import from_json

from prorl_gym.client.answers import Damaged, Delivered
from prorl_gym.client.transport import ANSWER_LIMIT, Again, ServiceError, Transport
from prorl_gym.errors import FailureKind
from prorl_gym.records import Outcome, Rollout

_LOG = logging.getLogger(__name__)

_PLACE = re.compile(rb'\{"cursor":([0-9]{1,18}),')
_NAME = re.compile(rb'"rollout_id":"([A-Za-z0-9][A-Za-z0-9._:\-]{0,127})"')

_REPORTED = 1000
"""Damaged records that a stream remembers."""

ACKNOWLEDGE_RECORDS = 64
"""Records after which they are acknowledged together."""

ACKNOWLEDGE_SECONDS = 5.0
"""Seconds after which a record is acknowledged at the latest, when the next one comes."""


async def deliveries(
    transport: Transport, run_id: str | None, cursor: int, *, follow: bool
) -> AsyncGenerator[Delivered, None]:
    """Yield records past ``cursor``, each once, over as many connections as it takes.

    Raises:
        ServiceError: refused, not reached for longer than the client is patient, or a record that cannot be read.
    """
    patience = transport.patience()
    while True:
        query = {"cursor": str(cursor), "follow": str(follow).lower(), **({"run": run_id} if run_id else {})}
        try:
            async with transport.open("GET", "/v1/stream", query=query) as response:
                async for line in lines(response.content):
                    patience.progress()
                    if line:  # an empty one says only that the service is alive
                        delivered = _read(transport, line)
                        cursor = delivered.cursor
                        yield delivered
            if not follow:
                return
            # The service ends streams when it stops; it may be back soon.
            raise Again(ServiceError(f"{transport.url}: the service has ended the stream.", "Was it stopped?"))
        except Again as again:
            await patience.rest(again)


def _read(transport: Transport, line: bytes) -> Delivered:
    """Read a line; one that is no JSON, but says where it stands in the stream, is a damaged record.

    Raises:
        ServiceError: it is no line of a stream, or a record of a later release.
    """
    try:
        return transport.read(Delivered, line)
    except ServiceError:
        place = _PLACE.match(line)
        if place is None or _is_json(line):
            raise
    name = _NAME.search(line)
    return Delivered(cursor=int(place[1]), rollout=_unknown(name[1].decode() if name else ""), damaged=True)


def _is_json(line: bytes) -> bool:
    try:
        from_json(line)
    except ValueError:
        return False
    return True


def _unknown(rollout_id: str) -> Rollout:
    """Return a record that says no more than an id, which may be empty."""
    outcome = Outcome(status="failed", kind=FailureKind.INTERNAL, message="its record is damaged")
    return Rollout.model_construct(
        rollout_id=rollout_id,
        run_id="",
        group_id=None,
        group_size=1,
        replica=0,
        environment="",
        outcome=outcome,
        accepted_at=0.0,
        finished_at=0.0,
    )


async def lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield complete lines; half a one at the end is dropped.

    Each byte is looked at once, however the line was cut into packets.
    """
    parts: list[bytes] = []
    held = 0
    async for chunk in content.iter_any():
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            complete, parts, held = b"".join((*parts, line)), [], 0
            yield complete
        parts.append(rest)
        held += len(rest)
        if held > ANSWER_LIMIT:
            raise ServiceError(f"A line of the stream is larger than {ANSWER_LIMIT >> 20} MiB.")


class Acknowledger:
    """Tells the service now and then how far its reader has come.

    Args:
        send: acknowledges a cursor; ``None``: nobody is told.
    """

    def __init__(self, send: Callable[[int], Awaitable[object]] | None) -> None:
        self._send = send
        self._cursor = 0
        self._acknowledged = 0
        self._records = 0
        self._last = time.monotonic()

    async def received(self, cursor: int) -> None:
        """Note that the reader is done with everything up to this cursor."""
        self._cursor = max(cursor, self._cursor)
        self._records += 1
        if self._records >= ACKNOWLEDGE_RECORDS or time.monotonic() - self._last >= ACKNOWLEDGE_SECONDS:
            await self.flush()

    async def flush(self) -> None:
        """Acknowledge what was received and not yet acknowledged."""
        if self._send is not None and self._cursor > self._acknowledged:
            await self._send(self._cursor)
            self._acknowledged = self._cursor
        self._records = 0
        self._last = time.monotonic()


class RecordStream:
    """Records past a cursor, each once. What ``Client.stream`` gives.

    A wait for the next one may be cancelled, or end with an error, and nothing is lost: the next wait goes on. A record
    that is damaged is left out, logged, and noted in ``damaged``.

    Args:
        open_after: begins to read past a cursor.
        cursor: of the last record seen.
        acknowledger: is told of a record when the next one is asked for.
    """

    def __init__(
        self, open_after: Callable[[int], AsyncGenerator[Delivered, None]], cursor: int, acknowledger: Acknowledger
    ) -> None:
        self._open_after = open_after
        self._cursor = cursor
        self._acknowledger = acknowledger
        self._reading: AsyncGenerator[Delivered, None] | None = None
        self._given = False
        self._ended = False
        self.damaged: deque[Damaged] = deque(maxlen=_REPORTED)
        """Records that were left out, the latest ones."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivered:
        while (delivered := await self.read()).damaged:
            pass
        return delivered

    async def read(self) -> Delivered:
        """Return the next record, or the stand-in of one that is damaged.

        Raises:
            StopAsyncIteration: there is none, and none is waited for.
        """
        if self._ended:
            raise StopAsyncIteration
        if self._given:
            await self._acknowledger.received(self._cursor)
            self._given = False
        reading = self._reading or self._open_after(self._cursor)
        self._reading = None  # a generator that was cancelled, or raised, is at its end
        try:
            delivered = await anext(reading)
        except StopAsyncIteration:
            await self._acknowledger.flush()
            self._ended = True
            raise
        self._reading, self._cursor, self._given = reading, delivered.cursor, True
        if delivered.damaged:
            self.damaged.append(Damaged(delivered.cursor, delivered.rollout.rollout_id))
            _LOG.error("record %d (rollout %s) is damaged: left out", delivered.cursor, delivered.rollout.rollout_id)
        return delivered

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""
        self._ended = True
        reading, self._reading = self._reading, None
        if reading is not None:
            await reading.aclose()
