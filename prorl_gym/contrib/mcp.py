"""Tools of MCP servers (Model Context Protocol): the extra ``prorl-gym[mcp]``.

``McpServer`` lives as long as a rollout: ``tools = await leases.enter_context(McpServer(config))`` in an environment's
``init``. A server's descriptions of its tools are hostile text; the prompt gets bounded specs of them.

The scopes of the ``mcp`` package must be left by the task that entered them, but a rollout begins, calls and ends in
different tasks. So each connection has a task of its own, which opens it, waits, and closes it.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from prorl_gym.agents.protocol import Observation, ToolSpec
from prorl_gym.config import ConfigModel
from prorl_gym.contrib.tool_text import Secret, printable_text, redact_secrets, shorten
from prorl_gym.errors import ConfigError, FailureKind, SandboxError

if TYPE_CHECKING:
    from mcp import ClientSession

_SCHEMA_TYPES = {"string", "boolean", "integer", "number", "array", "object", "null"}
_MAX_PAGES = 16
_PING_SECONDS = 5.0
_TIMEOUT_CODE = 408
_CLOSED_CODE = -32000

# The package passes these to every program with its configured ones. Ours gets PATH alone.
_BASE_ENV = {"HOME": "/", "LOGNAME": "", "SHELL": "/bin/sh", "TERM": "dumb", "USER": ""}

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")]


class McpConfig(ConfigModel):
    """A server: a program that is started for each rollout, or an address.

    A program runs on the host as the service's user, outside any sandbox, on arguments that a model wrote: name only
    servers that bear that.
    """

    tools: Annotated[tuple[ToolName, ...], Field(min_length=1, max_length=64)]
    """Names of the tools that the model gets, in this order. Others of the server are not offered and not called."""
    command: tuple[str, ...] = ()
    """Program and arguments; spoken to over its standard input and output."""
    env: Mapping[VariableName, str] = {}
    """Its environment: this, PATH, and ``pass_env``. Nothing else of the service's."""
    pass_env: tuple[VariableName, ...] = ()
    """Variables of the service that it gets too. Their values count as secrets: they are hidden in answers and logs."""
    stderr: Path | None = None
    """File that its standard error is added to; thrown away by default."""
    url: str = ""
    """Address of a server that speaks streamable HTTP, instead of a program. Redirects are not followed."""
    headers_env: Mapping[Annotated[str, Field(pattern=r"^[A-Za-z0-9\-]+$")], VariableName] = {}
    """Headers for it, each with the variable of the service that holds its whole value. Secrets, as above."""
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{0,32}$")] = ""
    """Prefix of the tools' names in the prompt, for servers with equal names."""
    digest: str = ""
    """Digest of names, descriptions and schemas as ``prorl-gym`` names it when it differs. Where it is given, a server
    that words its tools otherwise is refused: the prompts of a data set would no longer be the same."""
    start_seconds: Annotated[float, Field(gt=0, le=600)] = 30.0
    """Longest time for a start, the list of tools included."""
    call_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Longest time of one call."""
    characters: Annotated[int, Field(gt=0)] = 8000
    """Longest observation."""
    description_characters: Annotated[int, Field(gt=0)] = 1000
    """Longest description of a tool; what is longer is cut."""
    schema_characters: Annotated[int, Field(gt=0)] = 8000
    """Largest schema of a tool's arguments; a larger one is refused."""

    @model_validator(mode="after")
    def _one_server(self) -> "McpConfig":
        if bool(self.command) == bool(self.url):
            raise ValueError("give either a command or a url")
        if self.command and self.headers_env:
            raise ValueError("headers_env belongs to a url; a program has env and pass_env")
        if self.url and (self.env or self.pass_env or self.stderr):
            raise ValueError("env, pass_env and stderr belong to a command; a url has headers_env")
        if self.url and (urlsplit(self.url).scheme not in ("http", "https") or urlsplit(self.url).username):
            raise ValueError("url: give http(s)://host[:port]/path, without a user")
        if len(set(self.tools)) < len(self.tools):
            raise ValueError("tools: a name is given twice")
        return self

    @property
    def name(self) -> str:
        """The server in messages: its program or its host."""
        return Path(self.command[0]).name if self.command else urlsplit(self.url).hostname or self.url


class McpConnectionError(Exception):
    """The connection is of no more use. The text gives the reason."""


