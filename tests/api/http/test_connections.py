"""What a caller without the token can make a connection cost."""

import asyncio
import json
import os
import re
import resource
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import pytest_asyncio
from api_stack import TOKEN, Served, ask, serving

from prorl_gym.api.http import http_server
from prorl_gym.api.http.connection_limits import ConnectionLimits, peer_key

pytestmark = pytest.mark.slow

HEAD = f"Host: x\r\nAuthorization: Bearer {TOKEN}\r\n"


@pytest.fixture
def limits() -> ConnectionLimits:
    """A test parametrizes it."""
    return ConnectionLimits()


@pytest_asyncio.fixture
async def served(limits: ConnectionLimits) -> AsyncGenerator[Served]:
    async with serving(limits=limits) as one:
        yield one


def within(**bounds: Any) -> pytest.MarkDecorator:
    """Run a test on a service with these ``ConnectionLimits``."""
    return pytest.mark.parametrize("limits", [ConnectionLimits(**bounds)], ids=["limits"])


class Raw:
    """A connection without a client's good manners."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, served: Served, source: str = "127.0.0.1") -> "Raw":
        host, port = served.url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port), local_addr=(source, 0)))

    def send(self, text: str) -> None:
        self.writer.write(text.encode())

    async def answer(self) -> tuple[int, str]:
        """The next answer that has a length: status and body."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
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


