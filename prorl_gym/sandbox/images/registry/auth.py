"""Logins for registries: where users and passwords are found, and how a "401" is answered with them.

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
import os
import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from pydantic import BaseModel, Field, ValidationError

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.logs import register_secret
from prorl_gym.sandbox.images.registry.http import RegistryHttp, read_bounded
from prorl_gym.sandbox.images.registry.oci_format import DOCKER_HUB, TokenResponse, parse_model

_HUB_NAMES = ("index.docker.io", "registry-1.docker.io", DOCKER_HUB)
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class RegistryCredentials:
    """User and password for one registry."""

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


class CredentialFinder:
    """Finds logins. Files are read again each time: some are rewritten every few hours.

    Args:
        variables_host: host that the environment variables' user and password are for.
        environment: the process's own by default.
    """

    def __init__(self, variables_host: str = DOCKER_HUB, environment: Mapping[str, str] = os.environ) -> None:
        self._variables_host = parse_registry_host(variables_host)
        self._environment = environment

    def find_credentials(self, host: str) -> RegistryCredentials | None:
        """Return the login of a registry's host, if there is one. Blocks on small files.

        Raises:
            SandboxError: ``SANDBOX_UNAVAILABLE``, a file cannot be read.
        """
        wanted = parse_registry_host(host)
        found = next((login for login in self._list_all() if login.host == wanted), None)
        if found is not None:
            register_secret(found.password)
            register_secret(found.authorization.removeprefix("Basic "))
        return found

    def _list_all(self) -> Iterator[RegistryCredentials]:
        for prefix in ("APPTAINER", "SINGULARITY"):
            username = self._environment.get(f"{prefix}_DOCKER_USERNAME")
            password = self._environment.get(f"{prefix}_DOCKER_PASSWORD")
            if username and password:
                yield RegistryCredentials(self._variables_host, username, password)
        home = Path(self._environment.get("HOME") or "~").expanduser()
        yield from _read_docker_config(Path(self._environment.get("DOCKER_CONFIG") or home / ".docker") / "config.json")
        yield from _read_docker_config(
            Path(self._environment.get("APPTAINER_CONFIGDIR") or home / ".apptainer") / "docker-config.json"
        )


def parse_registry_host(name: str) -> str:
    """Return the host, with its port, that a key of ``config.json`` or the URL of a registry's API is about."""
    host = name.partition("://")[2] or name
    host = host.partition("/")[0].lower()
    return DOCKER_HUB if host in _HUB_NAMES else host


def _read_docker_config(path: Path) -> list[RegistryCredentials]:
    try:
        file = _DockerConfig.model_validate_json(path.read_bytes())
        return [
            login
            for name, entry in file.auths.items()
            if (login := _to_credentials(parse_registry_host(name), entry)) is not None
        ]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []  # a home that this user may not read holds no logins of theirs
    except (OSError, ValidationError, Base64Error, UnicodeDecodeError) as error:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"{path}: cannot be read as a file of logins ({type(error).__name__}).",
            "Write it with `docker login` or `apptainer registry login`, or remove it.",
        ) from None


def _to_credentials(host: str, entry: _DockerAuth) -> RegistryCredentials | None:
    username, password = entry.username, entry.password
    if entry.auth:
        username, _, password = b64decode(entry.auth, validate=True).decode().partition(":")
    return RegistryCredentials(host, username, password.rstrip("\0")) if username and password else None


class RegistryAuth:
    """Answers the challenges of registries.

    Args:
        http: requests tokens.
        credentials: finds passwords.
    """

    def __init__(self, http: RegistryHttp, credentials: CredentialFinder) -> None:
        self._http = http
        self._credentials = credentials

    async def answer_challenges(self, api: str, challenges: Sequence[str]) -> str | None:
        """Return the value of ``Authorization`` to try; ``None``: there is none.

        Args:
            api: the URL that was refused.
            challenges: the ``WWW-Authenticate`` headers that came with it.

        Raises:
            TransientError: the token service is busy.
            SandboxError: the token service's answer is malformed, or a file of logins is broken.
        """
        login = await asyncio.to_thread(self._credentials.find_credentials, parse_registry_host(api))
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
        password = (
            login.authorization
            if login is not None and _is_secure(realm) and is_trusted_realm(realm, api, login)
            else None
        )
        async with self._http.get(url, {}, password) as response:
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