@dataclass(frozen=True, slots=True)
class McpSession:
    """An open connection. Open it with ``connect``; end it with ``begin_close``, from any task."""

    session: "ClientSession"
    owner: asyncio.Task[None]
    done: asyncio.Event

    @classmethod
    async def connect(cls, config: McpConfig) -> "McpSession":
        """Start or reach the server and initialize the session.

        Raises ``McpConnectionError`` (it does not start, cannot be reached, or does not speak the protocol),
        ``TimeoutError``, ``SandboxError`` (a variable is not set), ``ConfigError`` (the ``mcp`` package is missing).
        """
        ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        done = asyncio.Event()
        owner = asyncio.create_task(_run_connection(config, ready, done), name=f"mcp-{config.name}")
        try:
            async with asyncio.timeout(config.start_seconds):
                session = await ready
        except BaseException:
            owner.cancel()
            await asyncio.wait([owner])
            ready.cancel()
            raise
        return cls(session, owner, done)

    async def list_tools(self) -> dict[str, tuple[str, Any]]:
        """Return description and schema of what it offers, by name.

        Raises ``McpConnectionError`` if the server does not list them, or its list does not end.
        """
        from mcp.types import PaginatedRequestParams

        found: dict[str, tuple[str, Any]] = {}
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            try:
                page = await self.session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            except Exception as error:
                raise McpConnectionError(f"it does not list its tools ({type(error).__name__})") from None
            for tool in page.tools:
                found.setdefault(tool.name, (tool.description or "", tool.inputSchema))
            if not (cursor := page.nextCursor):
                return found
        raise McpConnectionError(f"its list of tools has more than {_MAX_PAGES} pages")

    async def call_tool(self, name: str, arguments: Mapping[str, Any], seconds: float) -> str:
        """Call a tool and return its text.

        Raises ``TimeoutError`` or ``McpConnectionError`` if there is no answer; the connection is of no more use then.
        """
        from mcp import McpError, types

        request = types.CallToolRequest(params=types.CallToolRequestParams(name=name, arguments=dict(arguments)))
        try:
            # Not `call_tool`: it checks results against the server's own schemas, which may be wrong.
            async with asyncio.timeout(seconds + 1):  # writing to a server that reads nothing has no limit of its own
                result = await self.session.send_request(
                    types.ClientRequest(request), types.CallToolResult, timedelta(seconds=seconds)
                )
        except McpError as error:
            if error.error.code == _TIMEOUT_CODE:
                raise TimeoutError from None
            if error.error.code == _CLOSED_CODE and not await self._is_alive():
                raise McpConnectionError("it ended the connection") from None
            texts, is_error = [error.error.message], True
        except TimeoutError:
            raise
        except Exception as error:  # closed streams, invalid answers
            raise McpConnectionError(type(error).__name__) from None
        else:
            is_error = result.isError
            texts = [
                block.text if block.type == "text" else f"[A part of kind '{block.type}' cannot be shown here.]"
                for block in result.content
            ]
            if not texts and result.structuredContent is not None:
                texts.append(json.dumps(result.structuredContent, ensure_ascii=False))
        text = "\n".join(texts).rstrip() or "[No output.]"
        return f"The tool reports an error: {text}" if is_error else text

    async def _is_alive(self) -> bool:
        """Whether the server answers: its own errors may have the code of a closed connection."""
        try:
            async with asyncio.timeout(_PING_SECONDS):
                await self.session.send_ping()
        except Exception:
            return False
        return True

    def begin_close(self) -> asyncio.Task[None]:
        """Begin to end the connection, and the program. Idempotent; the returned task raises nothing."""
        self.done.set()
        return self.owner


async def _run_connection(config: McpConfig, ready: "asyncio.Future[ClientSession]", done: asyncio.Event) -> None:
    try:
        try:
            from mcp import ClientSession
        except ImportError:
            what = "The package 'mcp' is not installed."
            raise ConfigError(what, "Install it: pip install 'prorl-gym[mcp]'.") from None

        transport = _stdio_transport(config) if config.command else _http_transport(config)
        async with transport as (reads, writes), ClientSession(reads, writes) as session:
            await session.initialize()
            if not ready.done():
                ready.set_result(session)
            await done.wait()
    except Exception as error:  # the package raises groups of any errors of a transport
        if not ready.done():
            ready.set_exception(_root_cause(error))


@asynccontextmanager
async def _stdio_transport(config: McpConfig) -> AsyncGenerator[tuple[Any, Any]]:
    from mcp.client.stdio import StdioServerParameters, stdio_client

    given = {variable: Secret(variable).value() for variable in config.pass_env}
    parameters = StdioServerParameters(
        command=config.command[0],
        args=list(config.command[1:]),
        env={**_BASE_ENV, **config.env, **given},
        encoding_error_handler="replace",
    )
    with open(config.stderr or os.devnull, "a", encoding="utf-8") as errors:  # noqa: ASYNC230 - a local file, once
        async with stdio_client(parameters, errlog=errors) as streams:
            yield streams


