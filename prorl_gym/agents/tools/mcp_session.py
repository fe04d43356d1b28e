"""One connection to an MCP server. The only module that imports the ``mcp`` package.

The package's scopes must be left by the task that entered them, but a rollout begins, calls and ends in different
tasks. So each connection has a task of its own, which opens it, waits, and closes it.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from prorl_gym.agents.tools.mcp_config import McpConfig
from prorl_gym.agents.tools.tool_secret import Secret
from prorl_gym.errors import ConfigError

if TYPE_CHECKING:
    from mcp import ClientSession

_MAX_PAGES = 16
_PING_SECONDS = 5.0
_TIMEOUT_CODE = 408
_CLOSED_CODE = -32000

# The package passes these to every program beside its configured ones. Ours gets PATH alone.
_BASE_ENV = {"HOME": "/", "LOGNAME": "", "SHELL": "/bin/sh", "TERM": "dumb", "USER": ""}


class McpConnectionError(Exception):
    """The connection is of no more use. The text gives the reason."""


class McpTimeout(Exception):
    """No answer in time; the connection is of no more use."""


@dataclass(frozen=True, slots=True)
class McpResult:
    """The result of a tool."""

    text: str
    is_error: bool
    """The server reports that the call failed."""


class McpSession:
    """An open connection. Open it with ``connect``; end it with ``begin_close``, from any task."""

    def __init__(self, session: "ClientSession", owner: asyncio.Task[None], done: asyncio.Event) -> None:
        self._session = session
        self._owner = owner
        self._done = done

    @classmethod
    async def connect(cls, config: McpConfig) -> "McpSession":
        """Start or reach the server and initialize the session.

        Raises:
            McpConnectionError: it does not start, cannot be reached, or does not speak the protocol.
            TimeoutError: it does so too slowly.
            SandboxError: a variable that it needs is not set.
            ConfigError: the ``mcp`` package is not installed.
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

        Raises:
            McpConnectionError: the server does not list them, or its list does not end.
        """
        from mcp.types import PaginatedRequestParams

        found: dict[str, tuple[str, Any]] = {}
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            try:
                page = await self._session.list_tools(params=PaginatedRequestParams(cursor=cursor))
            except Exception as error:
                raise McpConnectionError(f"it does not list its tools ({type(error).__name__})") from None
            for tool in page.tools:
                found.setdefault(tool.name, (tool.description or "", tool.inputSchema))
            if not (cursor := page.nextCursor):
                return found
        raise McpConnectionError(f"its list of tools has more than {_MAX_PAGES} pages")

    async def call_tool(self, name: str, arguments: Mapping[str, Any], seconds: float) -> McpResult:
        """Call a tool.

        Raises:
            McpTimeout, McpConnectionError: there is no answer.
        """
        from mcp import McpError, types

        request = types.CallToolRequest(params=types.CallToolRequestParams(name=name, arguments=dict(arguments)))
        try:
            # Not `call_tool`: it checks results against the server's own schemas, which may be wrong.
            async with asyncio.timeout(seconds + 1):  # writing to a server that reads nothing has no limit of its own
                result = await self._session.send_request(
                    types.ClientRequest(request), types.CallToolResult, timedelta(seconds=seconds)
                )
        except McpError as error:
            if error.error.code == _TIMEOUT_CODE:
                raise McpTimeout from None
            if error.error.code == _CLOSED_CODE and not await self._is_alive():
                raise McpConnectionError("it ended the connection") from None
            return McpResult(error.error.message, is_error=True)
        except TimeoutError:
            raise McpTimeout from None
        except Exception as error:  # closed streams, invalid answers
            raise McpConnectionError(type(error).__name__) from None
        return McpResult("\n".join(_result_texts(result)), is_error=result.isError)

    async def _is_alive(self) -> bool:
        """Whether the server answers: its own errors may have the code of a closed connection."""
        try:
            async with asyncio.timeout(_PING_SECONDS):
                await self._session.send_ping()
        except Exception:
            return False
        return True

    def begin_close(self) -> asyncio.Task[None]:
        """Begin to end the connection, and the program. Idempotent.

        Returns:
            What is done when it has ended. It raises nothing.
        """
        self._done.set()
        return self._owner


async def _run_connection(config: McpConfig, ready: "asyncio.Future[ClientSession]", done: asyncio.Event) -> None:
    try:
        async with AsyncExitStack() as held:
            session = await _initialize(config, held)
            if not ready.done():
                ready.set_result(session)
            await done.wait()
    except Exception as error:  # the package raises groups of any errors of a transport
        if not ready.done():
            ready.set_exception(_root_cause(error))


async def _initialize(config: McpConfig, held: AsyncExitStack) -> "ClientSession":
    try:
        from mcp import ClientSession
    except ImportError:
        raise ConfigError("The package 'mcp' is not installed.", "Install it: pip install 'prorl-gym[mcp]'.") from None

    transport = _stdio_transport(config) if config.command else _http_transport(config)
    reads, writes = await held.enter_async_context(transport)
    session = await held.enter_async_context(ClientSession(reads, writes))
    await session.initialize()
    return session


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


def _result_texts(result: Any) -> list[str]:
    import json

    found = [
        block.text if block.type == "text" else f"[A part of kind '{block.type}' cannot be shown here.]"
        for block in result.content
    ]
    if not found and result.structuredContent is not None:
        found.append(json.dumps(result.structuredContent, ensure_ascii=False))
    return found
