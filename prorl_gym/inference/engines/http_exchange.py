"""One bounded exchange with a server that may be gone, slow, or hostile; every engine adapter uses it.

No redirects (they would carry the key elsewhere), no proxies from the environment, no cookies, no answer beyond its
bound, no wait beyond its time. Certificates are checked whenever the address is https; there is no switch for that.
"""

import json
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp

from prorl_gym.deadlines import Timeout
from prorl_gym.errors import ConfigError, EngineError, FailureKind
from prorl_gym.http_body import read_body
from prorl_gym.inference.protocol import CallTimedOut

SMALL_RESPONSE_BYTES = 1 << 20
_IDLE_SECONDS = 3.0
"""An idle connection is closed after that. Servers (uvicorn) close theirs after 5 s: a call sent at that moment
is lost, and the engine counts as failed."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request, and the largest answer to it."""

    method: Literal["GET", "POST"]
    url: str
    body: Any = None
    """Sent as JSON; ``None``: no body."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    raw_ids: tuple[str, bytes] | None = None
    """A list of ids that is JSON already, without its brackets, and the key under which it joins the body."""
    max_bytes: int = SMALL_RESPONSE_BYTES
    """Longest answer in bytes, unpacked."""

    def encode_body(self) -> bytes | None:
        if self.body is None:
            return None
        text = json.dumps(self.body).encode()
        if self.raw_ids is None:
            return text
        key, ids = self.raw_ids
        return b'%b, "%b": [%b]}' % (text[:-1], key.encode(), ids)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    payload: bytes
    retry_after: float | None = None
    """Seconds, from the header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    connect_seconds: float = 10.0
    max_connections: int = 1024
    api_key: str | None = None
    tls: ssl.SSLContext | None = None
    """Certificates to trust over https; ``None``: the system's authorities."""


class EngineTransport:
    """Connections to one server, whose ``address`` is its name in messages."""

    def __init__(self, address: str, connection: ConnectionOptions) -> None:
        self._address = address
        self._connection = connection
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def exchange(self, request: HttpRequest, seconds: float) -> HttpResponse:
        """Send one request and read the whole answer, whatever its status.

        Raises ``CallTimedOut``: there is no whole answer within so many seconds; ``EngineError``: ``ENGINE_TIMEOUT``
        (no connection), ``ENGINE_UNREACHABLE``, or ``ENGINE_CONTRACT`` for what is no HTTP or is too large.
        """
        try:
            body = request.encode_body()
            headers = request.headers if body is None else {**request.headers, "Content-Type": "application/json"}
            async with (
                Timeout(seconds),
                self._http().request(
                    request.method, request.url, data=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                payload = await read_body(response, request.max_bytes)
                if payload is None:
                    raise self._too_large_error(request.max_bytes)
                after = response.headers.get("Retry-After", "")
                is_number = re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", after)  # its date form is ignored
                return HttpResponse(response.status, payload, float(after) if is_number else None)
        except aiohttp.ServerTimeoutError:
            reason = f"no connection within {self._connection.connect_seconds:g} s"
            raise self._error(FailureKind.ENGINE_TIMEOUT, reason, _ADDRESS_FIX) from None
        except TimeoutError:
            raise CallTimedOut(self._address, seconds) from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise self._error(FailureKind.ENGINE_UNREACHABLE, _reason(error), _ADDRESS_FIX) from None
        except (aiohttp.ClientError, ValueError) as error:
            reason = f"does not speak HTTP properly ({type(error).__name__})"
            raise self._error(FailureKind.ENGINE_CONTRACT, reason, "Check what listens at that address.") from None

    async def close(self) -> None:
        """Close connections. Idempotent; exchanges in flight end as unreachable."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _too_large_error(self, max_bytes: int) -> EngineError:
        what = f"the answer is larger than {max_bytes} bytes"
        return self._error(FailureKind.ENGINE_CONTRACT, what, "Check what listens at that address.")

    def _http(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineError(FailureKind.ENGINE_UNREACHABLE, f"engine {self._address}: was taken out of service.")
        if self._session is None:
            key = self._connection.api_key
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._connection.max_connections,
                    ssl=self._connection.tls or True,
                    keepalive_timeout=_IDLE_SECONDS,
                ),
                # The total is ours (``Timeout``): aiohttp's would include the wait for a free connection.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connection.connect_seconds),
                headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
                # Cookies would pile up until servers refuse the header, and pin calls to what a proxy chose.
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session

    def _error(self, kind: FailureKind, what: str, fix: str) -> EngineError:
        return EngineError(kind, f"engine {self._address}: {what}.", fix)


_ADDRESS_FIX = "Check that it runs and that 'engines' names it."


def tls_context(ca_file: Path) -> ssl.SSLContext:
    """Return a context that trusts these authorities (PEM) and no others. Raises ``ConfigError`` if there are none."""
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
