"""Configuration of an MCP server whose tools an environment offers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from prorl_gym.config import ConfigModel

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

    @property
    def secret_variables(self) -> tuple[str, ...]:
        """Variables of the service whose values it gets."""
        return (*self.pass_env, *self.headers_env.values())
