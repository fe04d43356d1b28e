"""Clients of the rollout service: ``Client`` for asyncio, ``SyncClient`` for everybody else.

They need only pydantic and aiohttp, so that they run inside a trainer's own environment. Every call may be repeated
without harm (ids are idempotent, streams resume at a cursor), and the clients do so, a bounded number of times, when a
connection breaks or the service is busy.
"""

import asyncio
import json
import os
import stat
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp

from prorl_gym.errors import ConfigError, ConflictError, NotFoundError, ProrlError
from prorl_gym.records import Rollout, RolloutRequest

DEFAULT_URL = "http://127.0.0.1:8770"
"""Where ``prorl-gym serve`` listens by default."""

LONG_POLL = 30.0
"""Seconds that one request for a result waits at the service."""

_SILENCE = 60.0
"""Seconds without a byte after which a connection counts as broken. The service writes to streams more often."""

_ANSWER_LIMIT = 256 << 20
"""Bytes of one answer or one line of a stream."""

ResultT = TypeVar("ResultT")


class ServiceError(ProrlError):
    """The service refused, or could not be reached."""


def default_state() -> Path:
    """Return the directory where a service keeps its token and its ledger unless it is told otherwise."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "prorl-gym"


def read_token(path: Path | None = None) -> str:
    """Return the service's bearer token: ``$PRORL_GYM_TOKEN``, or the file that the service made.

    Args:
        path: the token file; ``$PRORL_GYM_TOKEN_FILE`` or the default place when left out.

    Raises:
        ConfigError: there is no such file, or others may read it.
    """
    if path is None and os.environ.get("PRORL_GYM_TOKEN"):
        return os.environ["PRORL_GYM_TOKEN"]
    path = path or _token_file()
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: the service's token cannot be read ({error}).",
            "Start the service once as this user, or set PRORL_GYM_TOKEN or PRORL_GYM_TOKEN_FILE.",
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path}: other users may read the token.", f"chmod 600 {path}, and make a new token.")
    if not token:
        raise ConfigError(f"{path}: the token is empty.", "Remove the file and start the service again.")
    return token


def token_place() -> str:
    """Return what ``read_token`` reads, for messages."""
    return "PRORL_GYM_TOKEN" if os.environ.get("PRORL_GYM_TOKEN") else str(_token_file())


def _token_file() -> Path:
    return Path(os.environ.get("PRORL_GYM_TOKEN_FILE") or default_state() / "token")


@dataclass(frozen=True, slots=True)
class Submission:
    """What became of one submitted rollout."""

    rollout_id: str
    duplicate: bool
    """The same body had been accepted before."""


class Client:
    """Asynchronous client. Use it as a context manager, on one event loop.

    Args:
        url: address of the service; ``$PRORL_GYM_URL``, or the port that it takes by default, when left out.
        token: bearer token; read from the environment or the service's file by default.
        retries: how often a broken connection or a busy service is tried again.
        pause: seconds before the first of these; doubles each time.
    """

    def __init__(
        self, url: str | None = None, *, token: str | None = None, retries: int = 5, pause: float = 0.2
    ) -> None:
        self._url = (url or os.environ.get("PRORL_GYM_URL") or DEFAULT_URL).rstrip("/")
        self._token = token if token is not None else read_token()
        self._token_from = "its caller" if token is not None else token_place()
        self._retries = retries
        self._pause = pause
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._session is not None:
            await self._session.close()

    async def submit(self, requests: RolloutRequest | Sequence[RolloutRequest]) -> list[Submission]:
        """Submit a batch, all or nothing. When this returns, the service has it on its disk.

        Raises:
            ConflictError: an id was submitted before with another body.
            ServiceError: refused, or not reached.
        """
        batch = [requests] if isinstance(requests, RolloutRequest) else list(requests)
        answer = await self._call("POST", "/v1/rollouts", body=[request.model_dump(mode="json") for request in batch])
        return [Submission(one["rollout_id"], one["duplicate"]) for one in answer["accepted"]]

    async def result(self, rollout_id: str, timeout: float | None = None) -> Rollout:
        """Wait for the terminal record.

        Args:
            rollout_id: of an accepted rollout.
            timeout: seconds; for ever by default.

        Raises:
            TimeoutError: it is not finished yet.
            NotFoundError: never accepted.
            ServiceError: refused, or not reached.
        """
        async with asyncio.timeout(timeout):
            while True:
                rollout = await self.look(rollout_id, wait=LONG_POLL)
                if rollout is not None:
                    return rollout

    async def look(self, rollout_id: str, wait: float = 0.0) -> Rollout | None:
        """Return the terminal record, or ``None`` when there is none after ``wait`` seconds (at most 60)."""
        answer = await self._call("GET", f"/v1/rollouts/{rollout_id}", query={"wait": f"{wait:g}"})
        return None if answer["rollout"] is None else Rollout.model_validate_json(json.dumps(answer["rollout"]))

    async def stream(
        self, run_id: str | None = None, cursor: int = 0, *, follow: bool = True
    ) -> AsyncGenerator[tuple[int, Rollout], None]:
        """Yield ``(cursor, record)`` as rollouts finish, each once; a broken connection is resumed.

        Args:
            run_id: only of this run.
            cursor: that of the last record seen, to go on after it.
            follow: wait for more; otherwise end with the last record there is.
        """
        failures = 0
        while True:
            query = {"cursor": str(cursor), "follow": str(follow).lower(), **({"run": run_id} if run_id else {})}
            try:
                async with self._open("GET", "/v1/stream", query=query) as response:
                    await self._check(response)
                    async for line in _lines(response.content):
                        delivery = json.loads(line)
                        cursor = delivery["cursor"]
                        failures = 0
                        yield cursor, Rollout.model_validate_json(json.dumps(delivery["rollout"]))
                if not follow:
                    return
            except (_Again, aiohttp.ClientError, TimeoutError, OSError) as error:
                failures += 1
                if failures > self._retries:
                    raise self._unreachable(error) from None
            await asyncio.sleep(self._pause * 2**failures)

    async def cancel(
        self, rollout_ids: Sequence[str] = (), *, groups: Sequence[str] = (), runs: Sequence[str] = ()
    ) -> list[str]:
        """Cancel by id, group or run; return the ids that this stopped. Each still gets its record."""
        body = {"rollouts": list(rollout_ids), "groups": list(groups), "runs": list(runs)}
        return list((await self._call("POST", "/v1/cancel", body=body))["cancelled"])

    async def status(self) -> dict[str, Any]:
        """Return the service's status (see ``prorl_gym.rollout.service.ServiceStatus``)."""
        return await self._call("GET", "/v1/status")

    async def _call(
        self, method: str, path: str, *, body: Any = None, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        for attempt in range(self._retries + 1):
            try:
                async with self._open(method, path, body=body, query=query) as response:
                    await self._check(response)
                    return _object(await _bounded(response.content), self._url)
            except (_Again, aiohttp.ClientError, TimeoutError, OSError) as error:
                if attempt == self._retries:
                    raise self._unreachable(error) from None
                await asyncio.sleep(getattr(error, "after", None) or self._pause * 2**attempt)
        raise AssertionError("not reached")

    def _open(self, method: str, path: str, *, body: Any = None, query: Mapping[str, str] | None = None) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self._token}"},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_SILENCE + LONG_POLL),
            )
        data = None if body is None else json.dumps(body).encode("ascii")
        headers = None if body is None else {"Content-Type": "application/json"}
        return self._session.request(method, self._url + path, data=data, params=query, headers=headers)

    def _unreachable(self, error: Exception) -> ServiceError:
        if isinstance(error, _Again):
            return ServiceError(error.what, error.fix)
        reason = str(error) or type(error).__name__
        return ServiceError(
            f"{self._url}: the service cannot be reached ({reason}).",
            "Start it (prorl-gym serve --config FILE), or say where it is: pass --url or set PRORL_GYM_URL.",
        )

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 401:
            raise ServiceError(
                f"{self._url}: the service refuses the token from {self._token_from}.",
                "Set PRORL_GYM_TOKEN_FILE to the file that it named when it began to serve ('token' in its 'state').",
            )
        await _check(response)