@asynccontextmanager
async def _http_transport(config: McpConfig) -> AsyncGenerator[tuple[Any, Any]]:
    import httpx
    from mcp.client.streamable_http import streamable_http_client

    headers = {header: Secret(variable).value() for header, variable in config.headers_env.items()}
    seconds = httpx.Timeout(config.start_seconds, read=None)
    client = httpx.AsyncClient(headers=headers, timeout=seconds, follow_redirects=False, trust_env=False)
    opened: AbstractAsyncContextManager[tuple[Any, ...]] = streamable_http_client(config.url, http_client=client)
    async with client, opened as streams:
        yield streams[0], streams[1]


def _root_cause(error: BaseException) -> BaseException:
    """Return the one cause of a failed start."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    if isinstance(error, FileNotFoundError | PermissionError):
        return McpConnectionError(f"its program cannot be started ({error.strerror})")
    if type(error).__module__.startswith("prorl_gym."):
        return error
    return McpConnectionError(f"it does not start or does not speak the protocol ({type(error).__name__})")


class McpServer:
    """A connection to one server, opened again when it breaks. Entering it gives the tools."""

    def __init__(self, config: McpConfig) -> None:
        self.config = config
        self._session_task: asyncio.Task[McpSession] | None = None
        self._closing_tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._secrets = tuple(map(Secret, (*config.pass_env, *config.headers_env.values())))
        self._was_reconnected = False

    async def __aenter__(self) -> "tuple[McpTool, ...]":
        """Open it and return its tools.

        Raises ``SandboxError`` (``SANDBOX_UNAVAILABLE``, cause: infrastructure): it cannot be opened, or does not offer
        the expected tools.
        """
        session = await self._open_session()
        try:
            async with asyncio.timeout(self.config.start_seconds):
                specs = select_specs(await session.list_tools(), self.config)
        except (McpConnectionError, InvalidToolList, TimeoutError) as error:
            await self._close()
            raise self._unavailable(str(error) or "it does not list its tools in time") from None
        except BaseException:
            await self._close()
            raise
        return tuple(McpTool(self, name, spec) for name, spec in zip(self.config.tools, specs, strict=True))

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return the observation.

        A call is never repeated: it may have done something before the connection broke. Raises ``SandboxError``
        (``SANDBOX_UNAVAILABLE``): the server is gone and cannot be opened again.
        """
        session = await self._open_session()
        notice = (
            "[The server was started again before this call: what it held is lost.]\n" if self._was_reconnected else ""
        )
        self._was_reconnected = False
        try:
            text = await session.call_tool(name, arguments, self.config.call_seconds)
        except TimeoutError:
            self._discard_session()
            text = f"The tool did not answer within {self.config.call_seconds:g} seconds, and was stopped."
        except McpConnectionError as error:
            self._discard_session()
            await self._open_session()  # a server that is gone for good is no observation
            text = f"The tool's server broke off during this call ({error})."
        except BaseException:
            self._discard_session()  # cancelled: the answer is not read
            raise
        return shorten(notice + printable_text(redact_secrets(text, self._secrets)), self.config.characters)

    async def _open_session(self) -> McpSession:
        if self._is_closed:
            raise self._unavailable("the rollout has ended")
        if self._session_task is None or (self._session_task.done() and _failed(self._session_task)):
            self._session_task = asyncio.create_task(McpSession.connect(self.config), name="mcp-open")
        try:
            return await asyncio.shield(self._session_task)  # two calls that find it broken open one
        except McpConnectionError as error:
            raise self._unavailable(str(error)) from None
        except TimeoutError:
            raise self._unavailable(f"no greeting within {self.config.start_seconds:g} seconds") from None

    def _discard_session(self) -> None:
        """Have the next call open a new connection; the old one ends in the background."""
        opening, self._session_task = self._session_task, None
        if opening is None:
            return
        self._was_reconnected = True
        opening.cancel()
        if opening.done() and not _failed(opening):
            ended = opening.result().begin_close()
            self._closing_tasks.add(ended)
            ended.add_done_callback(self._closing_tasks.discard)

    async def _close(self) -> None:
        self._is_closed = True
        opening = self._session_task
        self._discard_session()
        if opening is not None and not opening.done():
            await asyncio.wait([opening])
        if self._closing_tasks:
            await asyncio.wait(self._closing_tasks)

    def _unavailable(self, why: str) -> SandboxError:
        fix = (
            f"Run {self.config.name} by hand with the same arguments." if self.config.command else "Check its address."
        )
        what = f"The MCP server {self.config.name} is not available: {printable_text(why)[:500]}."
        return SandboxError(FailureKind.SANDBOX_UNAVAILABLE, redact_secrets(what, self._secrets), fix)


