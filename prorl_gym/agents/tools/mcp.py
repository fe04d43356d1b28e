"""Tools of MCP servers (Model Context Protocol): the extra ``prorl-gym[mcp]``.

``McpServer`` lives as long as a rollout: ``tools = await leases.enter_context(McpServer(config))`` in an environment's
``init``. A server's descriptions of its tools are hostile text; the prompt gets bounded specs of them.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from prorl_gym.agents.protocol import Observation, ToolSpec
from prorl_gym.agents.tools.mcp_config import McpConfig
from prorl_gym.agents.tools.mcp_session import McpConnectionError, McpResult, McpSession, McpTimeout
from prorl_gym.agents.tools.observation_text import printable_text, shorten
from prorl_gym.agents.tools.tool_secret import Secret, redact_secrets
from prorl_gym.errors import FailureKind, SandboxError

__all__ = ["McpConfig", "McpServer", "McpTool"]

_SCHEMA_TYPES = {"string", "boolean", "integer", "number", "array", "object", "null"}


class McpServer:
    """A connection to one server, opened again when it breaks. Entering it gives the tools.

    Args:
        config: the server.
    """

    def __init__(self, config: McpConfig) -> None:
        self.config = config
        self._session_task: asyncio.Task[McpSession] | None = None
        self._closing_tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._secrets = tuple(Secret(variable) for variable in config.secret_variables)
        self._was_reconnected = False

    async def __aenter__(self) -> "tuple[McpTool, ...]":
        """Open it and return its tools.

        Raises:
            SandboxError: ``SANDBOX_UNAVAILABLE``: it cannot be opened, or does not offer what is expected of it. The
                cause is infrastructure.
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection; a program is ended, at first by closing its input."""
        await self._close()

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return the observation.

        A call is never repeated: it may have done something before the connection broke.

        Raises:
            SandboxError: ``SANDBOX_UNAVAILABLE``: the server is gone and cannot be opened again.
        """
        session = await self._open_session()
        notice = (
            "[The server was started again before this call: what it held is lost.]\n" if self._was_reconnected else ""
        )
        self._was_reconnected = False
        try:
            answer = await session.call_tool(name, arguments, self.config.call_seconds)
        except McpTimeout:
            self._discard_session()
            text = f"The tool did not answer within {self.config.call_seconds:g} seconds, and was stopped."
        except McpConnectionError as error:
            self._discard_session()
            await self._open_session()  # a server that is gone for good is no observation
            text = f"The tool's server broke off during this call ({error})."
        except BaseException:
            self._discard_session()  # cancelled: the answer is not read
            raise
        else:
            text = _observation_text(answer)
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
        self._spec = spec

    @property
    def spec(self) -> ToolSpec:
        """See ``Tool``."""
        return self._spec

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        """Call it; what the server refuses is an observation.

        Raises:
            SandboxError: see ``McpServer.call_tool``.
        """
        return Observation(await self._server.call_tool(self._name, arguments))


def _failed(task: asyncio.Task[McpSession]) -> bool:
    return task.cancelled() or task.exception() is not None


def _observation_text(answer: McpResult) -> str:
    text = answer.text.rstrip() or "[No output.]"
    return f"The tool reports an error: {text}" if answer.is_error else text


class InvalidToolList(Exception):
    """The tools of a server are not those that the environment expects. The text gives the reason."""


def select_specs(offered: Mapping[str, tuple[str, Any]], config: McpConfig) -> list[ToolSpec]:
    """Return the specs of the tools that are wanted, in the order in which they are wanted.

    Args:
        offered: description and schema of each tool, by its name.
        config: which are wanted, and bounds.

    Raises:
        InvalidToolList: one is missing, its schema is too large or is not that of an object, or the digest differs.
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
