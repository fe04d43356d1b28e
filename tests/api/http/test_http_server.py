"""What a connection may cost: heads, pipelines, silence, number; and what becomes of open requests at the end."""

import asyncio
import json
import resource
import socket
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from api_stack import TOKEN, Served, ask, running, serving
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from prorl_gym.api.app import create_app
from prorl_gym.api.app_context import AppContext
from prorl_gym.api.http import http_server
from prorl_gym.api.http.http_server import HttpServer
from prorl_gym.client import BusyError, Client

pytestmark = pytest.mark.slow

HEAD = f"Host: x\r\nAuthorization: Bearer {TOKEN}\r\n"
ONE_READ = 256 << 10
"""Bytes that asyncio reads at once."""


@pytest.fixture
def bounds() -> dict[str, Any]:
    """Constants of the module to replace; a test parametrizes it."""
    return {}


@pytest_asyncio.fixture
async def served(bounds: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Served]:
    for name, value in bounds.items():
        monkeypatch.setattr(http_server, name, value)
    async with serving() as one:
        yield one


def within(**bounds: Any) -> pytest.MarkDecorator:
    """Run a test on a service with these bounds."""
    return pytest.mark.parametrize("bounds", [bounds], ids=["bounds"])


class Raw:
    """A connection without a client's good manners."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, url: str) -> "Raw":
        host, port = url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    def send(self, text: str) -> None:
        self.writer.write(text.encode())

    async def answer(self) -> tuple[int, str]:
        """The next answer that has a length: status and body."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert "\r\nserver:" not in head
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        return int(head.split()[1]), (await self.reader.readexactly(length)).decode()

    async def rest(self) -> bytes:
        """What comes until the service closes the connection."""
        try:
            return await asyncio.wait_for(self.reader.read(), 10)
        except ConnectionResetError:
            return b""


def statuses(text: bytes) -> list[int]:
    return [int(part.split()[0]) for part in text.decode().split("HTTP/1.1 ")[1:]]


# --- heads and bodies -----------------------------------------------------------------------------------------------


@pytest.mark.default
@within(KEEP_ALIVE_SECONDS=60)
@pytest.mark.parametrize(
    "head",
    [
        "GET /livez HTTP/1.1\r\nX: " + "a" * 40_000,
        "GET /livez HTTP/1.1\r\n" + "a" * 40_000,
        "GET /" + "a" * 40_000,
        "GET /livez HTTP/1.1\r\n" + "X: a\r\n" * 102,
        "GET /livez HTTP/1.1\r\n" + f"X: {'a' * 1000}\r\n" * 40 + "\r\n",
        "POST /v1/rollouts HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX: " + "a" * 600_000,
        "\x16\x03\x01\x02\x00" * 100,
    ],
    ids=["value", "name", "path", "fields", "whole", "trailer", "no http"],
)
async def test_a_head_that_is_too_large_or_no_http_is_refused(
    served: Served, head: str, caplog: pytest.LogCaptureFixture
) -> None:
    raw = await Raw.open(served.url)
    raw.send(head)
    assert statuses(await raw.rest())[-1:] in ([400], [])  # reset before it is read where more was on its way
    assert (await served.ask("GET", "/v1/status"))[0] == 200
    assert caplog.records == []


async def test_heads_of_usual_size_pass(served: Served) -> None:
    raw = await Raw.open(served.url)
    raw.send("GET /v1/status HTTP/1.1\r\n" + HEAD + f"Cookie: {'a' * 20_000}\r\n" + "X: a\r\n" * 90 + "\r\n")
    assert (await raw.answer())[0] == 200


