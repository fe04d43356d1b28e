"""GET requests to registries: retries, the environment's proxies, few redirects, bounded answers.

``RegistryHttp.get`` makes one request, ``Retries.run`` repeats whatever is made of such requests. aiohttp's own reading
of the environment is not used: with the proxies it takes the passwords of ``~/.netrc``, whose ``default`` entry is sent
to every host, also to one that a registry merely redirects to.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from prorl_gym.backoff import backoff_delay
from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.http_body import read_body
from prorl_gym.sandbox.images.registry.oci_format import MAX_MANIFEST_BYTES

log = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=30, sock_read=60)
_MAX_REDIRECTS = 5
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)

_RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_FIRST_DELAY_SECONDS = 1.0
_MAX_DELAY_SECONDS = 60.0
_MAX_RETRY_AFTER_SECONDS = 600.0
_LOGGED_DELAY_SECONDS = 4.0
"""Longer delays are logged: together they take minutes."""


class TransientError(Exception):
    """An answer that another attempt may change.

    Args:
        why: for the user.
        retry_after: seconds of the registry's ``Retry-After``; ``None`` without one.
    """

    def __init__(self, why: str, retry_after: float | None = None) -> None:
        super().__init__(why)
        self.retry_after = retry_after


class Retries:
    """Repeats an exchange with a registry that is busy, or whose connection breaks.

    Args:
        attempts: in all.
        sleep: how to wait, in seconds.
    """

    def __init__(self, attempts: int = 8, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._attempts = attempts
        self._sleep = sleep

    async def run(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the first attempt that succeeds.

        Args:
            what: names the thing in messages.
            attempt: makes one attempt; repeated after ``TransientError`` and broken connections.

        Raises:
            SandboxError: ``SANDBOX_UNAVAILABLE``, the last attempt failed too.
        """
        for turn in range(self._attempts):
            try:
                return await attempt()
            except (TransientError, aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                reason = str(error) or type(error).__name__
                if turn + 1 == self._attempts:
                    raise SandboxError(
                        FailureKind.SANDBOX_UNAVAILABLE,
                        f"{what}: {reason} ({self._attempts} attempts).",
                        "Check that it can be reached from here, or name a mirror: --mirror, sandbox.images.mirrors.",
                    ) from None
                seconds = error.retry_after if isinstance(error, TransientError) else None
                if seconds is None:
                    # Many jobs that were refused together must not come back together.
                    seconds = backoff_delay(turn, first=_FIRST_DELAY_SECONDS, longest=_MAX_DELAY_SECONDS, jitter=0.5)
                if seconds >= _LOGGED_DELAY_SECONDS:
                    log.warning("%s: %s; next attempt in %.0f s", what, reason, seconds)
                await self._sleep(seconds)
        raise AssertionError("there is at least one attempt")


class RegistryHttp:
    """A pool of connections, opened at the first request; one per event loop, closed by its owner."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def get(
        self, url: str, headers: Mapping[str, str], authorization: str | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Request a URL and follow its redirects.

        Args:
            url: where to begin.
            headers: for every request.
            authorization: for requests to the scheme, host and port of ``url`` only.

        Raises:
            TransientError: the server is busy, or redirects without end or to no URL.
            aiohttp.ClientError, TimeoutError: the connection is broken.
        """
        if self._session is None:
            # Blobs are hashed as they are stored: nothing may be decompressed on the way.
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT, auto_decompress=False)
        place = URL(url)
        origin = place.origin()
        for _ in range(_MAX_REDIRECTS):
            sent = {"Accept-Encoding": "identity", **headers}
            if authorization is not None and place.origin() == origin:
                sent["Authorization"] = authorization
            proxy, login = _proxy_for(str(place))
            async with self._session.get(
                place, headers=sent, proxy=proxy, proxy_auth=login, allow_redirects=False
            ) as response:
                if response.status not in _REDIRECT_STATUSES:
                    _check_not_busy(response)
                    yield response
                    return
                place = _redirect_target(place, response.headers.get("Location", ""))
        raise TransientError(f"redirected more than {_MAX_REDIRECTS} times")


def _redirect_target(place: URL, location: str) -> URL:
    try:
        target = place.join(URL(location, encoded=True))
        if location and target.scheme in ("http", "https") and target.host:
            return target
    except ValueError:
        pass
    raise TransientError("redirected to what is no URL")


def _proxy_for(url: str) -> tuple[URL | None, aiohttp.BasicAuth | None]:
    parts = urlsplit(url)
    named = getproxies().get(parts.scheme)
    if not named or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None, None
    proxy = URL(named)
    login = aiohttp.BasicAuth(proxy.user, proxy.password or "") if proxy.user else None
    return proxy.with_user(None), login


def _check_not_busy(response: aiohttp.ClientResponse) -> None:
    if response.status in _RETRIED_STATUSES:
        why = "too many requests" if response.status == 429 else f"HTTP {response.status}"
        raise TransientError(why, _parse_retry_after(response.headers.get("Retry-After")))


def _parse_retry_after(text: str | None) -> float | None:
    """Return the seconds of a ``Retry-After`` (a number or a date), clamped."""
    if text is None:
        return None
    try:
        seconds = float(text) if text.strip().isdigit() else _seconds_until(parsedate_to_datetime(text))
    except (TypeError, ValueError):
        return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_SECONDS)


def _seconds_until(moment: datetime) -> float:
    return (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds()


async def read_bounded(response: aiohttp.ClientResponse, where: str) -> bytes:
    """Return the body of an answer about images, which is never long.

    Raises:
        SandboxError: ``IMAGE_BROKEN``, it is longer than ``MAX_MANIFEST_BYTES``.
    """
    body = await read_body(response, MAX_MANIFEST_BYTES)
    if body is None:
        raise SandboxError(FailureKind.IMAGE_BROKEN, f"{where}: the answer is longer than {MAX_MANIFEST_BYTES} bytes.")
    return body
