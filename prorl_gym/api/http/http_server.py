"""The HTTP server of the service, with bounds on what a caller without the token can make it cost.

``HttpServer`` accepts connections by itself. A connection on which nothing has arrived is a socket and a timer
(``_SilentConnection``). Its first bytes make it a ``GuardedProtocol``, which is uvicorn's with bounds: heads are
bounded in bytes and fields, bodies without the token are dropped, and a request without the token has a deadline. Once
a request has shown the token, only the size of heads and the number of pipelined requests are bounded. How many
connections there may be: ``connection_limits``.
"""

import asyncio
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast
from weakref import WeakSet

import httptools
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from prorl_gym.api.http.connection_limits import Connections, peer_key
from prorl_gym.api.http.error_responses import error_response
from prorl_gym.api.http.middleware import has_bearer_token

MAX_HEAD_BYTES = 32 << 10
"""Of a request line with its fields, and of everything else that is no body: trailers, sizes of chunks."""
MAX_FIELDS = 100
MAX_PIPELINED = 8
"""Requests that are read while an earlier one is answered, on a connection that has shown the token; else none."""

_MAX_ACCEPTS_PER_EVENT = 64
"""Connections accepted before what has arrived on them is read. Far below
``ConnectionLimits.silent``: otherwise one burst closes a connection whose token is not read yet."""
_LISTEN_BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted; it refuses more."""
_MAX_UNSENT_BYTES = 128 << 10
"""Of an answer that the kernel takes before the peer makes room. Otherwise megabytes for each peer that never reads."""
_TCP_NOTSENT_LOWAT = 25
"""``socket`` has this constant of Linux since Python 3.12."""
_GRACEFUL_SHUTDOWN_SECONDS = 10
"""How long open requests may take to end once the service refuses work."""
_FULL_RESPONSE = error_response(
    503,
    "Too many connections have shown the token.",
    "Use fewer at once, or let the service open more files (ulimit -n).",
    {"Connection": "close", "Retry-After": "5"},
)


class HttpServer(uvicorn.Server):
    """Answers routes within the bounds of this module. Signals are left to the caller.

    Args:
        app: the routes.
        token: that the routes require.
        connections: counts and bounds the open ones.
    """

    def __init__(self, app: ASGIApp, token: str, connections: Connections | None = None) -> None:
        self._connections = connections or Connections()
        self._token = token.encode("ascii")
        self._silent: WeakSet[_SilentConnection] = WeakSet()
        self._starting: set[asyncio.Task[Any]] = set()
        config = uvicorn.Config(
            app,
            http=cast(Any, self._make_protocol),
            ws="none",
            log_config=None,
            log_level="warning",  # its "Started server process" adds nothing to our own lines
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,  # nothing here depends on the client's address, and no header about it is trusted
            timeout_graceful_shutdown=_GRACEFUL_SHUTDOWN_SECONDS,
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
            listener.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)  # accepted ones inherit it
            listener.listen(_LISTEN_BACKLOG)
            self._listen(listener)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See ``uvicorn.Server``."""
        for listener in sockets or ():
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        for arrival in list(self._silent):
            arrival.drop()
        await super().shutdown(sockets)

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:  # a retry may come after the end
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_MAX_ACCEPTS_PER_EVENT):
            try:
                accepted, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # the process or the host has no descriptor or memory left
                self._connections.warnings.warn(f"A connection cannot be accepted ({error.strerror}).")
                self._connections.silent.drop_oldest()
                loop.remove_reader(listener)
                loop.call_later(self._connections.limits.accept_retry_seconds, self._listen, listener)
                return
            accepted.setblocking(False)
            self._silent.add(_SilentConnection(self._connections, accepted, str(address[0]), self._start_protocol))

    def _start_protocol(self, accepted: socket.socket, data: bytes) -> None:
        """Read requests from a connection on which something has arrived."""
        protocol = self._make_protocol(data, config=self.config, server_state=self.server_state, app_state={})
        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.connect_accepted_socket(lambda: protocol, accepted))
        self._starting.add(task)  # the event loop itself keeps only a weak reference
        task.add_done_callback(self._starting.discard)

    def _make_protocol(self, data: bytes = b"", **options: Any) -> "GuardedProtocol":
        return GuardedProtocol(self._connections, self._token, data, **options)