class _Again(ProrlError):
    """The service is busy or starting: worth another try."""

    after: float | None = None


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raise what the service complains about."""
    if response.status == 200:
        return
    what, fix = f"{response.url.path}: the service answered {response.status}.", ""
    try:
        error = json.loads(await _bounded(response.content))["error"]
        what, fix = str(error["what"])[:2000], str(error["fix"])[:2000]
    except (ValueError, KeyError, TypeError):
        fix = "Is that address a prorl-gym service?"
    if response.status in (429, 502, 503, 504):
        again = _Again(what, fix)
        wait = response.headers.get("Retry-After", "")
        again.after = min(float(wait), 60.0) if wait.isdigit() else None
        raise again
    raise {404: NotFoundError, 409: ConflictError}.get(response.status, ServiceError)(what, fix)


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    whole = bytearray()
    async for chunk in content.iter_any():
        whole += chunk
        if len(whole) > _ANSWER_LIMIT:
            raise ServiceError(f"The service's answer is larger than {_ANSWER_LIMIT >> 20} MiB.")
    return bytes(whole)


def _object(body: bytes, url: str) -> dict[str, Any]:
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise ServiceError(f"{url}: does not answer in JSON.", "Is that address a prorl-gym service?")
    return answer  # pyright: ignore[reportUnknownVariableType]


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield complete lines. An empty one says only that the service is alive; half a one at the end is dropped."""
    rest = bytearray()
    async for chunk in content.iter_any():
        rest += chunk
        if b"\n" in chunk:
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in lines:
                if line:
                    yield line
        if len(rest) > _ANSWER_LIMIT:
            raise ServiceError(f"A line of the stream is larger than {_ANSWER_LIMIT >> 20} MiB.")


