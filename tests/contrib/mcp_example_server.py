"""A small MCP server for tests, over standard input and output or streamable HTTP (``--port``)."""

import asyncio
import os
import sys

from mcp.server.fastmcp import FastMCP

_port = int(sys.argv[sys.argv.index("--port") + 1]) if "--port" in sys.argv else 0
server = FastMCP("example", port=_port or 8000, log_level="ERROR")
_notes: list[str] = []


@server.tool()
def note(text: str, times: int = 1) -> str:
    """Keep a note. Returns how many there are."""
    _notes.extend([text] * times)
    return str(len(_notes))


@server.tool()
def environment() -> str:
    """Tell the environment of the server."""
    return "\n".join(f"{name}={value}" for name, value in sorted(os.environ.items()))


@server.tool()
def broken(text: str) -> str:
    """Fail."""
    raise ValueError(f"no {text}")


@server.tool()
async def slow() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def poisoned(text: str) -> str:
    """Return what was asked for, as it is."""
    return text * 2000


server.run("streamable-http" if _port else "stdio")
