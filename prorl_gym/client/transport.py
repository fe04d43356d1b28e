"""HTTP calls of the service: bounded answers, errors as the package's own types, retries.

Every route may be called again without harm (ids are idempotent, streams resume at a cursor). So a broken connection, a
restarting service and a busy one are handled alike: wait, and call again, for a bounded time.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from prorl_gym.backoff import backoff_delay
from prorl_gym.errors import ConflictError, FailureKind, GoneError, NotFoundError, ProrlError, TaskError
from prorl_gym.http_body import read_body

LONG_POLL_SECONDS = 30.0
"""Seconds that one request for a result waits at the service."""

MAX_RESPONSE_BYTES = 256 << 20
"""Bytes of one answer or one line of a stream."""

_IDLE_SECONDS = 60.0
"""Seconds without a byte after which a connection counts as broken. The service writes to streams more often."""

_CONNECT_SECONDS = 10.0
"""Seconds for a connection to be made."""

_KEEP_SECONDS = 3.0
"""Seconds after which an idle connection is not used again. The service (uvicorn) closes its own after 5: a call sent
at that moment would be lost, and wait for its retry."""

_MAX_DELAY_SECONDS = 5.0
"""Longest pause in seconds before a retry, unless the service requests a longer one."""

_RETRYABLE_STATUSES = frozenset({408, 429, 502, 503, 504})

ModelT = TypeVar("ModelT", bound=BaseModel)


class ServiceError(ProrlError):
    """The service refused, or could not be reached."""

    status: int | None = None
    """HTTP status of a refusal; ``None`` otherwise."""


class BusyError(ServiceError):
    """The service was busy for longer than the call is retried."""


class RetryableError(Exception):
    """A call that may be retried, and what to raise when the time for retries is over."""

    def __init__(self, error: ServiceError, retry_after: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after = retry_after


@dataclass(slots=True)
class RetryBudget:
    """The retries of one call: exponential pauses with jitter, within a bounded time.

    Each pause is drawn from the upper half of ``pause * 2**n``, so that clients which a restart cut off at the same
    moment do not all return at the same moment.
    """

    seconds: float
    """Seconds of one outage; 0: no retry."""
    first_delay: float
    """Seconds before the second call."""
    _since: float | None = None
    _calls: int = 0

    def reset(self) -> None:
        """Restart after a success: a later outage has the whole time again."""
        self._since = None
        self._calls = 0

    async def sleep_before_retry(self, retryable: RetryableError) -> None:
        """Wait before the next call; raise the ``ServiceError`` when the time is over."""
        now = asyncio.get_running_loop().time()
        self._since = now if self._since is None else self._since
        left = self._since + self.seconds - now
        if left <= 0:
            raise retryable.error from None
        backoff = backoff_delay(self._calls, first=self.first_delay, longest=_MAX_DELAY_SECONDS, jitter=0.5)
        self._calls += 1
        # The last call is made at the deadline, even if the service requested a longer wait.
        await asyncio.sleep(min(left, max(backoff, retryable.retry_after)))


class Transport:
    """Connections to one service, on one event loop. ``token_source`` names the token's place in messages."""

    def __init__(self, url: str, token: str, token_source: str, retry_seconds: float, retry_delay: float) -> None:
        self.url = url
        self._token = token
        self._token_source = token_source
        self._retry_seconds = retry_seconds
        self._retry_delay = retry_delay
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._session is not None:
            await self._session.close()

    def new_retry_budget(self) -> RetryBudget:
        return RetryBudget(self._retry_seconds, self._retry_delay)

    async def call(
        self,
        method: str,
        path: str,
        model: type[ModelT],
        *,
        body: bytes | None = None,
        query: Mapping[str, str] | None = None,
    ) -> ModelT:
        """Send a request, again where that can help, and read the answer.

        Raises ``NotFoundError``, ``GoneError``, ``ConflictError``, ``TaskError`` and ``ServiceError``.
        """
        return self.parse(model, await self.call_raw(method, path, body=body, query=query))

    async def call_raw(
        self, method: str, path: str, *, body: bytes | None = None, query: Mapping[str, str] | None = None
    ) -> bytes:
        """Send a request as ``call`` does; return the body of the answer as it is."""
        budget = self.new_retry_budget()
        while True:
            try:
                async with self.send(method, path, body=body, query=query) as response:
                    return await _read_bounded(response)
            except RetryableError as again:
                await budget.sleep_before_retry(again)

    @asynccontextmanager
    async def send(
        self, method: str, path: str, *, body: bytes | None = None, query: Mapping[str, str] | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Send a request once; give the answer if it is a 200.

        Raises ``RetryableError``: the status allows a retry, or the connection breaks inside the block.
        """
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            session = self._open_session()
            # No route redirects, and a redirect would carry the token along.
            async with session.request(
                method, self.url + path, data=body, params=query, headers=headers, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise await self._error_of(response)
                yield response
        except aiohttp.InvalidURL:
            raise ServiceError(f"{self.url[:200]}: is no address of a service.", "Give http://HOST:PORT.") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            unreachable = ServiceError(
                f"{self.url}: the service cannot be reached ({str(error) or type(error).__name__}).",
                "Start it (prorl-gym serve --config FILE), or give its address: pass --url or set PRORL_GYM_URL.",
            )
            raise RetryableError(unreachable) from None

    def parse(self, model: type[ModelT], text: bytes) -> ModelT:
        try:
            return model.model_validate_json(text)
        except ValidationError as error:
            faults = error.errors(include_input=False, include_url=False)
            newer = any("is newer than" in one["msg"] for one in faults)
            fix = "Upgrade prorl-gym here." if newer else "Is that address a prorl-gym service?"
            # Without quoting what is wrong: it may be a page of another server.
            if faults[0]["type"] == "json_invalid" or not faults[0]["loc"]:
                raise ServiceError(f"{self.url}: does not answer in JSON.", fix) from None
            place = ".".join(str(part) for part in faults[0]["loc"])[:200]
            reason = faults[0]["msg"].removeprefix("Value error, ")[:300]
            raise ServiceError(f"{self.url}: its answer cannot be read ({place}: {reason}).", fix) from None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self._token}"},
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=_CONNECT_SECONDS, sock_read=_IDLE_SECONDS + LONG_POLL_SECONDS
                ),
                # Thousands of calls may wait for results at once.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_SECONDS),
            )
        return self._session

    async def _error_of(self, response: aiohttp.ClientResponse) -> Exception:
        what, fix, kind = f"{response.url.path}: the service answered {response.status}.", "", None
        try:
            error = json.loads(await _read_bounded(response))["error"]
            what, fix, kind = str(error["what"])[:2000], str(error["fix"])[:2000], error.get("kind")
        except (ValueError, KeyError, TypeError, RecursionError):
            fix = "Is that address a prorl-gym service?"
            if response.status == 503:
                fix = "It has too many connections (see its ulimit -n), or a proxy does not reach it."
        if response.status == 401:
            return ServiceError(
                f"{self.url}: the service refuses the token from {self._token_source}.",
                "Set PRORL_GYM_TOKEN_FILE to the file that it named when it started ('token' in its 'state').",
            )
        if response.status in _RETRYABLE_STATUSES:
            wait = response.headers.get("Retry-After", "")
            seconds = float(wait) if wait.isascii() and wait.isdigit() and len(wait) < 9 else 0.0
            return RetryableError(BusyError(what, fix), seconds)
        if response.status == 422 and kind in set(FailureKind):
            return TaskError(FailureKind(kind), what, fix)
        error = {404: NotFoundError, 409: ConflictError, 410: GoneError}.get(response.status, ServiceError)(what, fix)
        if isinstance(error, ServiceError):
            error.status = response.status
        return error


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    body = await read_body(response, MAX_RESPONSE_BYTES)
    if body is None:
        raise ServiceError(f"The service's answer is larger than {MAX_RESPONSE_BYTES >> 20} MiB.")
    return body
