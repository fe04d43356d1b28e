"""The blocks of ``docs/tools.md``, run: against a local API and a local MCP server."""

import re
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend

pytestmark = pytest.mark.mcp

PAGE = Path(__file__).parents[2] / "docs" / "tools.md"
RAW = Path(__file__).parent / "mcp_raw_server.py"


def blocks(url: str) -> dict[str, Any]:
    """What the page defines, at addresses of this test."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        block = block.replace("https://api.tavily.com", url).replace('"notes_server.py"', f'{str(RAW)!r}, "good"')
        exec(block.replace('tools=("note",)', 'tools=("say",)'), names)
    return names


async def test_both_tools_work_as_the_page_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", "tvly-of-no-worth")
    monkeypatch.setenv("NOTES_TOKEN", "notes-of-no-worth")
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.headers["Authorization"], await request.json()))
        return web.json_response({"results": [{"title": "Bonn", "content": "A city."}]})

    app = web.Application()
    app.router.add_post("/search", answer)
    leases = SandboxLeases(EmptyBackend())
    async with TestServer(app) as server, AsyncExitStack() as owned:
        owned.push_async_callback(leases.close)
        names = blocks(str(server.make_url("")).rstrip("/"))
        episode = await names["init"](None, SimpleNamespace(question="?"), leases, None)
        say, search, finish = episode.tools
        assert [tool.spec.name for tool in episode.tools] == ["say", "search", "finish"]
        assert (await search({"query": "bonn"})).text == "Bonn\nA city."
        assert asked == [("Bearer tvly-of-no-worth", {"query": "bonn", "max_results": 5})]
        assert (await say({"text": "hello"})).text == "say:hello"
        assert (await finish({"answer": "x"})).answer == "x"