class SyncClient:
    """The same calls for code without an event loop (also inside one: it has its own, in a thread).

    Args:
        url: address of the service.
        options: as of ``Client``.
    """

    def __init__(self, url: str | None = None, **options: Any) -> None:
        self._client = Client(url, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="prorl-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def submit(self, requests: RolloutRequest | Sequence[RolloutRequest]) -> list[Submission]:
        """See ``Client.submit``."""
        return self._wait(self._client.submit(requests))

    def result(self, rollout_id: str, timeout: float | None = None) -> Rollout:
        """See ``Client.result``."""
        return self._wait(self._client.result(rollout_id, timeout))

    def look(self, rollout_id: str, wait: float = 0.0) -> Rollout | None:
        """See ``Client.look``."""
        return self._wait(self._client.look(rollout_id, wait))

    def stream(
        self, run_id: str | None = None, cursor: int = 0, *, follow: bool = True
    ) -> Iterator[tuple[int, Rollout]]:
        """See ``Client.stream``."""
        stream = self._client.stream(run_id, cursor, follow=follow)
        try:
            while True:
                try:
                    yield self._wait(_next(stream))
                except StopAsyncIteration:
                    return
        finally:
            self._wait(stream.aclose())

    def cancel(
        self, rollout_ids: Sequence[str] = (), *, groups: Sequence[str] = (), runs: Sequence[str] = ()
    ) -> list[str]:
        """See ``Client.cancel``."""
        return self._wait(self._client.cancel(rollout_ids, groups=groups, runs=runs))

    def status(self) -> dict[str, Any]:
        """See ``Client.status``."""
        return self._wait(self._client.status())

    def _wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C in the waiting thread stops the call too
            future.cancel()
            raise


async def _next(stream: AsyncGenerator[ResultT, None]) -> ResultT:
    return await anext(stream)
