"""The client when things go wrong: busy services, restarts, broken lines, hostile answers, and the end of patience."""

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from sample_records import BROKEN, member, record

from prorl_gym.api.http.http_server import KEEP_ALIVE_SECONDS
from prorl_gym.api.service_process import bind_socket
from prorl_gym.client import AcceptedRollout, BusyError, Client, ServiceError
from prorl_gym.client.async_client import encode_batches
from prorl_gym.client.record_stream import split_lines
from prorl_gym.client.transport import RetryableError, RetryBudget
from prorl_gym.client.wire_models import RolloutSummary
from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.errors import ConfigError, NotFoundError, TaskError
from prorl_gym.records import RolloutRequest

TOKEN = "test-token-of-no-worth"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def service(handler: Handler, port: int = 0) -> AsyncIterator[str]:
    """Serve every route with one handler."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    with bind_socket("127.0.0.1", port) as listener:
        await web.SockSite(runner, listener).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            await runner.cleanup()


def always(**fields: Any) -> Handler:
    """Answer every request alike; the fields are those of ``web.Response``."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(**fields)

    return handler


def fails_with(status: int, **headers: str) -> Handler:
    return always(text=json.dumps({"error": {"what": "No.", "fix": "Wait."}}), status=status, headers=headers)


def line(cursor: int, **more: Any) -> bytes:
    fields = {"cursor": cursor, "rollout": record(f"r{cursor}").model_dump(mode="json"), **more}
    return json.dumps(fields).encode() + b"\n"


# --- patience -------------------------------------------------------------------------------------------------------


async def test_what_the_service_asks_to_wait_is_waited() -> None:
    calls: list[float] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        calls.append(time.monotonic())
        if len(calls) == 1:
            return await fails_with(429, **{"Retry-After": "1"})(request)
        return web.json_response({"released": 3})

    async with service(handler) as url, Client(url, token=TOKEN, retry_delay=0.001) as client:
        assert await client.acknowledge("run", 7) == 3
    assert calls[1] - calls[0] >= 0.99


async def test_no_wait_is_longer_than_the_patience() -> None:
    began = time.monotonic()
    async with service(fails_with(429, **{"Retry-After": "86400"})) as url:
        async with Client(url, token=TOKEN, retry_seconds=0.1) as client:
            with pytest.raises(BusyError, match=r"No\.\nWait\."):
                await client.status()
    assert time.monotonic() - began < 5


async def test_an_idle_connection_is_not_used_when_the_service_may_be_closing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callers: set[Any] = set()

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        callers.add(request.transport.get_extra_info("peername"))
        return web.json_response({"cancelled": []})

    async with service(answer) as url, Client(url, token=TOKEN, retry_seconds=0.0) as client:
        for later in (0.0, KEEP_ALIVE_SECONDS - 1.0):
            now = time.monotonic() + later
            monkeypatch.setattr("aiohttp.connector.monotonic", lambda now=now: now)
            await client.cancel(["a"])
    assert len(callers) == 2


async def test_pauses_grow_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("prorl_gym.client.transport.asyncio.sleep", sleep)
    patience = RetryBudget(1000.0, 0.1)
    for _ in range(12):
        await patience.sleep_before_retry(RetryableError(ServiceError("gone")))
    assert all(0.05 * 2**n <= pause <= 0.1 * 2**n for n, pause in enumerate(slept[:5]))
    assert all(2.5 <= pause <= 5 for pause in slept[6:])
    assert len(set(slept)) == 12


async def test_a_weight_update_survives_lost_answers() -> None:
    calls: list[str] = []
    answers = {
        "pause": {"pool": "policy", "paused": True},
        "policy": {"version": 4, "serving": ["policy-0"], "quarantined": {}, "unverified": [], "draining": []},
        "resume": {"pool": "policy", "paused": False},
    }

    async def handler(request: web.Request) -> web.StreamResponse:
        name = request.path.rpartition("/")[2]
        calls.append(name)
        if calls.count(name) == 1:  # it was done, and the connection broke before the answer
            assert request.transport is not None
            request.transport.abort()
        return web.json_response(answers[name])

    async with service(handler) as url, Client(url, token=TOKEN, retry_delay=0.001) as client:
        async with client.weight_update(4) as update:
            calls.append("load")
    assert calls == ["pause", "pause", "load", "policy", "policy", "resume", "resume"]
    assert update.result is not None and update.result.serving == ("policy-0",)