async def test_trailers_are_no_headers(served: Served) -> None:
    raw = await Raw.open(served.url)
    raw.send("POST /v1/ack HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
    raw.send(f"Authorization: Bearer {TOKEN}\r\n\r\n")
    assert (await raw.answer())[0] == 401


@pytest.mark.default
@within(KEEP_ALIVE_SECONDS=0.2)
async def test_a_body_without_the_token_is_not_kept(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    on_body = HttpToolsProtocol.on_body

    def count(protocol: HttpToolsProtocol, body: bytes) -> None:
        on_body(protocol, body)
        kept.append(len(protocol.cycle.body))

    monkeypatch.setattr(HttpToolsProtocol, "on_body", count)
    raw = await Raw.open(served.url)
    raw.send("POST /v1/rollouts HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n" + "a" * 3_000_000)
    assert (await raw.answer())[0] == 401
    assert await raw.rest() == b""
    assert len(kept) > 10 and max(kept) <= ONE_READ


async def test_pipelined_requests_are_bounded(served: Served) -> None:
    raw = await Raw.open(served.url)
    raw.send(f"GET /v1/status HTTP/1.1\r\n{HEAD}\r\n" * 1000)
    assert len(statuses(await raw.rest())) <= http_server.MAX_PIPELINED + 2


async def test_a_few_pipelined_requests_are_answered_in_order(served: Served) -> None:
    raw = await Raw.open(served.url)
    raw.send("".join(f"GET {path} HTTP/1.1\r\n{HEAD}\r\n" for path in ("/livez", "/v1/none", "/v1/status")))
    assert [(await raw.answer())[0] for _ in range(3)] == [200, 404, 200]


async def test_a_connection_serves_many_requests_in_turn(served: Served) -> None:
    raw = await Raw.open(served.url)
    for number in range(50):  # in pieces, with a body in chunks
        body = json.dumps(ask(f"a{number}"))
        head = f"POST /v1/rollouts HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n"
        for part in (head[:30], head[30:], *(f"1\r\n{letter}\r\n" for letter in body), "0\r\n\r\n"):
            raw.send(part)
        assert (await raw.answer())[0] == 200


async def test_a_large_body_passes_whole(served: Served) -> None:
    rows = [ask(f"a{number}", pad="x" * 200_000) for number in range(40)]
    status, answer = await served.ask("POST", "/v1/rollouts", rows)
    assert (status, len(answer["accepted"])) == (200, 40)


# --- time and number ------------------------------------------------------------------------------------------------


@within(KEEP_ALIVE_SECONDS=0.1)
@pytest.mark.parametrize("sent", ["", "GET /livez HTT", "GET /livez HTTP/1.1\r\nX: a\r\n"])
async def test_a_connection_on_which_nothing_arrives_is_closed(served: Served, sent: str) -> None:
    raw, kept = await Raw.open(served.url), await Raw.open(served.url)
    raw.send(sent)
    kept.send("GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await kept.answer())[0] == 200
    kept.send(sent)
    assert (await raw.rest(), await kept.rest()) == (b"", b"")


@within(KEEP_ALIVE_SECONDS=0.1)
async def test_a_token_holder_has_the_time_it_needs(served: Served) -> None:
    await served.ask("POST", "/v1/rollouts", ask("a", run="hang"))
    raw, slow = await Raw.open(served.url), await Raw.open(served.url)
    raw.send(f"GET /v1/rollouts/a?wait=1 HTTP/1.1\r\n{HEAD}\r\n")
    slow.send(f"POST /v1/cancel HTTP/1.1\r\n{HEAD}Content-Length: 19\r\n\r\n")
    assert '"rollout":null' in (await raw.answer())[1]
    slow.send('{"rollouts": ["a"]}')
    assert (await slow.answer())[0] == 200


@pytest.mark.default
@within(MAX_CONNECTIONS=3)
async def test_a_full_port_answers_503_and_closes_further_connections(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    refused, stream, _ = [await Raw.open(served.url) for _ in range(3)]
    refused.send(f"GET /v1/status HTTP/1.1\r\n{HEAD}\r\n")
    assert await refused.answer() == (503, "Service Unavailable")
    assert await refused.rest() == b""
    stream.send(f"GET /v1/stream HTTP/1.1\r\n{HEAD}\r\n")
    assert (await stream.reader.readline()).split()[1] == b"200"
    _, further = [await Raw.open(served.url) for _ in range(2)]
    assert await further.rest() == b""
    assert caplog.records == []


@within(MAX_CONNECTIONS=1)
async def test_the_client_names_the_cause_of_a_full_port(served: Served) -> None:
    async with Client(served.url, token=TOKEN, retry_seconds=0) as client:
        with pytest.raises(BusyError, match="too many connections"):
            await client.status()


@within(MAX_CONNECTIONS=3, KEEP_ALIVE_SECONDS=0.2)
async def test_the_client_calls_a_full_port_again(served: Served) -> None:
    silent = [await Raw.open(served.url) for _ in range(3)]
    async with Client(served.url, token=TOKEN, retry_seconds=10.0, retry_delay=0.01) as client:
        assert (await client.status()).queued == 0
    assert [await raw.rest() for raw in silent] == [b""] * 3


def test_a_port_has_a_quarter_of_the_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        assert HttpServer(FastAPI()).config.limit_concurrency == min(4096, hard) // 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- the end --------------------------------------------------------------------------------------------------------


async def test_requests_that_are_open_at_the_end_are_answered() -> None:
    async with running() as service:
        app, begun = create_app(AppContext(service), TOKEN), asyncio.Event()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            begun.set()
            await app(scope, receive, send)

        server = HttpServer(answer)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            raw, silent = await Raw.open(url), await Raw.open(url)
            raw.send(f"POST /v1/cancel HTTP/1.1\r\n{HEAD}Content-Length: 19\r\n\r\n")
            await asyncio.wait_for(begun.wait(), 10)
            server.should_exit = True
            assert await silent.rest() == b""
            raw.send('{"rollouts": ["a"]}')
            assert (await raw.answer())[0] == 200
            await asyncio.wait_for(serving, 10)
