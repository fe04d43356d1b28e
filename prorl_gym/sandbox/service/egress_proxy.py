"""The network access of one sandbox: a forward proxy of the service that listens inside.

The guest makes a listening socket on the loopback of the sandbox's own network namespace and hands it over the
control channel. A socket belongs to the namespace it was made in, wherever it is held: programs inside connect to
127.0.0.1, the service accepts. The sandbox has no route, no name service, no socket file and no forwarding process;
nothing has to be cleaned up, and other sandboxes cannot reach the proxy.
"""

import asyncio
import logging
import re
import socket
import time
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.egress_rules import AllowList, EgressRefusedError, split_authority
from prorl_gym.sandbox.service.guest_channel import GuestChannel

log = logging.getLogger(__name__)

PROXY_PORT = 3128
"""Where programs in the sandbox find the proxy, on 127.0.0.1."""

_MAX_HEAD = 32 << 10
"""Bytes of a request's line and headers."""

_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_HEAD_SECONDS, _CONNECT_SECONDS, _IDLE_SECONDS = 30.0, 15.0, 300.0
"""Longest times: until a request's head is there, for each address of a server, and without a byte from either side."""
_CHUNK = 64 << 10
_METHOD = re.compile(r"[A-Z]{1,20}")
_TARGET = re.compile(r"[\x21-\x7e]+")
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HOP_HEADERS = frozenset(
    {"host", "connection", "proxy-connection", "proxy-authorization", "keep-alive", "te", "upgrade"}
)
"""Headers that concern one hop only; ``Host`` is written again, so that it names what was checked."""

_EgressOutcome = Literal["allowed", "refused", "unreachable", "malformed", "cut"]
"""``refused``: not on the list; ``malformed``: no request of a proxy; ``cut``: the sandbox was closed first."""

_StreamPair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def with_proxy_environment(spec: SandboxSpec, allowed: AllowList) -> SandboxSpec:
    """Return the spec with the variables by which programs find the proxy, if the sandbox may reach anything.

    They reach the sandbox's own loopback without it; where the list names a loopback host, that means the service's.
    """
    if not allowed.rules:
        return spec
    listed = {rule.host for rule in allowed.rules}
    direct = ",".join(host for host in _LOOPBACK_HOSTS if host not in listed)
    proxies = dict.fromkeys(
        ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), f"http://127.0.0.1:{PROXY_PORT}"
    )
    return replace(spec, env={**proxies, "NO_PROXY": direct, "no_proxy": direct, **spec.env})


async def open_egress(sandbox_id: str, allowed: AllowList, channel: GuestChannel) -> "EgressProxy | None":
    """Start the proxy of a sandbox that is ready; ``None`` when nothing is allowed. Close it with the sandbox.

    Call before any program of the payload runs. Raises ``OSError`` when the port is taken inside.
    """
    if not allowed.rules:
        return None
    proxy = EgressProxy(sandbox_id, allowed)
    reply = await channel.request("listen", port=PROXY_PORT)
    await proxy.serve(socket.socket(fileno=reply.descriptors[0]))
    return proxy


@dataclass(frozen=True, slots=True)
class EgressLimits:
    """Bounds of one sandbox's traffic."""

    connections: int = 64
    """At a time; more are answered 503."""
    total_bytes: int = 4 << 30
    """In both directions together, over the life of the sandbox."""
    requests: int = 100_000
    """Over the life of the sandbox; more are answered 503. Each is a line of the service's log."""


class BadRequestError(Exception):
    """Not a request that a forward proxy can serve."""


@dataclass(frozen=True, slots=True)
class _ProxyRequest:
    method: str
    host: str
    port: int
    head: bytes
    """First bytes for the server; empty for ``CONNECT``, which only opens a tunnel."""


_UNREADABLE_REQUEST = _ProxyRequest("", "", 0, b"")
"""Stands in the log for a request that could not be read."""