async def test_a_service_that_is_gone_does_not_hide_why_loading_failed(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as running:
        url = await running.enter_async_context(service(always(text='{"pool": "policy", "paused": true}')))
        async with Client(url, token=TOKEN, retry_seconds=0.05, retry_delay=0.001) as client:
            with pytest.raises(RuntimeError, match="out of memory"):
                async with client.weight_update(4):
                    await running.aclose()
                    raise RuntimeError("out of memory")
    assert "pool policy stays paused until its pause expires" in caplog.text


@pytest.mark.parametrize("status", [400, 403, 409, 410, 413, 422, 500])
async def test_what_will_not_help_is_not_repeated(status: int) -> None:
    calls = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        return await fails_with(status)(request)

    async with service(handler) as url, Client(url, token=TOKEN) as client:
        with pytest.raises(Exception, match="No") as caught:
            await client.status()
    assert calls == 1
    assert type(caught.value).__module__.startswith("prorl_gym.")


# --- restarts -------------------------------------------------------------------------------------------------------


async def test_a_result_is_waited_for_over_a_restart() -> None:
    asked = asyncio.Event()

    async def before(request: web.Request) -> web.StreamResponse:
        asked.set()
        await asyncio.sleep(60)
        return web.Response()

    after = always(text=json.dumps({"rollout": record("a").model_dump(mode="json")}))
    async with service(before) as url:
        port = int(url.rpartition(":")[2])
        client = Client(url, token=TOKEN, retry_delay=0.01, retry_seconds=30)
        waiting = asyncio.create_task(client.result("a"))
        await asyncio.wait_for(asked.wait(), 10)
    async with service(after, port):
        assert (await asyncio.wait_for(waiting, 10)).rollout_id == "a"
        await client.close()


async def test_a_stream_that_ends_is_taken_up_again_until_patience_ends() -> None:
    asked: list[int] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(int(request.query["cursor"]))
        return web.Response(body=line(len(asked)) if len(asked) < 4 else b"")

    async with service(handler) as url, Client(url, token=TOKEN, retry_delay=0.001, retry_seconds=0.05) as client:
        seen: list[int] = []
        with pytest.raises(ServiceError, match="has ended the stream"):
            async for one in client.stream():
                seen.append(one.cursor)
    assert seen == [1, 2, 3]
    assert asked[:5] == [0, 1, 2, 3, 3]


async def test_a_broken_stream_is_resumed_after_the_last_whole_line() -> None:
    asked: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(request.query["cursor"])
        response = web.StreamResponse()
        await response.prepare(request)
        first = int(request.query["cursor"]) + 1
        await response.write(b"\n" + line(first, padding="x" * 300_000) + b"\n")
        await response.write(line(first + 1, padding="x" * 1000)[:1000])  # cut off in the middle
        assert request.transport is not None
        request.transport.close()
        return response

    async with service(handler) as url, Client(url, token=TOKEN, retry_delay=0.001) as client:
        stream = client.stream("default")
        seen = [await anext(stream) for _ in range(3)]
        await stream.aclose()
    assert [(one.cursor, one.rollout.rollout_id) for one in seen] == [(1, "r1"), (2, "r2"), (3, "r3")]
    assert asked == ["0", "1", "2"]


# --- hostile and broken answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (403, "<html>nginx</html>", r"^/v1/status: the service answered 403\.\nIs that address a prorl-gym service\?$"),
        (302, "elsewhere", "answered 302"),
        *((200, body, r"not answer in JSON\.\n.*a prorl-gym service") for body in ("<html>", "[1]", "[" * 100_000)),
    ],
    ids=["a proxy's refusal", "a redirect", "a page", "a list", "deep nesting"],
)
async def test_another_kind_of_server_is_recognised(status: int, body: str, message: str) -> None:
    elsewhere = {"Location": "http://192.0.2.1/"}  # which is not followed
    answer = always(text=body, status=status, headers=elsewhere)
    async with service(answer) as url, Client(url, token=TOKEN) as client:
        with pytest.raises(ServiceError, match=message):
            await client.status()


@pytest.mark.parametrize(
    "url", ["http://", "ftp://127.0.0.1", "no address", "http://127.0.0.1:99999", "//x", "http://x?a", "http://[::1"]
)
def test_what_is_no_address_is_said_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a service"):
        Client(url, token=TOKEN)


async def test_a_host_that_cannot_be_is_an_error_of_ours() -> None:
    async with Client("http://a b:80", token=TOKEN, retry_seconds=0) as client:
        with pytest.raises(ServiceError):
            await client.status()