@pytest.mark.default
@pytest.mark.parametrize(
    "head",
    [
        "GET /livez HTTP/1.1\r\nX: " + "a" * 40_000,
        "GET /livez HTTP/1.1\r\n" + "a" * 40_000,
        "GET /" + "a" * 40_000,
        "GET /livez HTTP/1.1\r\n" + "X: a\r\n" * 200,
        "GET /livez HTTP/1.1\r\n" + f"X: {'a' * 1000}\r\n" * 40 + "\r\n",
        "POST /v1/rollouts HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HEAD + "\r\n1\r\n{\r\n0\r\nX: " + "a" * 80_000,
    ],
    ids=["value", "name", "path", "fields", "whole", "trailer"],
)
async def test_an_endless_head_is_refused(served: Served, head: str) -> None:
    raw = await Raw.open(served)
    raw.send(head)
    assert statuses(await raw.rest()) in ([431], [])  # reset before it is read where more was on its way
    assert (await served.ask("GET", "/v1/status"))[0] == 200


async def test_a_head_that_is_too_large_is_answered_with_what_helps(served: Served) -> None:
    raw = await Raw.open(served)
    raw.send("GET /livez HTTP/1.1\r\n" + "X: a\r\n" * 101 + "\r\n")
    status, body = await raw.answer()
    assert (status, json.loads(body)["error"]) == (
        431,
        {"what": "The head of the request is too large.", "fix": "Send fewer and shorter header fields."},
    )


async def test_heads_of_usual_size_pass(served: Served) -> None:
    raw = await Raw.open(served)
    raw.send("GET /v1/status HTTP/1.1\r\n" + HEAD + f"Cookie: {'a' * 20_000}\r\n" + "X: a\r\n" * 90 + "\r\n")
    assert (await raw.answer())[0] == 200


async def test_trailers_are_no_headers(served: Served) -> None:
    raw = await Raw.open(served)
    raw.send("POST /v1/ack HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
    raw.send(f"Authorization: Bearer {TOKEN}\r\n\r\n")
    assert (await raw.answer())[0] == 401


@within(request_seconds=0.1)
@pytest.mark.parametrize("sent", ["", "GET /livez HTT", "GET /livez HTTP/1.1\r\nX: a\r\n"])
async def test_a_request_that_does_not_come_is_closed(served: Served, sent: str) -> None:
    raw = await Raw.open(served)
    raw.send(sent)
    assert await raw.rest() == b""


@within(request_seconds=0.3)
async def test_a_request_that_drips_is_closed(served: Served) -> None:
    raw = await Raw.open(served)
    raw.send("GET /livez HTTP/1.1\r\n\r\n")
    assert (await raw.answer())[0] == 200
    raw.send("GET /livez HTTP/1.1\r\nX: ")

    async def drip() -> None:
        while True:
            raw.send("a")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    assert await raw.rest() == b""
    dripping.cancel()


@pytest.mark.default
@within(request_seconds=0.5)
async def test_a_body_without_the_token_is_not_kept_and_ends(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    on_body = http_server.HttpToolsProtocol.on_body

    def keep(protocol: http_server.HttpToolsProtocol, body: bytes) -> None:
        kept.append(len(body))
        on_body(protocol, body)

    monkeypatch.setattr(http_server.HttpToolsProtocol, "on_body", keep)
    raw = await Raw.open(served)
    raw.send("POST /v1/rollouts HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n" + "a" * 300_000)
    assert (await raw.answer())[0] == 401
    assert await raw.rest() == b""
    assert kept == []


@pytest.mark.parametrize(
    ("fields", "answers"),
    [("Host: x\r\n", [401]), (HEAD, [200] * (http_server.MAX_PIPELINED + 1))],
    ids=["without", "with"],
)
async def test_pipelined_requests_are_bounded(served: Served, fields: str, answers: list[int]) -> None:
    raw = await Raw.open(served)
    raw.send(f"GET /v1/status HTTP/1.1\r\n{fields}\r\n" * 1000)
    assert statuses(await raw.rest()) in (answers, [])  # reset before it is read where more was on its way


async def test_a_few_pipelined_requests_are_answered_in_order(served: Served) -> None:
    raw = await Raw.open(served)
    raw.send("".join(f"GET {path} HTTP/1.1\r\n{HEAD}\r\n" for path in ("/livez", "/v1/none", "/v1/status")))
    assert [(await raw.answer())[0] for _ in range(3)] == [200, 404, 200]


async def test_no_other_protocol_is_spoken(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    raw = await Raw.open(served)
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\nSec-WebSocket-Version: 13\r\n"
    raw.send("GET /v1/status HTTP/1.1\r\nHost: x\r\n" + upgrade + "\r\n" + "\x81\x05hello" * 100)
    assert statuses(await raw.rest()) == [401]
    assert caplog.records == []


async def test_a_connection_serves_many_requests_in_turn(served: Served) -> None:
    raw = await Raw.open(served)
    for _ in range(50):
        raw.send(f"GET /v1/status HTTP/1.1\r\n{HEAD}\r\n")
        assert (await raw.answer())[0] == 200
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


async def test_what_is_no_http_is_answered_once(served: Served) -> None:
    raw = await Raw.open(served)
    raw.send("\x16\x03\x01\x02\x00" * 100)
    assert statuses(await raw.rest()) == [400]


async def test_an_answer_under_way_is_finished_before_a_connection_is_closed_for_nonsense(served: Served) -> None:
    await served.ask("POST", "/v1/rollouts", ask("a", run="hang"))
    raw = await Raw.open(served)
    raw.send(f"GET /v1/rollouts/a?wait=30 HTTP/1.1\r\n{HEAD}\r\nnonsense\r\n\r\n")
    await served.ask("POST", "/v1/cancel", {"rollouts": ["a"]})
    assert statuses(await raw.rest()) == [200]


@within(request_seconds=0.1)
async def test_a_token_holder_has_the_time_it_needs(served: Served) -> None:
    await served.ask("POST", "/v1/rollouts", ask("a", run="hang"))
    raw, slow = await Raw.open(served), await Raw.open(served)
    raw.send(f"GET /v1/rollouts/a?wait=1 HTTP/1.1\r\n{HEAD}\r\n")
    slow.send(f"POST /v1/cancel HTTP/1.1\r\n{HEAD}Content-Length: 19\r\n\r\n")
    assert '"rollout":null' in (await raw.answer())[1]
    slow.send('{"rollouts": ["a"]}')
    assert (await slow.answer())[0] == 200


@pytest.mark.parametrize(
    ("limits", "sent"),
    [(ConnectionLimits(silent=8), ""), (ConnectionLimits(unauthenticated=8), "GET /livez HTTP/1.1\r\n")],
    ids=["silent", "unauthenticated"],
)
async def test_a_flood_closes_its_own_connections(served: Served, caplog: pytest.LogCaptureFixture, sent: str) -> None:
    stream, idle = await Raw.open(served), await Raw.open(served)
    stream.send(f"GET /v1/stream HTTP/1.1\r\n{HEAD}\r\n")
    idle.send(f"GET /v1/status HTTP/1.1\r\n{HEAD}\r\n")
    assert (await idle.answer())[0] == 200
    await stream.reader.readuntil(b"\r\n\r\n")
    flood = [await Raw.open(served) for _ in range(100)]
    for raw in flood:
        raw.send(sent)
    assert [await raw.rest() for raw in flood[:92]] == [b""] * 92
    assert (await served.ask("POST", "/v1/rollouts", ask("a")))[0] == 200
    assert b'"rollout_id":"a"' in await asyncio.wait_for(stream.reader.readuntil(b'"a"'), 10)
    idle.send(f"GET /v1/status HTTP/1.1\r\n{HEAD}\r\n")
    assert (await idle.answer())[0] == 200
    assert len([record for record in caplog.records if "Too many" in record.getMessage()]) == 1


@within(silent=8)
async def test_a_flood_from_one_address_closes_none_of_another(served: Served) -> None:
    first = await Raw.open(served, "127.0.0.2")
    flood = [await Raw.open(served) for _ in range(50)]
    assert await flood[0].rest() == b""
    first.send("GET /livez HTTP/1.1\r\n\r\n")
    assert (await first.answer())[0] == 200


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
    ],
)
def test_an_ipv6_peer_is_a_network(one: str, other: str, same: bool) -> None:
    assert (peer_key(one) == peer_key(other)) is same


async def test_connections_of_token_holders_leave_files_to_the_rest() -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    async with serving(limits=ConnectionLimits(authenticated_share=files // 4)) as served:
        streams: list[Raw] = []
        for status in (200, 200, 200, 200, 503):
            streams.append(await Raw.open(served))
            streams[-1].send(f"GET /v1/stream HTTP/1.1\r\n{HEAD}\r\n")
            assert int((await streams[-1].reader.readline()).split()[1]) == status
        answer = await streams[-1].rest()
        assert b"retry-after: 5" in answer and b"ulimit -n" in answer


@contextmanager
def no_files_left() -> Generator[None]:
    """Let the process open no further file."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
    held: list[int] = []
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@within(warning_interval_seconds=0.1, accept_retry_seconds=0.01)
async def test_a_process_without_descriptors_accepts_later_and_counts_its_warnings(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    reported = asyncio.Event()
    caplog.handler.addFilter(lambda record: "more in" not in record.getMessage() or not reported.set())
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as raw:
        with no_files_left():
            await asyncio.wait_for(reported.wait(), 10)
        raw.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
        assert (await asyncio.to_thread(raw.recv, 20)).startswith(b"HTTP/1.1 200")
    said = [record.getMessage() for record in caplog.records][:2]
    assert said[0] == "A connection cannot be accepted (Too many open files)."
    assert re.fullmatch(re.escape(said[0]) + r" \(\d more in 0.1 s\)", said[1])
