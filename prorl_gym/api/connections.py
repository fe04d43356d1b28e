"""Connections to the service: what a caller without the token can make them cost.

Heads are bounded in bytes and fields, bodies are dropped, every request has a deadline, and only so many connections
are kept that have never shown the token: the oldest one is closed for the next, so that a flood of them leaves the
service reachable. A connection that has shown the token is bounded in the size of its heads only, and never closed for
another one.
"""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from ipaddress import ip_network
from typing import Any, Protocol, cast
from weakref import WeakSet

import httptools
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from prorl_gym.api.answers import error_answer

_LOG = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 << 10
"""Of a request line with its fields, and of everything else that is no body: trailers, sizes of chunks."""
MAX_FIELDS = 100
MAX_PIPELINED = 8
"""Requests that are read while an earlier one is answered, on a connection that has shown the token; else none."""
MAX_SILENT = 4096
"""Connections on which nothing has arrived, each no more than a socket. Many: under a flood, the time that a caller has
for sending its head is this number over the connections that are made per second."""
MAX_STRANGERS = 256
"""Connections that have sent something, but not the token."""
REQUEST_SECONDS = 10.0
"""For a head to arrive, and for a request without the token to be over."""

_SILENT_SHARE, _STRANGERS_SHARE, _KNOWN_SHARE = 4, 16, 2
"""One in so many of the files that the process may open, at most. The rest is for the ledger, sandboxes and engines."""
_ACCEPTED_AT_ONCE = 64
"""Connections accepted before what has arrived on them is read. Far below ``MAX_SILENT``: otherwise one burst closes a
connection whose token lies unread."""
_WAITING = 4096
"""Connections that the kernel keeps until they are accepted; it refuses more."""
_UNSENT_BYTES = 128 << 10
"""Of an answer that the kernel takes before the peer makes room. Otherwise megabytes for each peer that never reads."""
_TCP_NOTSENT_LOWAT = 25
"""``socket`` has this constant of Linux since Python 3.12."""
_ACCEPT_AGAIN_SECONDS = 0.1
_LOG_SECONDS = 60.0
_ANSWER_SECONDS = 10
"""How long open requests may take to end once the service refuses work."""
_FULL = error_answer(
    503,
    "Too many connections have shown the token.",
    "Use fewer at once, or let the service open more files (ulimit -n).",
    {"Connection": "close", "Retry-After": "5"},
)