class McpTool:
    """One tool of a server. Implements ``Tool``."""

    def __init__(self, server: McpServer, name: str, spec: ToolSpec) -> None:
        self._server = server
        self._name = name
        self.spec = spec

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        return Observation(await self._server.call_tool(self._name, arguments))


def _failed(task: asyncio.Task[McpSession]) -> bool:
    return task.cancelled() or task.exception() is not None


class InvalidToolList(Exception):
    """The tools of a server are not those that the environment expects. The text gives the reason."""


def select_specs(offered: Mapping[str, tuple[str, Any]], config: McpConfig) -> list[ToolSpec]:
    """Return the specs of the configured tools, in that order, from description and schema of the offered ones.

    Raises ``InvalidToolList`` if one is missing, its schema is too large or is not that of an object, or the digest
    differs.
    """
    missing = [name for name in config.tools if name not in offered]
    if missing:
        raise InvalidToolList(f"it does not offer the tool '{missing[0]}'")
    specs = [_bounded_spec(name, *offered[name], config) for name in config.tools]
    found = specs_digest(specs)
    if config.digest and config.digest != found:
        raise InvalidToolList(
            f"it words its tools otherwise: their digest is {found}, expected was {config.digest[:80]}"
        )
    return specs


def specs_digest(specs: Sequence[ToolSpec]) -> str:
    """Return a digest of names, descriptions and schemas."""
    words = json.dumps([spec.as_function() for spec in specs], sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def _bounded_spec(name: str, description: str, schema: Any, config: McpConfig) -> ToolSpec:
    try:
        if len(json.dumps(schema)) > config.schema_characters:
            raise InvalidToolList(f"the schema of '{name}' is larger than {config.schema_characters} characters")
        parameters = _parameters(name, _printable_json(schema))
    except RecursionError:
        raise InvalidToolList(f"the schema of '{name}' is nested too deeply") from None
    words = shorten(printable_text(description), config.description_characters)
    return ToolSpec(name=config.prefix + name, description=words, parameters=parameters)


def _parameters(name: str, schema: Any) -> dict[str, Any]:
    """Return a schema in which the parts that the agent loop reads are what it takes them for."""
    if not isinstance(schema, dict) or schema.get("type") != "object":  # pyright: ignore[reportUnknownMemberType]
        raise InvalidToolList(f"the arguments of '{name}' are not an object")
    known: dict[str, Any] = {key: part for key, part in schema.items() if key in ("type", "$defs")}  # pyright: ignore[reportUnknownVariableType]
    properties: Any = schema.get("properties", {})  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    required: Any = schema.get("required", [])  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise InvalidToolList(f"the arguments of '{name}' are not described as JSON schema does it")
    items: dict[str, Any] = properties  # pyright: ignore[reportUnknownVariableType]
    names: list[Any] = required  # pyright: ignore[reportUnknownVariableType]
    known["properties"] = {key: _known_schema(part) for key, part in items.items()}
    known["required"] = [one for one in names if one in items]
    return known


def _known_schema(part: Any) -> dict[str, Any]:
    """Return an argument's schema without types and lists of values in an unknown form: the server checks those."""
    if not isinstance(part, dict):
        return {}
    schema: dict[str, Any] = dict(part)  # pyright: ignore[reportUnknownArgumentType]
    kind: Any = schema.get("type")
    kinds: list[Any] = kind if isinstance(kind, list) else [kind]  # pyright: ignore[reportUnknownVariableType]
    if "type" in schema and (not kinds or not all(isinstance(one, str) and one in _SCHEMA_TYPES for one in kinds)):
        del schema["type"]
    if "enum" in schema and not isinstance(schema["enum"], list):
        del schema["enum"]
    return schema


def _printable_json(value: Any) -> Any:
    """Return JSON whose texts, keys too, hold nothing but text."""
    if isinstance(value, str):
        return printable_text(value)
    if isinstance(value, list):
        items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
        return [_printable_json(item) for item in items]
    if isinstance(value, dict):
        entries: dict[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return {printable_text(key): _printable_json(item) for key, item in entries.items()}
    return value