class EgressProxy:
    """The proxy of one sandbox. Close it with the sandbox."""

    def __init__(self, sandbox_id: str, allowed: AllowList, limits: EgressLimits = EgressLimits()) -> None:
        self._context = copy_context()
        self._id = sandbox_id
        self._allowed = allowed
        self._limits = limits
        self._requests = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._bytes = 0

    def bind_log_context(self) -> None:
        """Log requests that begin from now on in the caller's context. Call whenever something is run in the sandbox.

        A warm sandbox is started before its rollout is known, and a connection does not show what made it.
        """
        self._context = copy_context()

    async def serve(self, listener: socket.socket) -> None:
        """Serve a listening socket, which is owned from here on."""
        listener.setblocking(False)
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=_MAX_HEAD)

    async def close(self) -> None:
        await run_shielded(self._close())

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept a connection. Not a coroutine: asyncio would log every cancelled one as a failure."""
        self._requests += 1
        if self._requests > self._limits.requests:
            return _reject(writer, "The sandbox's requests are used up.", "Make fewer, larger ones.")
        if len(self._connections) >= self._limits.connections:
            return _reject(writer, "Too many connections of this sandbox are open.", "Close some first.")
        task = asyncio.create_task(self._serve_connection(reader, writer), context=self._context)
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(_HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            await self._serve_request(parse_request(head), reader, writer)
        except BadRequestError as error:
            self._report(_UNREADABLE_REQUEST, "malformed", str(error), started)
            fix = "Use this proxy through HTTP_PROXY and HTTPS_PROXY."
            writer.write(_error_response("400 Bad Request", f"Bad request: {error}.", fix))
        except asyncio.LimitOverrunError:
            self._report(_UNREADABLE_REQUEST, "malformed", "its head is too long", started)
            fix = f"At most {_MAX_HEAD} bytes of headers."
            writer.write(_error_response("431 Request Header Fields Too Large", "The request's head is too long.", fix))
        except (asyncio.IncompleteReadError, OSError):
            return  # the program in the sandbox closed the connection without a whole request
        finally:
            writer.close()

    async def _serve_request(
        self, request: _ProxyRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        started = time.monotonic()
        server = f"{request.host}:{request.port}"
        relay = _Relay(self._count_bytes)
        outcome: _EgressOutcome = "cut"
        detail = "the sandbox was closed"
        try:
            addresses = await self._allowed.resolve(request.host, request.port)
            outside = await _connect(addresses, request.port)
            await relay.run(request, (reader, writer), outside)
            outcome, detail = "allowed", relay.end_detail
        except EgressRefusedError as error:
            outcome, detail = "refused", str(error)
            fix = "Add it to the sandbox's egress list."
            writer.write(_error_response("403 Forbidden", f"{server} may not be reached: {error}.", fix))
        except OSError as error:
            outcome, detail = "unreachable", str(error)
            writer.write(_error_response("502 Bad Gateway", f"{server} cannot be reached: {error}.", "Is it up?"))
        finally:
            self._report(request, outcome, detail, started, relay.sent, relay.received)

    def _count_bytes(self, count: int) -> bool:
        """Count bytes of this sandbox; whether the total is still within the bound."""
        self._bytes += count
        return self._bytes <= self._limits.total_bytes

    def _report(
        self,
        request: _ProxyRequest,
        outcome: _EgressOutcome,
        detail: str,
        started: float,
        sent: int = 0,
        received: int = 0,
    ) -> None:
        """Log a request that is over: a warning, unless it was allowed. The log record has the fields as ``event``."""
        event: dict[str, Any] = {
            "sandbox_id": self._id,
            "method": request.method,
            "host": request.host[:255],
            "port": request.port,
            "outcome": outcome,
            "detail": detail,
            "sent": sent,
            "received": received,
            "seconds": round(time.monotonic() - started, 6),
        }
        level = logging.INFO if outcome == "allowed" else logging.WARNING
        words = "egress of sandbox %(sandbox_id)s: %(method)s %(host)s:%(port)d %(outcome)s (%(detail)s), "
        words += "%(sent)d bytes out, %(received)d in, %(seconds).3f s"
        log.log(level, words, event, extra={"event": event})


def _reject(writer: asyncio.StreamWriter, what: str, fix: str) -> None:
    writer.write(_error_response("503 Service Unavailable", what, fix))
    writer.close()


async def _connect(addresses: list[str], port: int) -> _StreamPair:
    """Connect to the first address that answers. Raises ``OSError``: why the last one did not."""
    failure = OSError("no address")
    for address in addresses:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return await asyncio.open_connection(address, port)
        except TimeoutError:
            failure = OSError(f"no answer within {_CONNECT_SECONDS:g} s")
        except OSError as error:
            failure = OSError(error.strerror or str(error))
    raise failure


class _Relay:
    """Passes bytes between a program in the sandbox and a server; ends when ``count_bytes`` finds them too many."""

    def __init__(self, count_bytes: Callable[[int], bool]) -> None:
        self._count_bytes = count_bytes
        self.sent = 0
        self.received = 0
        self.end_detail = "done"

    async def run(self, request: _ProxyRequest, inside: _StreamPair, outside: _StreamPair) -> None:
        """Answer ``CONNECT``, or send the request's head; then relay until the server closes its side, and close it."""
        try:
            if request.method == "CONNECT":
                inside[1].write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                outside[1].write(request.head)
                self.sent += len(request.head)
            async with asyncio.TaskGroup() as group:
                outwards = group.create_task(self._pump(inside[0], outside[1], outwards=True))
                await self._pump(outside[0], inside[1], outwards=False)
                outwards.cancel()
        except* (OSError, TimeoutError) as broken:
            self.end_detail = f"broken off: {broken.exceptions[0]}"
        finally:
            outside[1].close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, outwards: bool) -> None:
        while True:
            async with asyncio.timeout(_IDLE_SECONDS):
                data = await source.read(_CHUNK)
            if not data:
                break
            if outwards:
                self.sent += len(data)
            else:
                self.received += len(data)
            if not self._count_bytes(len(data)):
                raise OSError("the sandbox's traffic is used up")
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()


