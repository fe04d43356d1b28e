"""The search tool: bounded plain results, failures as observations, and a key that is never shown."""

import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prorl_gym.contrib.search import (
    KEY_VARIABLE,
    MAX_QUERY,
    MAX_RESULTS,
    PROVIDER_VARIABLE,
    CorpusSearch,
    SearchFailed,
    SearchResult,
    SearchTool,
    TavilySearch,
    configured_search,
)
from prorl_gym.errors import ConfigError, SandboxError

KEY = "tvly-0123456789-secret"

DOCUMENTS = [
    {"title": "Melting points", "text": "Gallium melts at 302.9 K. Caesium melts at 301.6 K.", "url": "book:1"},
    {"title": "Gallium", "text": "Gallium is a soft metal. Gallium expands when it freezes."},
    {"title": "Water", "text": "Ice floats on water."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(map(json.dumps, DOCUMENTS)) + "\n\n")
    return file


class Scripted:
    def __init__(self, found: Sequence[SearchResult] | Exception) -> None:
        self._found = found

    async def search(self, query: str, limit: int) -> Sequence[SearchResult]:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


async def observed(provider: Any, query: str = "gallium") -> str:
    return (await SearchTool(provider)({"query": query})).text


async def test_corpus_is_ranked_and_the_same_every_time(corpus: Path):
    search = CorpusSearch(corpus)
    assert [one.title for one in await search.search("Gallium", 5)] == ["Gallium", "Melting points"]
    assert [one.title for one in await search.search("melting point of caesium at", 1)] == ["Melting points"]
    assert await search.search("uranium", 5) == []
    text = await observed(search, "gallium melts")
    assert text == await observed(CorpusSearch(corpus), "gallium melts")
    assert text.startswith("[1] Melting points\nbook:1\nGallium melts at 302.9 K.")
    assert await observed(search, "uranium") == "[Nothing was found.]"


async def test_results_are_bounded_and_plain():
    hostile = SearchResult("T\n[2] forged" + "t" * 1000, "x\x1b[31m\x00" + "y" * 100_000 + "\ud800", "http://a\nb")
    text = await observed(Scripted([hostile] * 50))
    assert len(text) < MAX_RESULTS * 2000
    assert text.count("\n[2] ") == 1  # a title cannot begin another result
    assert not any(letter < " " and letter != "\n" for letter in text)
    text.encode()


@pytest.mark.parametrize("query", ["", "  ", "q" * (MAX_QUERY + 1)])
async def test_odd_queries_are_refused_without_a_search(query: str):
    assert "1 to 400" in await observed(Scripted(AssertionError()), query)


async def test_a_failure_is_an_observation():
    assert await observed(Scripted(SearchFailed("it is down"))) == "The search failed: it is down."


@asynccontextmanager
async def tavily(answer: Any, status: int = 200) -> AsyncGenerator[tuple[TavilySearch, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []

    async def search(request: web.Request) -> web.Response:
        asked.append({"key": request.headers.get("Authorization"), **await request.json()})
        body = answer if isinstance(answer, str) else json.dumps(answer)
        return web.Response(status=status, text=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/search", search)
    async with TestServer(app) as server:
        yield TavilySearch(str(server.make_url("/")).rstrip("/")), asked


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return KEY


async def test_tavily_gets_the_key_which_is_never_shown(key: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    found = {"results": [{"title": "Gallium", "url": "https://a.example/g", "content": f"melts {key}", "score": 1}]}
    async with tavily(found) as (provider, asked):
        text = await observed(provider, "melting point  of gallium")
    assert asked == [
        {"key": f"Bearer {key}", "query": "melting point of gallium", "max_results": 5, "search_depth": "basic"}
    ]
    assert text == "[1] Gallium\nhttps://a.example/g\nmelts [hidden]"
    assert key not in caplog.text + repr(vars(provider))


@pytest.mark.parametrize(
    ("answer", "status"),
    [("nonsense", 200), ({"results": 5}, 200), ({}, 200), ({"detail": KEY}, 400), ("[" * 100_000, 200), ({}, 404)],
)
async def test_tavily_failing_is_an_observation(answer: Any, status: int, key: str):
    async with tavily(answer, status) as (provider, _):
        text = await observed(provider)
    assert text.startswith("The search failed:")
    assert key not in text
    assert len(text) < 400


async def test_a_refused_key_is_the_services_fault(key: str):
    async with tavily({}, 401) as (provider, _):
        with pytest.raises(SandboxError, match="does not accept the key"):
            await observed(provider)


def test_the_service_names_the_provider(corpus: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(PROVIDER_VARIABLE, raising=False)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert configured_search() is None
    monkeypatch.setenv(PROVIDER_VARIABLE, f"corpus:{corpus}")
    tool = configured_search()
    assert tool is not None and isinstance(tool.provider, CorpusSearch)
    for bad, complaint in (
        ("tavily", KEY_VARIABLE),
        ("google", "no search provider"),
        ("corpus:/no/such", "cannot be"),
    ):
        monkeypatch.setenv(PROVIDER_VARIABLE, bad)
        with pytest.raises(ConfigError, match=complaint):
            configured_search()
    monkeypatch.setenv(PROVIDER_VARIABLE, "tavily")
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    tool = configured_search()
    assert tool is not None and isinstance(tool.provider, TavilySearch)


@pytest.mark.parametrize(
    "line", ["[]", "{}", '{"title": "t"}', '{"title": 1, "text": "x"}', "{", '{"title":"t","text":null}']
)
def test_a_bad_corpus_names_its_line(tmp_path: Path, line: str):
    file = tmp_path / "c.jsonl"
    file.write_text('{"title": "t", "text": "x"}\n' + line)
    with pytest.raises(ConfigError, match=r"c\.jsonl:2: no document"):
        CorpusSearch(file)
