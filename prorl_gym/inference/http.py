"""One bounded exchange with a server that may be gone, slow, or hostile: what every engine adapter stands on.

No redirects (they would carry the key elsewhere), no proxies from the environment, no cookies, no answer beyond its
bound, no wait beyond its time. Certificates are checked whenever the address is https; there is no switch for that.
"""

import asyncio
import json
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp

from prorl_gym.errors import ConfigError, EngineError, FailureKind
from prorl_gym.inference.faults import CallTimedOut

SMALL_ANSWER = 1 << 20
_CHUNK = 1 << 16
_IDLE_SECONDS = 3.0
"""An idle connection is not used again after that. Servers of engines (uvicorn) close theirs after 5 s: a call that is
sent in that moment is lost, and a well engine would count as one that failed."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What to send, and how much may come back."""

    method: Literal["GET", "POST"]
    url: str
    body: Any = None
    """Sent as JSON; ``None``: no body."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    ids: tuple[str, bytes] | None = None
    """A list of ids that is JSON already, without its brackets, and the key under which it joins the body."""
    bound: int = SMALL_ANSWER
    """Longest answer in bytes, unpacked."""

    def payload(self) -> bytes | None:
        """Return the body as it goes over the wire."""
        if self.body is None:
            return None
        text = json.dumps(self.body).encode()
        if self.ids is None:
            return text
        key, ids = self.ids
        return b'%b, "%b": [%b]}' % (text[:-1], key.encode(), ids)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    payload: bytes
    retry_after: float | None = None
    """Seconds, when the header says so."""


@dataclass(frozen=True, slots=True)
class Link:
    """How to connect."""

    connect_seconds: float = 10.0
    max_connections: int = 1024
    api_key: str | None = None
    tls: ssl.SSLContext | None = None
    """Whom to trust over https; ``None``: the system's authorities."""


class Transport:
    """Connections to one server.

    Args:
        address: how messages call the server.
        link: see there.
    """

    def __init__(self, address: str, link: Link) -> None:
        self._address = address
        self._link = link
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def exchange(self, ask: Ask, seconds: float) -> Answer:
        """Send one request and read the whole answer, whatever its status.

        Raises:
            CallTimedOut: there is no whole answer in time.
            EngineError: ``ENGINE_TIMEOUT`` (no connection), ``ENGINE_UNREACHABLE``, or ``ENGINE_CONTRACT`` for what is
                no HTTP or is too large.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._exchange(ask)
        except TimeoutError:
            raise CallTimedOut(self._address, seconds) from None

    async def close(self) -> None:
        """Close connections. Idempotent; exchanges in flight end as unreachable."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _exchange(self, ask: Ask) -> Answer:
        try:
            body = ask.payload()
            headers = ask.headers if body is None else {**ask.headers, "Content-Type": "application/json"}
            async with self._http().request(
                ask.method, ask.url, data=body, headers=headers, allow_redirects=False
            ) as response:
                payload = bytearray()
                async for chunk in response.content.iter_chunked(_CHUNK):
                    payload += chunk
                    if len(payload) > ask.bound:
                        raise self._error(
                            FailureKind.ENGINE_CONTRACT,
                            f"the answer is larger than {ask.bound} bytes",
                            "Check what listens at that address.",
                        )
                return Answer(response.status, bytes(payload), _seconds(response.headers.get("Retry-After")))
        except aiohttp.ServerTimeoutError:
            reason = f"no connection within {self._link.connect_seconds:g} s"
            raise self._error(FailureKind.ENGINE_TIMEOUT, reason, _ADDRESS_FIX) from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise self._error(FailureKind.ENGINE_UNREACHABLE, _reason(error), _ADDRESS_FIX) from None
        except (aiohttp.ClientError, ValueError) as error:
            reason = f"does not speak HTTP properly ({type(error).__name__})"
            raise self._error(FailureKind.ENGINE_CONTRACT, reason, "Check what listens at that address.") from None

    def _http(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineError(FailureKind.ENGINE_UNREACHABLE, f"engine {self._address}: was taken out of service.")
        if self._session is None:
            key = self._link.api_key
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._link.max_connections, ssl=self._link.tls or True, keepalive_timeout=_IDLE_SECONDS
                ),
                # Totals are ours (asyncio.timeout): aiohttp's would count waiting for a free connection otherwise.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._link.connect_seconds),
                headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
                # Cookies would pile up until servers refuse the header, and pin calls to what a proxy chose.
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session

    def _error(self, kind: FailureKind, what: str, fix: str) -> EngineError:
        return EngineError(kind, f"engine {self._address}: {what}.", fix)


_ADDRESS_FIX = "Check that it runs and that 'engines' names it."


def trusting(ca_file: Path) -> ssl.SSLContext:
    """Return a context that trusts these authorities (PEM) and no others.

    Raises:
        ConfigError: the file holds none.
    """
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{ca_file}: holds no certificates ({error}).", "Check 'ca_file'.") from None


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not trusted ('ca_file' names other authorities)"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect ({os.strerror(error.errno) if error.errno else type(error.os_error).__name__})"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "dropped the connection"
    return f"the connection broke ({type(error).__name__})"


def _seconds(header: str | None) -> float | None:
    """Read ``Retry-After`` in seconds; its date form is not worth the clock questions."""
    return float(header) if header is not None and re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", header) else None
