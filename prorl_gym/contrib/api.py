"""``ApiTool``: a tool that calls an API from the host, with typed arguments and a key that stays out of the sandbox.

The agent's sandbox has no network and no secrets. Such a tool gives access to one API through one function of the
environment's author: its arguments are checked, its answer is bounded and cleaned. Its HTTP client knows one
origin, and follows no redirects and no addresses inside the site.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, Any, Generic, Literal, TypeVar
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from yarl import URL

from prorl_gym.agents.protocol import Observation, ToolSpec
from prorl_gym.config import ConfigModel
from prorl_gym.contrib.tool_text import Secret, printable_text, redact_secrets, shorten
from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.http_body import read_body
from prorl_gym.sandbox.service.egress_rules import AllowList, EgressRefusedError, split_authority

_RETRY_STATUSES = (408, 425, 429, 500, 502, 503, 504)
RETRY_SECONDS = 0.5
"""Before the second attempt; before each later one, so much more."""


class ApiRefused(Exception):
    """The call cannot be answered, and asking otherwise may help. The text is shown to the model."""


class ApiOutage(Exception):
    """The API cannot be reached, is overloaded or gives invalid answers."""


class ApiConfig(ConfigModel):
    """Address, key and limits of an API."""

    url: str
    """Its base address. Only this scheme, host and port are ever called."""
    addresses: tuple[str, ...] = ()
    """Addresses inside the site that the host's name may lead to; others that are private are refused. A base address
    that is itself one needs no entry."""
    secret: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Environment variable of the service that holds the key. Its value is in no sandbox, record, log or answer."""
    secret_in: Literal["header", "query"] = "header"
    secret_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]+$")] = "Authorization"
    """Header or query parameter that carries the key."""
    secret_form: str = "Bearer {}"
    """Its value; ``{}`` is the key."""
    seconds: Annotated[float, Field(gt=0, le=600)] = 20.0
    """Longest time of one tool call, its repetitions included."""
    attempts: Annotated[int, Field(ge=1, le=5)] = 2
    """Tries of a request during an outage."""
    answer_bytes: Annotated[int, Field(gt=0, le=64 << 20)] = 1 << 20
    """Largest body that is read."""
    characters: Annotated[int, Field(gt=0)] = 8000
    """Longest observation."""
    outage: Literal["tell", "fail"] = "tell"
    """Effect of an outage. ``tell``: an observation, and the rollout goes on. ``fail``: an infrastructure failure; the
    attempt is retried and has no reward. Choose ``fail`` only if the model cannot provoke an outage by its requests:
    otherwise it could escape a bad reward."""

    @field_validator("url")
    @classmethod
    def _is_origin(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.query or parts.fragment or parts.username:
            raise ValueError("give http(s)://host[:port][/path], without a user, a query or a fragment")
        split_authority(parts.netloc)
        return url.rstrip("/")

    @model_validator(mode="after")
    def _secrets_travel_encrypted(self) -> "ApiConfig":
        for address in self.addresses:
            split_authority(address)
        if self.secret is not None and self.secret_form.count("{}") != 1:
            raise ValueError("secret_form must hold {} once")
        if self.secret is not None and self.url.startswith("http://") and not _is_address(self.host):
            raise ValueError("a key must not travel unencrypted: use https, or the address of a host inside the site")
        return self

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """An answer of the API with a status below 300."""

    status: int
    body: bytes

    def text(self) -> str:
        """The body as text; what is no UTF-8 is replaced."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON. Raises ``ApiOutage`` if it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise ApiOutage("it answered what is not JSON") from None


class ApiClient:
    """HTTP client of the function of an ``ApiTool``. It adds the key, which the function never gets."""

    def __init__(self, config: ApiConfig) -> None:
        self._config = config
        authority = f"[{config.host}]" if ":" in config.host else config.host
        self._allowed = AllowList.parse((f"{authority}:{config.port}", *config.addresses))

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> ApiResponse:
        """Send a GET request to a path below the base address.

        Raises ``ApiRefused`` (a status of 4xx, too large a body), ``ApiOutage`` (it cannot be reached, redirects
        elsewhere or is overloaded), ``SandboxError`` (the key is missing or not accepted).
        """
        return await self._request("GET", path, params, None)

    async def post(self, path: str, body: Any, params: Mapping[str, str] | None = None) -> ApiResponse:
        """Send a JSON value with POST; otherwise as ``get``."""
        return await self._request("POST", path, params, json.dumps(body).encode())

    async def _request(
        self, method: str, path: str, params: Mapping[str, str] | None, body: bytes | None
    ) -> ApiResponse:
        for attempt in range(1, self._config.attempts):
            with suppress(ApiOutage):
                return await self._send(method, path, params, body)
            await asyncio.sleep(RETRY_SECONDS * attempt)
        return await self._send(method, path, params, body)

    async def _send(self, method: str, path: str, params: Mapping[str, str] | None, body: bytes | None) -> ApiResponse:
        base = URL(self._config.url)
        url = URL(f"{self._config.url}/{path.lstrip('/')}")
        if url.origin() != base.origin() or not url.path.startswith(base.path.rstrip("/") + "/"):
            raise ApiRefused("the address leads elsewhere")
        headers, query = {"Accept-Encoding": "identity"}, dict(params or {})
        if self._config.secret is not None:
            carrier = headers if self._config.secret_in == "header" else query
            value = Secret(self._config.secret).value()
            carrier[self._config.secret_name] = self._config.secret_form.replace("{}", value)
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            await self._allowed.resolve(self._config.host, self._config.port)  # literals pass aiohttp's resolver by
            connector = aiohttp.TCPConnector(resolver=_Resolver(self._allowed), ttl_dns_cache=0, use_dns_cache=False)
            async with (
                aiohttp.ClientSession(
                    connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, auto_decompress=False
                ) as session,
                session.request(
                    method, url.update_query(query), headers=headers, data=body, allow_redirects=False
                ) as response,
            ):
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise ApiOutage("it answered in an encoding that was not requested")
                answer = await read_body(response, self._config.answer_bytes)
                if answer is None:
                    raise ApiRefused(f"the answer is larger than {self._config.answer_bytes} bytes")
                return self._check_status(response.status, answer)
        except EgressRefusedError as error:
            raise ApiOutage(str(error)) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # Not its text: that may quote the address with the key in it.
            raise ApiOutage(f"it cannot be reached ({type(error).__name__})") from None

    def _check_status(self, status: int, body: bytes) -> ApiResponse:
        if status < 300:
            return ApiResponse(status, body)
        if status < 400:
            raise ApiOutage("it redirects elsewhere, which is not followed")
        if status == 401:
            raise SandboxError(
                FailureKind.SANDBOX_UNAVAILABLE,
                f"The API at {self._config.host} does not accept the key.",
                f"Check the environment variable {self._config.secret}." if self._config.secret else "Configure a key.",
            )
        if status in _RETRY_STATUSES:
            raise ApiOutage(f"it answered with status {status}")
        raise ApiRefused(f"status {status}: {body[:500].decode('utf-8', 'replace')}")


class _Resolver(AbstractResolver):
    """Names lead to addresses that were checked, and to no others: a second look-up could differ."""

    def __init__(self, allowed: AllowList) -> None:
        self._allowed = allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await self._allowed.resolve(host, port)
        return [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST,
            }
            for address in addresses
        ]

    async def close(self) -> None:
        pass


def _is_address(host: str) -> bool:
    try:
        return bool(ip_address(host))
    except ValueError:
        return host == "localhost"


ArgumentsT = TypeVar("ArgumentsT", bound=BaseModel)


class ApiTool(Generic[ArgumentsT]):
    """Implements ``Tool``. Holds nothing between calls: there is nothing to close.

    The model sees the field descriptions of ``arguments`` too. ``handler`` calls the API and returns the observation.
    Any exception of it other than ``ApiRefused`` and ``ApiOutage`` is a defect of the environment and no observation.
    """

    def __init__(
        self,
        name: str,
        description: str,
        arguments: type[ArgumentsT],
        handler: Callable[[ArgumentsT, ApiClient], Awaitable[str]],
        config: ApiConfig,
    ) -> None:
        self.spec = ToolSpec(name=name, description=description, parameters=schema_of(arguments))
        self._arguments = arguments
        self._handler = handler
        self._config = config
        self._secrets = (Secret(config.secret),) if config.secret is not None else ()

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        """Check the arguments, call the API, bound the answer.

        Raises ``SandboxError`` (``SANDBOX_UNAVAILABLE``, cause: infrastructure): the key is missing or refused, or
        there is an outage and the configuration lets it fail the attempt.
        """
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            faults = error.errors(include_url=False, include_input=False, include_context=False)[:3]
            said = (f"'{'.'.join(map(str, fault['loc'])) or 'all'}': {fault['msg'].rstrip('.')}" for fault in faults)
            return Observation(f"The arguments of '{self.spec.name}' were not accepted: {'; '.join(said)[:500]}.")
        try:
            async with asyncio.timeout(self._config.seconds):
                text = await self._handler(checked, ApiClient(self._config))
        except ApiRefused as refusal:
            text = f"The API refused: {refusal}"
        except ApiOutage as outage:
            text = self._outage_text(str(outage))
        except TimeoutError:
            text = self._outage_text(f"it did not answer within {self._config.seconds:g} seconds")
        # Redacted before it is cut: half a key would not be recognized.
        return Observation(shorten(printable_text(redact_secrets(text, self._secrets)), self._config.characters))

    def _outage_text(self, why: str) -> str:
        if self._config.outage == "tell":
            return f"The API is not available: {why}. Try again later, or go on without it."
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            redact_secrets(
                f"The API of tool '{self.spec.name}' at {self._config.host} is not available: {why}.", self._secrets
            ),
            "Check that the API is up and that this host may reach it.",
        )


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, without pydantic's titles, which are useless to a model."""
    schema: dict[str, Any] = _untitled(model.model_json_schema())
    schema.setdefault("properties", {})
    schema.pop("description", None)  # the docstring of a class is for people
    return schema


def _untitled(value: Any, *, names: bool = False) -> Any:
    """Drop titles; inside ``properties`` a key called ``title`` is an argument's name."""
    if isinstance(value, list):
        items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
        return [_untitled(item) for item in items]
    if not isinstance(value, dict):
        return value
    entries: dict[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
    return {
        key: _untitled(item, names=key == "properties" and not names)
        for key, item in entries.items()
        if names or key != "title"
    }