class RepeatedWarnings:
    """Warnings that callers can cause at will: the first of a kind is logged, later ones are counted, once a minute."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, kind: str) -> None:
        """Log or count one."""
        if kind in self._counts:
            self._counts[kind] += 1
            return
        _LOG.warning(kind)
        self._wait(kind)

    def _wait(self, kind: str) -> None:
        self._counts[kind] = 0
        asyncio.get_running_loop().call_later(_LOG_SECONDS, self._report, kind)

    def _report(self, kind: str) -> None:
        if count := self._counts.pop(kind):
            _LOG.warning("%s (%d more in %g s)", kind, count, _LOG_SECONDS)
            self._wait(kind)


class Stranger(Protocol):
    """A connection that has not shown the token."""

    peer: str
    """Whose connections are counted together."""

    def drop(self) -> None:
        """Close it at once."""
        ...


class BoundedConnections:
    """A bounded number of connections: for one more, the oldest of the peer that has the most is closed.

    Args:
        warnings: take note of it.
        bound: how many there may be now.
    """

    def __init__(self, warnings: RepeatedWarnings, bound: Callable[[], int]) -> None:
        self._warnings = warnings
        self._bound = bound
        self._of_peer: dict[str, dict[Stranger, None]] = {}
        """Oldest first."""
        self._count = 0

    def add(self, stranger: Stranger) -> None:
        """Count a connection as the newest."""
        self._of_peer.setdefault(stranger.peer, {})[stranger] = None
        self._count += 1
        if self._count > self._bound():
            self.drop_oldest()
            self._warnings.add("Too many connections without the token: the oldest are closed.")

    def remove(self, stranger: Stranger) -> None:
        """Count a connection no more. Idempotent."""
        connections = self._of_peer.get(stranger.peer, {})
        if stranger in connections:
            self._count -= 1
            del connections[stranger]
            if not connections:
                del self._of_peer[stranger.peer]

    def drop_oldest(self) -> None:
        """Close one, if there is one."""
        if self._of_peer:
            oldest = next(iter(max(self._of_peer.values(), key=len)))
            self.remove(oldest)
            oldest.drop()


class Connections:
    """The open connections of all sockets of a process, and the bounds that they share."""

    def __init__(self) -> None:
        self.warnings = RepeatedWarnings()
        self.silent = BoundedConnections(self.warnings, lambda: min(MAX_SILENT, _open_files() // _SILENT_SHARE))
        self.strangers = BoundedConnections(
            self.warnings, lambda: min(MAX_STRANGERS, _open_files() // _STRANGERS_SHARE)
        )
        self.known: set[GuardedProtocol] = set()
        """Connections that have shown the token."""

    @property
    def is_full(self) -> bool:
        """Whether no further connection may become a known one."""
        return len(self.known) >= _open_files() // _KNOWN_SHARE

    def note_late(self) -> None:
        """Warn that a connection was closed by its deadline."""
        self.warnings.add(f"A connection had no complete request within {REQUEST_SECONDS:g} s and was closed.")


class _Arrival:
    """A connection on which nothing has arrived yet: a socket, without what it takes to read requests.

    Args:
        connections: counts it.
        accepted: the socket.
        host: address of its peer.
        on_data: takes the socket and the first of its data.
    """

    def __init__(
        self,
        connections: Connections,
        accepted: socket.socket,
        host: str,
        on_data: Callable[[socket.socket, bytes], None],
    ) -> None:
        self.peer = peer_of(host)
        self._connections = connections
        self._socket = accepted
        self._on_data = on_data
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(accepted, self._read)
        self._deadline = self._loop.call_later(REQUEST_SECONDS, self._close_late)
        connections.silent.add(self)

    def drop(self) -> None:
        """Close it."""
        self._leave()
        self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(MAX_HEAD_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self._leave()
            self._on_data(self._socket, data)
        else:
            self.drop()

    def _close_late(self) -> None:
        self._connections.note_late()
        self.drop()

    def _leave(self) -> None:
        self._loop.remove_reader(self._socket)
        self._deadline.cancel()
        self._connections.silent.remove(self)


class _TooLargeError(Exception):
    """Raised through the parser: the head is too large, or too much is pipelined."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within the bounds of this module.

    Args:
        connections: counts this one.
        has_token: whether a request carries the token.
        data: what has arrived already.
        options: see ``HttpToolsProtocol``.
    """

    def __init__(
        self, connections: Connections, has_token: Callable[[Scope], bool], data: bytes = b"", **options: Any
    ) -> None:
        super().__init__(**options)
        self.peer = ""
        self._arrived = data
        self._guard = connections
        self._has_token = has_token
        self._is_known = False
        self._is_over = False
        """No further request is read."""
        self._is_in_head = False
        self._head_bytes = self._fields = 0
        self._unframed = 0
        """Bytes since the last one of a body, or since the end of a request."""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See ``asyncio.Protocol``."""
        super().connection_made(transport)
        self.peer = peer_of(self.client[0] if self.client else "")
        self._guard.strangers.add(self)
        self._start_clock()
        data, self._arrived = self._arrived, b""
        self.data_received(data)

    def drop(self) -> None:
        """See ``Stranger``."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._stop_clock()
        self._guard.strangers.remove(self)
        self._guard.known.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read requests. In steps, so that never more than two bounds of a head are held."""
        self._unset_keepalive_if_required()
        for start in range(0, len(data), MAX_HEAD_BYTES):
            if self._is_over:
                return
            self._read(data[start : start + MAX_HEAD_BYTES])

    def _read(self, data: bytes) -> None:
        assert self.parser is not None
        self._unframed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._finish()  # only HTTP/1.1 is spoken: the request is answered as one, what follows is not read
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _TooLargeError):
                self._refuse(431, "The head of the request is too large.", "Send fewer and shorter header fields.")
            else:
                self._refuse(400, "The request is not valid HTTP/1.1.", "See /docs for the routes.")
        else:
            if self._unframed > MAX_HEAD_BYTES:
                self._refuse(431, "The head of the request is too large.", "Send fewer and shorter header fields.")

    def on_message_begin(self) -> None:
        """See ``HttpToolsProtocol``."""
        if self._pending is not None and len(self.pipeline) >= (MAX_PIPELINED if self._is_known else 0):
            raise _TooLargeError
        super().on_message_begin()
        self._is_in_head = True
        self._head_bytes = self._fields = 0

    def on_url(self, url: bytes) -> None:
        """See ``HttpToolsProtocol``."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See ``HttpToolsProtocol``. Trailers are dropped: nothing here reads them."""
        self._fields += 1
        self._count(len(name) + len(value))
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See ``HttpToolsProtocol``."""
        self._is_in_head = False
        if not self._is_known and self._guard.is_full:
            self.app = cast(Any, _FULL)
        super().on_headers_complete()
        if not self._is_known and self.app is not _FULL and self._has_token(cast(Scope, self.scope)):
            self._is_known = True
            self._guard.strangers.remove(self)
            self._guard.known.add(self)
        if self._is_known:
            self._stop_clock()

    def on_body(self, body: bytes) -> None:
        """See ``HttpToolsProtocol``. Nothing reads the body of a request that is not let in."""
        self._unframed = 0
        if self._is_known:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """See ``HttpToolsProtocol``."""
        self._unframed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See ``HttpToolsProtocol``."""
        if not self.transport.is_closing():
            if not self._is_known:
                self._guard.strangers.remove(self)
                self._guard.strangers.add(self)  # as the newest
            if not self.pipeline:
                self._start_clock()
        super().on_response_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES or self._fields > MAX_FIELDS:
            raise _TooLargeError

    def _refuse(self, status: int, what: str, fix: str) -> None:
        """Answer that the request cannot be read, after those that were read."""
        self._guard.warnings.add(f"A request could not be read. {what}")
        pending = self._pending
        if pending is not None and not pending.more_body:
            self._finish()
            return
        self._is_over = True
        if pending is None or not pending.response_started:
            answer = error_answer(status, what, fix, {"Connection": "close"})
            fields = b"".join(b"%s: %s\r\n" % field for field in answer.raw_headers)
            self.transport.write(STATUS_LINE[status] + fields + b"\r\n" + bytes(answer.body))
        self.transport.close()

    def _finish(self) -> None:
        """Read no more, and close when all that was read is answered."""
        self._is_over = True
        if self._pending is None:
            self.transport.close()
        else:
            self._pending.keep_alive = False

    @property
    def _pending(self) -> RequestResponseCycle | None:
        """The newest request, unless it is answered."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return None if cycle is None or cycle.response_complete else cycle

    def _start_clock(self) -> None:
        self._stop_clock()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._close_late)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_late(self) -> None:
        self._guard.note_late()
        self.drop()


class HttpServer(uvicorn.Server):
    """Answers routes within the bounds of this module. Signals are left to the caller.

    Args:
        app: the routes.
        has_token: whether a request carries the token that they ask for.
        connections: shared by all servers of the process.
    """

    def __init__(
        self, app: ASGIApp, has_token: Callable[[Scope], bool], connections: Connections | None = None
    ) -> None:
        self._guard = connections or Connections()
        self._has_token = has_token
        self._arrivals: WeakSet[_Arrival] = WeakSet()
        self._starting: set[asyncio.Task[Any]] = set()
        config = uvicorn.Config(
            app,
            http=cast(Any, self._protocol),
            ws="none",
            log_config=None,
            log_level="warning",  # its "Started server process", once for each front, says less than our own lines
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,  # nothing here depends on the client's address, and no header about it is trusted
            timeout_graceful_shutdown=_ANSWER_SECONDS,
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none: uvicorn would raise them again at its end, before what is in hand is finished."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server``. Accepts by itself: asyncio would make each connection cost a task and a transport."""
        self.servers = []
        for listener in sockets or ():
            listener.setblocking(False)
            listener.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)  # accepted ones inherit it
            listener.listen(_WAITING)
            self._listen(listener)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server``."""
        for listener in sockets or ():
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        for arrival in list(self._arrivals):
            arrival.drop()
        await super().shutdown(sockets)

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:  # a retry may come after the end
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # the process or the host has no descriptor or memory left
                self._guard.warnings.add(f"A connection cannot be accepted ({error.strerror}).")
                self._guard.silent.drop_oldest()
                loop.remove_reader(listener)
                loop.call_later(_ACCEPT_AGAIN_SECONDS, self._listen, listener)
                return
            accepted.setblocking(False)
            self._arrivals.add(_Arrival(self._guard, accepted, str(address[0]), self._begin))

    def _begin(self, accepted: socket.socket, data: bytes) -> None:
        """Read requests from a connection on which something has arrived."""
        protocol = self._protocol(data, config=self.config, server_state=self.server_state, app_state={})
        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.connect_accepted_socket(lambda: protocol, accepted))
        self._starting.add(task)  # the event loop itself keeps only a weak reference
        task.add_done_callback(self._starting.discard)

    def _protocol(self, data: bytes = b"", **options: Any) -> GuardedProtocol:
        return GuardedProtocol(self._guard, self._has_token, data, **options)


def peer_of(host: str) -> str:
    """Return whose connections are counted together: an address, or the network of one IPv6 host."""
    return str(ip_network(f"{host.partition('%')[0]}/64", strict=False)) if ":" in host else host


def _open_files() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