def parse_request(head: bytes) -> _ProxyRequest:
    """Parse the head of a request, which ends with an empty line."""
    lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not _METHOD.fullmatch(words[0]) or not _TARGET.fullmatch(words[1]):
        raise BadRequestError("the request line is malformed")
    method, target, version = words
    if version not in ("HTTP/1.0", "HTTP/1.1"):
        raise BadRequestError("only HTTP/1.0 and HTTP/1.1 are spoken here")
    try:
        if method == "CONNECT":
            host, port = split_authority(target)
            if port is None:
                raise BadRequestError("CONNECT needs a port")
            return _ProxyRequest(method, host, port, b"")
        headers = _forwarded_headers(lines[1:])
        parts = urlsplit(target)
        if parts.scheme != "http":
            raise BadRequestError("a proxy takes 'http://host/path', or CONNECT for https")
        host, port = split_authority(parts.netloc)
    except ValueError as error:
        raise BadRequestError(str(error)) from None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"{method} {path} HTTP/1.1", f"Host: {parts.netloc}", *headers, "Connection: close", "", ""]
    return _ProxyRequest(method, host, port or 80, "\r\n".join(lines).encode("latin-1"))


def _forwarded_headers(lines: list[str]) -> list[str]:
    """Return the headers to pass on. Folded lines and control characters are refused: servers read them differently."""
    kept: list[str] = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _HEADER_NAME.fullmatch(name) or any(ord(c) < 32 and c != "\t" for c in value):
            raise BadRequestError("a header is malformed")
        if name.lower() not in _HOP_HEADERS:
            kept.append(line)
    return kept


def _error_response(status: str, what: str, fix: str) -> bytes:
    body = f"{what}\n{fix}\n".encode("ascii", "replace")
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode("ascii") + body
