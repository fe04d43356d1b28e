"""GET requests to registries: retries, the environment's proxies, few redirects, bounded answers, logins.

``RegistryHttp.get`` makes one request, ``Retries.run`` repeats whatever is made of such requests. aiohttp's own reading
of the environment is not used: with the proxies it takes the passwords of ``~/.netrc``, whose ``default`` entry is sent
to every host, also to one that a registry merely redirects to.

Logins are read from where people already keep them, in this order: the variables ``APPTAINER_DOCKER_USERNAME`` and
``_PASSWORD`` (or ``SINGULARITY_``...), which belong to the host that the configuration names; Docker's ``config.json``;
Apptainer's ``docker-config.json``, which ``apptainer registry login`` writes in the same form. Credential helpers and
identity tokens are not used. Nothing is written or logged.

A password is sent to the host that it was stored for, or to the token service which that host names, if that is the
same host, one below it (``auth.docker.io`` of ``docker.io``) or the one above it (``gitlab.com`` of
``registry.gitlab.com``); never in the clear, except to loopback. Any other token service may only be asked for an
anonymous token.
"""

import asyncio
import logging
import os
import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from pydantic import BaseModel, Field, ValidationError
from yarl import URL

from prorl_gym.backoff import backoff_delay
from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.http_body import read_body
from prorl_gym.logs import register_secret
from prorl_gym.sandbox.images.registry.oci_format import DOCKER_HUB, MAX_MANIFEST_BYTES, TokenResponse, parse_model

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
_HUB_NAMES = ("index.docker.io", "registry-1.docker.io", DOCKER_HUB)
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class TransientError(Exception):
    """An answer that another attempt may change. ``retry_after``: seconds of the registry's ``Retry-After``."""

    def __init__(self, why: str, retry_after: float | None = None) -> None:
        super().__init__(why)
        self.retry_after = retry_after


