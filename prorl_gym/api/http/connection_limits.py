"""Bounds on the number of open connections of a process, by what they have shown: nothing, no token, the token.

A connection moves from silent (nothing has arrived) to unauthenticated (bytes, but not the token) to authenticated. The
first two are bounded in number: for one more, the oldest of the peer that has the most is closed, so that a flood
leaves the service reachable. An authenticated connection is never closed for another one.
"""

import asyncio
import logging
import resource
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Protocol

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of the connections of a process.

    The shares are of the files that the process may open, one in so many at most. The rest is for the ledger, sandboxes
    and engines.
    """

    silent: int = 4096
    """Connections on which nothing has arrived, each no more than a socket. Many: under a flood, the time that a caller
    has for sending its head is this number over the connections that are made per second."""
    silent_share: int = 4
    unauthenticated: int = 256
    """Connections that have sent something, but not the token."""
    unauthenticated_share: int = 16
    authenticated_share: int = 2
    """Of connections that have shown the token; nothing else bounds their number."""
    request_seconds: float = 10.0
    """For a head to arrive, and for a request without the token to be over."""
    accept_retry_seconds: float = 0.1
    """Before the next connection is accepted when the process can open no file."""
    warning_interval_seconds: float = 60.0
    """How often the count of warnings of one kind is logged."""


class ThrottledWarnings:
    """Warnings that callers can cause at will: the first of a kind is logged, the others as a count.

    Args:
        interval_seconds: between two counts.
    """

    def __init__(self, interval_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self._counts: dict[str, int] = {}

    def warn(self, kind: str) -> None:
        """Log or count one."""
        if kind in self._counts:
            self._counts[kind] += 1
            return
        _LOG.warning(kind)
        self._start_interval(kind)

    def _start_interval(self, kind: str) -> None:
        self._counts[kind] = 0
        asyncio.get_running_loop().call_later(self._interval_seconds, self._report, kind)

    def _report(self, kind: str) -> None:
        if count := self._counts.pop(kind):
            _LOG.warning("%s (%d more in %g s)", kind, count, self._interval_seconds)
            self._start_interval(kind)


class CountedConnection(Protocol):
    """A connection as its bounds see it."""

    peer: str
    """Whose connections are counted together."""

    def drop(self) -> None:
        """Close it at once."""
        ...


class BoundedConnections:
    """A bounded number of connections: for one more, the oldest of the peer that has the most is closed.

    Args:
        warnings: one is given for each closed connection.
        max_count: returns the bound.
    """

    def __init__(self, warnings: ThrottledWarnings, max_count: Callable[[], int]) -> None:
        self._warnings = warnings
        self._max_count = max_count
        self._by_peer: dict[str, dict[CountedConnection, None]] = {}
        """Oldest first."""
        self._count = 0

    def add_newest(self, connection: CountedConnection) -> None:
        """Count a connection as the newest."""
        self._by_peer.setdefault(connection.peer, {})[connection] = None
        self._count += 1
        if self._count > self._max_count():
            self.drop_oldest()
            self._warnings.warn("Too many connections without the token: the oldest are closed.")

    def discard(self, connection: CountedConnection) -> None:
        """Stop counting a connection. Idempotent."""
        connections = self._by_peer.get(connection.peer, {})
        if connection in connections:
            self._count -= 1
            del connections[connection]
            if not connections:
                del self._by_peer[connection.peer]

    def drop_oldest(self) -> None:
        """Close one, if there is one."""
        if self._by_peer:
            oldest = next(iter(max(self._by_peer.values(), key=len)))
            self.discard(oldest)
            oldest.drop()


class Connections:
    """The open connections of a process, and their bounds.

    Args:
        limits: the bounds.
    """

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        bounds = self.limits = limits or ConnectionLimits()
        self.warnings = ThrottledWarnings(bounds.warning_interval_seconds)
        self.silent = BoundedConnections(
            self.warnings, lambda: min(bounds.silent, _max_open_files() // bounds.silent_share)
        )
        self.unauthenticated = BoundedConnections(
            self.warnings, lambda: min(bounds.unauthenticated, _max_open_files() // bounds.unauthenticated_share)
        )
        self.authenticated: set[CountedConnection] = set()
        """Connections that have shown the token."""

    @property
    def is_full(self) -> bool:
        """Whether no further connection may become a known one."""
        return len(self.authenticated) >= _max_open_files() // self.limits.authenticated_share

    def warn_timeout(self) -> None:
        """Warn that a connection was closed by its deadline."""
        seconds = self.limits.request_seconds
        self.warnings.warn(f"A connection had no complete request within {seconds:g} s and was closed.")


def peer_key(host: str) -> str:
    """Return whose connections are counted together: an address, or the network of one IPv6 host."""
    return str(ip_network(f"{host.partition('%')[0]}/64", strict=False)) if ":" in host else host


def _max_open_files() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