@pytest.mark.parametrize("name", ["", "..", "a/b", "a?b", "ä", "x" * 129, "-a"])
async def test_no_id_becomes_another_address(name: str) -> None:
    async with Client("http://127.0.0.1:1", token=TOKEN) as client:
        for call in (client.poll_result(name), client.request(name), client.page(name), client.groups(name)):
            with pytest.raises(NotFoundError, match="is no id"):
                await call


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"cursor": 1}\n', r"rollout: Field required"),
        (b"hello\n", "not answer in JSON"),
    ],
)
async def test_a_line_that_cannot_be_read_is_an_error_of_ours(body: bytes, message: str) -> None:
    async with service(always(body=body)) as url, Client(url, token=TOKEN) as client:
        with pytest.raises(ServiceError, match=message):
            await anext(client.stream())


async def test_a_newer_record_asks_for_an_upgrade_and_later_fields_do_not() -> None:
    newer = record("r1").model_dump(mode="json")

    async def handler(request: web.Request) -> web.StreamResponse:
        rollout, cursor = ({"later": 1}, 1) if request.query["cursor"] == "0" else ({"schema_version": 99}, 2)
        return web.Response(body=line(cursor, rollout=newer | rollout, also=2))

    async with service(handler) as url, Client(url, token=TOKEN, retry_delay=0.001) as client:
        stream = client.stream()
        assert (await anext(stream)).rollout.rollout_id == "r1"
        with pytest.raises(ServiceError, match=r"newer than 1(.|\n)*Upgrade prorl-gym here"):
            await anext(stream)


async def test_later_fields_of_other_answers_are_ignored() -> None:
    demand = {"groups": 4, "later": 1, "redundant": {"run": "kill", "later": 1}}
    groups = {"run_id": "run", "demand": demand, "states": {"open": 2, "a later state": 1}, "later": 1}
    summary = dict.fromkeys((field.name for field in dataclasses.fields(RolloutSummary)), None)
    summary |= {"cursor": 7, "group_size": 1, "replica": 0, "turns": 0, "sampled_tokens": 0, "later": 1}
    summary |= dict.fromkeys(("rollout_id", "run_id", "environment", "status", "detail", "row_id", "why"), "")
    summary |= dict.fromkeys(("accepted_at", "finished_at"), 0.0) | dict.fromkeys(
        ("evaluation", "masked", "released"), False
    )

    async def handler(request: web.Request) -> web.StreamResponse:
        answers = {"demand": demand, "groups": groups, "rollouts": {"rollouts": [summary], "before": None}}
        return web.json_response(answers[request.path.rpartition("/")[2]])

    async with service(handler) as url, Client(url, token=TOKEN) as client:
        wanted = Demand(groups=4, redundant=RedundantHandling(run="kill"))
        assert await client.demand("run") == (await client.groups("run")).demand == wanted
        assert (await client.groups("run")).states == {"open": 2, "a later state": 1}
        assert [one.cursor for one in (await client.rollouts()).rollouts] == [7]


async def test_an_endless_line_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.client.record_stream.MAX_RESPONSE_BYTES", 1 << 20)

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(64):
            await response.write(b"x" * (1 << 16))
        return response

    async with service(handler) as url, Client(url, token=TOKEN) as client:
        with pytest.raises(ServiceError, match="A line of the stream is larger"):
            await anext(client.stream())