class Retries:
    """Repeats an exchange with a registry that is busy, or whose connection breaks."""

    def __init__(self, attempts: int = 8, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._attempts = attempts
        self._sleep = sleep

    async def run(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt until it succeeds (else ``SANDBOX_UNAVAILABLE``); ``what`` names the thing in messages."""
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


def _parse_retry_after(text: str | None) -> float | None:
    """Return the seconds of a ``Retry-After`` (a number or a date), clamped."""
    if text is None:
        return None
    try:
        if text.strip().isdigit():
            seconds = float(text)
        else:
            moment = parsedate_to_datetime(text)
            seconds = (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    except (TypeError, ValueError):
        return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_SECONDS)


async def read_bounded(response: aiohttp.ClientResponse, where: str) -> bytes:
    """Return the body of an answer about images; ``IMAGE_BROKEN`` when it exceeds ``MAX_MANIFEST_BYTES``."""
    body = await read_body(response, MAX_MANIFEST_BYTES)
    if body is None:
        raise SandboxError(FailureKind.IMAGE_BROKEN, f"{where}: the answer is longer than {MAX_MANIFEST_BYTES} bytes.")
    return body


@dataclass(frozen=True, slots=True)
class RegistryCredentials:
    host: str
    """With its port, if one was given; ``docker.io`` for Docker Hub, whatever its API's host is called."""
    username: str
    password: str = field(repr=False)

    @property
    def authorization(self) -> str:
        """Value of ``Authorization`` (RFC 7617)."""
        return f"Basic {b64encode(f'{self.username}:{self.password}'.encode()).decode()}"


class _DockerAuth(BaseModel):
    auth: str = ""
    username: str = ""
    password: str = ""


class _DockerConfig(BaseModel):
    auths: dict[str, _DockerAuth] = Field(default_factory=dict[str, _DockerAuth])


def find_credentials(host: str, variables_host: str = DOCKER_HUB) -> RegistryCredentials | None:
    """Return the login of a registry's host, if there is one; that of the environment is for ``variables_host``.

    Blocks on small files, which are read each time: some change often.
    """
    wanted = parse_registry_host(host)
    found = next((login for login in _list_logins(variables_host) if login.host == wanted), None)
    if found is not None:
        register_secret(found.password)
        register_secret(found.authorization.removeprefix("Basic "))
    return found


def _list_logins(variables_host: str) -> Iterator[RegistryCredentials]:
    for prefix in ("APPTAINER", "SINGULARITY"):
        username = os.environ.get(f"{prefix}_DOCKER_USERNAME")
        password = os.environ.get(f"{prefix}_DOCKER_PASSWORD")
        if username and password:
            yield RegistryCredentials(parse_registry_host(variables_host), username, password)
    home = Path(os.environ.get("HOME") or "~").expanduser()
    docker = Path(os.environ.get("DOCKER_CONFIG") or home / ".docker")
    apptainer = Path(os.environ.get("APPTAINER_CONFIGDIR") or home / ".apptainer")
    yield from _read_docker_config(docker / "config.json")
    yield from _read_docker_config(apptainer / "docker-config.json")


def parse_registry_host(name: str) -> str:
    """Return the host, with its port, that a key of ``config.json`` or the URL of a registry's API is about."""
    host = name.partition("://")[2] or name
    host = host.partition("/")[0].lower()
    return DOCKER_HUB if host in _HUB_NAMES else host


def _read_docker_config(path: Path) -> list[RegistryCredentials]:
    found: list[RegistryCredentials] = []
    try:
        for name, entry in _DockerConfig.model_validate_json(path.read_bytes()).auths.items():
            username, password = entry.username, entry.password
            if entry.auth:
                username, _, password = b64decode(entry.auth, validate=True).decode().partition(":")
            if username and password:
                found.append(RegistryCredentials(parse_registry_host(name), username, password.rstrip("\0")))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []  # a home that this user may not read holds no logins of theirs
    except (OSError, ValidationError, Base64Error, UnicodeDecodeError) as error:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"{path}: cannot be read as a file of logins ({type(error).__name__}).",
            "Write it with `docker login` or `apptainer registry login`, or remove it.",
        ) from None
    return found


class RegistryHttp:
    """A pool of connections, opened at the first request; one per event loop, closed by its owner.

    ``login_host`` is the registry that the environment's login is for.
    """

    def __init__(self, login_host: str) -> None:
        self._login_host = login_host
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def get(
        self, url: str, headers: Mapping[str, str], authorization: str | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Request a URL and follow redirects; ``authorization`` goes to the scheme, host and port of ``url`` only.

        Raises ``TransientError`` (busy, redirected without end), ``aiohttp.ClientError`` or ``TimeoutError``
        (connection).
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
                if response.status in _RETRIED_STATUSES:
                    why = "too many requests" if response.status == 429 else f"HTTP {response.status}"
                    raise TransientError(why, _parse_retry_after(response.headers.get("Retry-After")))
                if response.status not in _REDIRECT_STATUSES:
                    yield response
                    return
                place = _redirect_target(place, response.headers.get("Location", ""))
        raise TransientError(f"redirected more than {_MAX_REDIRECTS} times")

    async def answer_challenges(self, api: str, challenges: Sequence[str]) -> str | None:
        """Return the ``Authorization`` to try for an API that was refused with these ``WWW-Authenticate`` headers."""
        login = await asyncio.to_thread(find_credentials, api, self._login_host)
        kinds = {challenge.partition(" ")[0].lower(): challenge for challenge in challenges}
        if "bearer" in kinds:
            return await self._fetch_token(api, dict(_PARAMETER.findall(kinds["bearer"])), login)
        if "basic" in kinds and login is not None and _is_secure(api):
            return login.authorization
        return None

    async def _fetch_token(self, api: str, facts: dict[str, str], login: RegistryCredentials | None) -> str | None:
        realm = facts.get("realm", "")
        if not (realm.startswith("https://") or _host_name(realm) == _host_name(api)):
            return None
        query = {name: facts[name] for name in ("service", "scope") if name in facts}
        url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(query)}"
        trusted = login is not None and _is_secure(realm) and is_trusted_realm(realm, api, login)
        password = login.authorization if login is not None and trusted else None
        async with self.get(url, {}, password) as response:
            if response.status != 200:
                return None
            grant = parse_model(TokenResponse, await read_bounded(response, realm), f"token from {realm}")
        return f"Bearer {grant.token or grant.access_token}"


def is_trusted_realm(realm: str, api: str, login: RegistryCredentials) -> bool:
    """Whether the token service at ``realm`` belongs to the host that the login is for."""
    if urlsplit(realm).netloc == urlsplit(api).netloc:
        return True
    host, own = _host_name(realm), _host_name(f"//{login.host}")
    if own in _LOOPBACK:  # any user may own one of its ports
        return False
    above = own.partition(".")[2]
    return host == own or host.endswith(f".{own}") or ("." in above and host == above)


def _is_secure(url: str) -> bool:
    return url.startswith("https://") or _host_name(url) in _LOOPBACK


def _host_name(url: str) -> str:
    return urlsplit(url).hostname or ""