class _SilentConnection:
    """A connection on which nothing has arrived yet: a socket, without what it takes to read requests.

    Args:
        connections: counts it.
        accepted: the socket.
        host: address of its peer.
        on_data: called with the socket and its first data.
    """

    def __init__(
        self,
        connections: Connections,
        accepted: socket.socket,
        host: str,
        on_data: Callable[[socket.socket, bytes], None],
    ) -> None:
        self.peer = peer_key(host)
        self._connections = connections
        self._socket = accepted
        self._on_data = on_data
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(accepted, self._read)
        self._deadline = self._loop.call_later(connections.limits.request_seconds, self._close_on_timeout)
        connections.silent.add_newest(self)

    def drop(self) -> None:
        """Close it."""
        self._stop_watching()
        self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(MAX_HEAD_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self._stop_watching()
            self._on_data(self._socket, data)
        else:
            self.drop()

    def _close_on_timeout(self) -> None:
        self._connections.warn_timeout()
        self.drop()

    def _stop_watching(self) -> None:
        self._loop.remove_reader(self._socket)
        self._deadline.cancel()
        self._connections.silent.discard(self)


class _TooLargeError(Exception):
    """Raised through the parser: the head is too large, or too much is pipelined."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol within the bounds of this module.

    Args:
        connections: counts this one.
        token: that the routes require.
        data: what has arrived already.
        options: see ``HttpToolsProtocol``.
    """

    def __init__(self, connections: Connections, token: bytes, data: bytes = b"", **options: Any) -> None:
        super().__init__(**options)
        self.peer = ""
        self._received = data
        self._connections = connections
        self._token = token
        self._is_authenticated = False
        self._is_finished = False
        """No further request is read."""
        self._is_in_head = False
        self._head_bytes = self._fields = 0
        self._unframed = 0
        """Bytes since the last one of a body, or since the end of a request."""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See ``asyncio.Protocol``."""
        super().connection_made(transport)
        self.peer = peer_key(self.client[0] if self.client else "")
        self._connections.unauthenticated.add_newest(self)
        self._start_deadline()
        data, self._received = self._received, b""
        self.data_received(data)

    def drop(self) -> None:
        """See ``CountedConnection``."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._stop_deadline()
        self._connections.unauthenticated.discard(self)
        self._connections.authenticated.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read requests. In steps, so that never more than two bounds of a head are held."""
        self._unset_keepalive_if_required()
        for start in range(0, len(data), MAX_HEAD_BYTES):
            if self._is_finished:
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
        if self._pending is not None and len(self.pipeline) >= (MAX_PIPELINED if self._is_authenticated else 0):
            raise _TooLargeError
        super().on_message_begin()
        self._is_in_head = True
        self._head_bytes = self._fields = 0

    def on_url(self, url: bytes) -> None:
        """See ``HttpToolsProtocol``."""
        self._count_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See ``HttpToolsProtocol``. Trailers are dropped: nothing here reads them."""
        self._fields += 1
        self._count_head_bytes(len(name) + len(value))
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See ``HttpToolsProtocol``."""
        self._is_in_head = False
        if not self._is_authenticated and self._connections.is_full:
            self.app = cast(Any, _FULL_RESPONSE)
        super().on_headers_complete()
        scope = cast(Scope, self.scope)
        if not self._is_authenticated and self.app is not _FULL_RESPONSE and has_bearer_token(scope, self._token):
            self._is_authenticated = True
            self._connections.unauthenticated.discard(self)
            self._connections.authenticated.add(self)
        if self._is_authenticated:
            self._stop_deadline()

    def on_body(self, body: bytes) -> None:
        """See ``HttpToolsProtocol``. The body of a request without the token is not read."""
        self._unframed = 0
        if self._is_authenticated:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """See ``HttpToolsProtocol``."""
        self._unframed = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """See ``HttpToolsProtocol``."""
        if not self.transport.is_closing():
            if not self._is_authenticated:
                self._connections.unauthenticated.discard(self)
                self._connections.unauthenticated.add_newest(self)  # as the newest
            if not self.pipeline:
                self._start_deadline()
        super().on_response_complete()

    def _count_head_bytes(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES or self._fields > MAX_FIELDS:
            raise _TooLargeError

    def _refuse(self, status: int, what: str, fix: str) -> None:
        """Answer that the request cannot be read, after those that were read."""
        self._connections.warnings.warn(f"A request could not be read. {what}")
        pending = self._pending
        if pending is not None and not pending.more_body:
            self._finish()
            return
        self._is_finished = True
        if pending is None or not pending.response_started:
            answer = error_response(status, what, fix, {"Connection": "close"})
            fields = b"".join(b"%s: %s\r\n" % field for field in answer.raw_headers)
            self.transport.write(STATUS_LINE[status] + fields + b"\r\n" + bytes(answer.body))
        self.transport.close()

    def _finish(self) -> None:
        """Read no more, and close when all that was read is answered."""
        self._is_finished = True
        if self._pending is None:
            self.transport.close()
        else:
            self._pending.keep_alive = False

    @property
    def _pending(self) -> RequestResponseCycle | None:
        """The newest request, unless it is answered."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return None if cycle is None or cycle.response_complete else cycle

    def _start_deadline(self) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(self._connections.limits.request_seconds, self._close_on_timeout)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_on_timeout(self) -> None:
        self._connections.warn_timeout()
        self.drop()