class Chunks:
    """Stands for the content of a response, in packets as cut here."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks

    async def iter_any(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
async def test_lines_are_the_same_however_they_were_cut(size: int) -> None:
    text = b"one\n\ntwo\nthree three\n\nlost"
    content: Any = Chunks(*(text[place : place + size] for place in range(0, len(text), size)))
    assert [one async for one in split_lines(content)] == [b"one", b"", b"two", b"three three", b""]


# --- batches --------------------------------------------------------------------------------------------------------


def ask(name: str, **task: Any) -> RolloutRequest:
    return RolloutRequest(rollout_id=name, environment="scripted", task=task)


def test_batches_are_bounded_in_number_and_in_bytes() -> None:
    requests = [ask(f"r{n}", text="x" * 1000) for n in range(10)]
    assert [len(json.loads(body)) for body in encode_batches(requests, max_rollouts=4)] == [4, 4, 2]
    by_size = list(encode_batches(requests, max_bytes=5000))
    assert all(len(body) <= 5000 + 20 for body in by_size)
    assert [one["rollout_id"] for body in by_size for one in json.loads(body)] == [f"r{n}" for n in range(10)]
    assert [len(json.loads(body)) for body in encode_batches(requests, max_bytes=10)] == [1] * 10
    assert list(encode_batches([])) == []


def test_every_text_that_python_has_can_be_sent() -> None:
    (body,) = encode_batches([ask("a", text="half a pair: \ud800, and \U0001f600")])
    assert RolloutRequest.model_validate(json.loads(body)[0]).task["text"] == "half a pair: \ud800, and \U0001f600"


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), {1: {2: {None}}}])
def test_what_is_not_json_is_named_before_it_is_sent(value: Any) -> None:
    if isinstance(value, dict):
        value = [value, math.nan]
    with pytest.raises(TaskError, match="rollout a: its task is not JSON"):
        list(encode_batches([ask("a", value=value)]))


async def test_a_broken_batch_alone_is_sent_again_with_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "prorl_gym.client.async_client.encode_batches", lambda requests: encode_batches(requests, max_rollouts=2)
    )
    got: list[list[str]] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        names = [one["rollout_id"] for one in await request.json()]
        got.append(names)
        if len(got) == 2:
            assert request.transport is not None
            request.transport.close()
        if len(got) == 3:
            return await fails_with(503)(request)
        return web.json_response({"accepted": [{"rollout_id": name, "duplicate": False} for name in names]})

    async with service(handler) as url, Client(url, token=TOKEN, retry_delay=0.001) as client:
        accepted = await client.submit([ask(name) for name in "abc"])
    assert accepted == [AcceptedRollout(name, False) for name in "abc"]
    assert got == [["a", "b"], ["c"], ["c"], ["c"]]


# --- acknowledgement ------------------------------------------------------------------------------------------------


async def acknowledgements(count: int, acknowledge: bool, stop: int | None = None) -> list[int]:
    got: list[int] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/ack":
            got.append((await request.json())["cursor"])
            return web.json_response({"released": 1})
        return web.Response(body=b"".join(line(cursor) for cursor in range(1, count + 1)))

    async with service(handler) as url, Client(url, token=TOKEN) as client:
        stream = client.stream("run", follow=False, acknowledge=acknowledge)
        async for one in stream:
            if one.cursor == stop:
                break
        await stream.aclose()
    return got


async def test_records_are_acknowledged_in_lots_once_the_next_is_asked_for() -> None:
    assert await acknowledgements(130, acknowledge=True) == [64, 128, 130]
    assert await acknowledgements(130, acknowledge=False) == []
    assert await acknowledgements(130, acknowledge=True, stop=64) == []
    assert await acknowledgements(130, acknowledge=True, stop=65) == [64]


# --- waits that are cut off -----------------------------------------------------------------------------------------


async def test_a_wait_that_was_cut_off_loses_nothing() -> None:
    asked: list[str] = []
    more = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(request.query["cursor"])
        response = web.StreamResponse()
        await response.prepare(request)
        if request.query["cursor"] == "0":
            await response.write(line(1))
        await more.wait()
        await response.write(line(2))
        return response

    async with service(handler) as url, Client(url, token=TOKEN, retry_seconds=0) as client:
        for stream in (client.stream("run"), client.stream_groups("run")):
            more.clear()
            asked.clear()
            assert (await anext(stream)).cursor == 1
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.05)
            more.set()
            assert (await anext(stream)).cursor == 2
            assert asked == ["0", "1"]
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)


async def test_a_stream_that_raised_may_be_asked_again() -> None:
    well = False

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=line(1)) if well else await fails_with(503)(request)

    async with service(handler) as url, Client(url, token=TOKEN, retry_seconds=0) as client:
        stream = client.stream("run", follow=False)
        with pytest.raises(BusyError):
            await anext(stream)
        well = True
        assert [one.cursor async for one in stream] == [1]


async def test_a_group_is_not_lost_when_its_demand_cannot_be_asked_for() -> None:
    well = False

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/stream":
            lost = member("g", 0, 1, BROKEN).model_dump(mode="json")
            return web.Response(text=json.dumps({"cursor": 1, "rollout": lost}) + "\n")
        return await fails_with(404 if well else 503)(request)

    async with service(handler) as url, Client(url, token=TOKEN, retry_seconds=0) as client:
        stream = client.stream_groups("run", follow=False)
        with pytest.raises(BusyError):
            await anext(stream)
        well = True
        assert (await anext(stream)).group_id == "g"
