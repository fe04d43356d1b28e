"""uvicorn's server with its bounds set, and a protocol that bounds what uvicorn does not.

The bounds protect the process. They do not keep the port free for callers with the token: docs/threat-model.md.
"""

import asyncio
import resource
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 32 << 10
"""Longest request line with its fields and trailers."""
MAX_FIELDS = 100
MAX_PIPELINED = 8
"""Requests that wait on a connection while an earlier one is answered."""
MAX_CONNECTIONS = 16_384
"""Also at most a quarter of the files that the process may open: the rest is for ledger, sandboxes and engines."""
KEEP_ALIVE_SECONDS = 5
"""A connection on which nothing arrives is closed after that, unless a request is being answered. The client does not
use its own again after 3 (``client.transport``)."""

_BACKLOG = 512
"""Connections accepted at once, before those above the bound are closed."""
_GRACEFUL_SHUTDOWN_SECONDS = 10
"""How long open requests may take to end once the service refuses work."""


class HttpServer(uvicorn.Server):
    """Answers routes within the bounds of this module. Signals are left to the caller."""

    def __init__(self, app: ASGIApp) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            log_config=None,
            log_level="error",  # uvicorn warns of each request that it refuses: callers without the token fill the log
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,  # nothing here depends on the client's address, and no header about it is trusted
            limit_concurrency=min(MAX_CONNECTIONS, files // 4),
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_GRACEFUL_SHUTDOWN_SECONDS,
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none: uvicorn would raise them again at its end, before running rollouts are finished."""
        yield


class _TooLargeError(Exception):
    """Too much was sent. Raised through the parser; uvicorn answers 400 and closes the connection."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds of heads, pipelines and connections, and a time-out before the first request."""

    _head_bytes = 0
    """Bytes of the newest request's head that were parsed."""
    _unframed_bytes = 0
    """Bytes since the last one of a body or the end of a request: the parser keeps a field that has no end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See ``asyncio.Protocol``. uvicorn refuses requests at ``limit_concurrency``, but keeps all connections."""
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.abort()
        self._start_timeout()

    def data_received(self, data: bytes) -> None:
        self._unframed_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unframed_bytes > MAX_HEAD_BYTES:
            self.send_400_response("The head of the request is too large.")
        elif self.cycle is None or self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            self._start_timeout()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _TooLargeError
        super().on_message_begin()
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head_bytes(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self.headers = []  # of trailers: uvicorn would add them to the headers of the request

    def on_body(self, body: bytes) -> None:
        self._unframed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unframed_bytes = 0
        super().on_message_complete()

    def _count_head_bytes(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_FIELDS:
            raise _TooLargeError

    def _start_timeout(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
