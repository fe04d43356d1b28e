"""The little HTTP that a forward proxy has to read: one request head, and what it becomes towards the server."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from prorl_gym.sandbox.egress import split_authority

MAX_HEAD = 32 << 10
"""Bytes of a request's line and headers."""

_METHOD = re.compile(r"[A-Z]{1,20}")
_TARGET = re.compile(r"[\x21-\x7e]+")
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_DROPPED = frozenset({"host", "connection", "proxy-connection", "proxy-authorization", "keep-alive", "te", "upgrade"})
"""Headers that concern one hop only; ``Host`` is written anew, so that it names what was checked."""


class BadRequestError(Exception):
    """Not a request that a forward proxy can serve."""


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """A request to the proxy."""

    method: str
    host: str
    port: int
    head: bytes
    """What to send to the server first; empty for ``CONNECT``."""

    @property
    def is_tunnel(self) -> bool:
        """Whether bytes are to be passed on as they are, in both directions, once connected."""
        return self.method == "CONNECT"


def parse_request(head: bytes) -> ProxyRequest:
    """Read a request head, up to and including its empty line.

    Raises:
        BadRequestError: with the reason.
    """
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
            return ProxyRequest(method, host, port, b"")
        return _plain(method, target, _headers(lines[1:]))
    except ValueError as error:
        raise BadRequestError(str(error)) from None


def _plain(method: str, target: str, headers: list[str]) -> ProxyRequest:
    parts = urlsplit(target)
    if parts.scheme != "http":
        raise BadRequestError("a proxy takes 'http://host/path', or CONNECT for https")
    host, port = split_authority(parts.netloc)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"{method} {path} HTTP/1.1", f"Host: {parts.netloc}", *headers, "Connection: close", "", ""]
    return ProxyRequest(method, host, port or 80, "\r\n".join(lines).encode("latin-1"))


def _headers(lines: list[str]) -> list[str]:
    """Return the headers to pass on. Folded lines and control characters hide things; they are refused."""
    kept: list[str] = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name) or any(ord(c) < 32 and c != "\t" for c in value):
            raise BadRequestError("a header is malformed")
        if name.lower() not in _DROPPED:
            kept.append(line)
    return kept


def refusal(status: str, what: str, fix: str) -> bytes:
    """Return a whole answer of the proxy itself."""
    body = f"{what}\n{fix}\n".encode("ascii", "replace")
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode("ascii") + body
