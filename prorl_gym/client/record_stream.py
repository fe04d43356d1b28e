"""The stream of terminal records: lines of JSON, each parsed once; resumed after the last whole one."""

import logging
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import aiohttp
from pydantic_core import from_json

from prorl_gym.client.transport import MAX_RESPONSE_BYTES, RetryableError, ServiceError, Transport
from prorl_gym.client.wire_models import DeliveredRecord, PauseNotice
from prorl_gym.errors import FailureKind
from prorl_gym.records import Outcome, Rollout

_LOG = logging.getLogger(__name__)

_CURSOR_PREFIX = re.compile(rb'\{"cursor":([0-9]{1,18}),')
_ROLLOUT_ID = re.compile(rb'"rollout_id":"([A-Za-z0-9][A-Za-z0-9._:\-]{0,127})"')

_MAX_DAMAGED = 1000
"""Damaged records that a stream remembers."""

ACKNOWLEDGE_RECORDS = 64
"""Records after which they are acknowledged together."""

ACKNOWLEDGE_SECONDS = 5.0
"""Seconds after which a record is acknowledged at the latest, once the next one is read."""


@dataclass(frozen=True, slots=True)
class DamagedRecord:
    """A record that was left out, since it is damaged."""

    cursor: int
    rollout_id: str
    """Empty where it cannot be read."""


async def read_deliveries(
    transport: Transport, run_id: str | None, cursor: int, *, follow: bool
) -> AsyncGenerator[DeliveredRecord, None]:
    """Yield records past ``cursor``, each once, over as many connections as it takes. Raises ``ServiceError``."""
    budget = transport.new_retry_budget()
    while True:
        query = {"cursor": str(cursor), "follow": str(follow).lower(), **({"run": run_id} if run_id else {})}
        try:
            async with transport.send("GET", "/v1/stream", query=query) as response:
                async for line in split_lines(response.content):
                    budget.reset()
                    if line.startswith(b'{"paused":'):
                        _warn_paused(transport, line)
                    elif line:  # an empty one only shows that the service is alive
                        delivered = _parse_line(transport, line)
                        cursor = delivered.cursor
                        yield delivered
            if not follow:
                return
            # The service ends streams when it stops; it may be back soon.
            raise RetryableError(ServiceError(f"{transport.url}: the service has ended the stream.", "Was it stopped?"))
        except RetryableError as again:
            await budget.sleep_before_retry(again)


def _warn_paused(transport: Transport, line: bytes) -> None:
    notice = transport.parse(PauseNotice, line)
    end = "nothing ends it but 'resume'" if notice.expires_at is None else f"it expires at {_clock(notice.expires_at)}"
    _LOG.warning(
        "%s: no record comes: pool %s is paused since %s, and %s. If no trainer is updating it, call Client.resume().",
        transport.url,
        notice.paused,
        _clock(notice.since),
        end,
    )


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _parse_line(transport: Transport, line: bytes) -> DeliveredRecord:
    """Read a line; one that is no JSON, but has a cursor, is a damaged record. Raises ``ServiceError``."""
    try:
        return transport.parse(DeliveredRecord, line)
    except ServiceError:
        place = _CURSOR_PREFIX.match(line)
        if place is None:
            raise
        try:
            from_json(line)
        except ValueError:
            pass
        else:
            raise
    name = _ROLLOUT_ID.search(line)
    placeholder = Rollout.model_construct(
        rollout_id=name[1].decode() if name else "",
        run_id="",
        group_id=None,
        group_size=1,
        replica=0,
        environment="",
        outcome=Outcome(status="failed", kind=FailureKind.INTERNAL, message="its record is damaged"),
        accepted_at=0.0,
        finished_at=0.0,
    )
    return DeliveredRecord(cursor=int(place[1]), rollout=placeholder, damaged=True)


async def split_lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield complete lines; an incomplete one at the end is dropped.

    Each byte is scanned once, however the line was cut into packets.
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
        if held > MAX_RESPONSE_BYTES:
            raise ServiceError(f"A line of the stream is larger than {MAX_RESPONSE_BYTES >> 20} MiB.")


class Acknowledger:
    def __init__(self, acknowledge: Callable[[int], Awaitable[object]] | None) -> None:
        self._acknowledge = acknowledge
        self._cursor = 0
        self._acknowledged = 0
        self._records = 0
        self._last = time.monotonic()

    async def mark_received(self, cursor: int) -> None:
        self._cursor = max(cursor, self._cursor)
        self._records += 1
        if self._records >= ACKNOWLEDGE_RECORDS or time.monotonic() - self._last >= ACKNOWLEDGE_SECONDS:
            await self.flush()

    async def flush(self) -> None:
        """Acknowledge what was received and not yet acknowledged."""
        if self._acknowledge is not None and self._cursor > self._acknowledged:
            await self._acknowledge(self._cursor)
            self._acknowledged = self._cursor
        self._records = 0
        self._last = time.monotonic()


class RecordStream(AsyncIterator[DeliveredRecord]):
    """Yields records past a cursor, each once: the stream of ``Client.stream``.

    A read may be cancelled, or raise, and nothing is lost: the next read continues. A damaged record is left out,
    logged, and listed in ``damaged``.
    """

    def __init__(
        self,
        open_stream: Callable[[int], AsyncGenerator[DeliveredRecord, None]],
        cursor: int,
        acknowledger: Acknowledger,
    ) -> None:
        self._open_stream = open_stream
        self._cursor = cursor
        self._acknowledger = acknowledger
        self._reading: AsyncGenerator[DeliveredRecord, None] | None = None
        self._has_unacknowledged = False
        self._ended = False
        self.damaged: deque[DamagedRecord] = deque(maxlen=_MAX_DAMAGED)
        """Records that were left out, the latest ones."""

    async def __anext__(self) -> DeliveredRecord:
        while (delivered := await self.read_next()).damaged:
            pass
        return delivered

    async def read_next(self) -> DeliveredRecord:
        if self._ended:
            raise StopAsyncIteration
        if self._has_unacknowledged:
            await self._acknowledger.mark_received(self._cursor)
            self._has_unacknowledged = False
        reading = self._reading or self._open_stream(self._cursor)
        self._reading = None  # a generator that was cancelled, or raised, is at its end
        try:
            delivered = await anext(reading)
        except StopAsyncIteration:
            await self._acknowledger.flush()
            self._ended = True
            raise
        self._reading, self._cursor, self._has_unacknowledged = reading, delivered.cursor, True
        if delivered.damaged:
            self.damaged.append(DamagedRecord(delivered.cursor, delivered.rollout.rollout_id))
            _LOG.error("record %d (rollout %s) is damaged: left out", delivered.cursor, delivered.rollout.rollout_id)
        return delivered

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""
        self._ended = True
        reading, self._reading = self._reading, None
        if reading is not None:
            await reading.aclose()
