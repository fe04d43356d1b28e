"""The model API of one rollout, over a real session and a scripted engine."""

import asyncio
import gzip
import json
import socket
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from event_readers import join_chat, join_messages, join_responses, parse
from harness_play import EDIT, Play, said, tool_call

from prorl_gym.errors import EngineError, FailureKind, Limit, LimitReached, TaskError
from prorl_gym.harness import rollout_gateway
from prorl_gym.harness.rollout_gateway import RolloutGateway
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.testing.inference.fake_engine import Reply

TASK = [{"role": "system", "content": "You edit files."}, {"role": "user", "content": "Rename it."}]
FUNCTION = EDIT["function"]
SPOKEN = f"<think>\nHm.\n</think>\n\nI look. {tool_call('edit', old='a', new='b')}"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": TASK, "tools": [EDIT]},
    "/v1/responses": {"model": "m", "input": TASK, "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "model": "m",
        "max_tokens": 4096,
        "messages": TASK,
        "tools": [{"name": "edit", "input_schema": FUNCTION["parameters"]}],
    },
}
JOINS = {"/v1/chat/completions": join_chat, "/v1/responses": join_responses, "/v1/messages": join_messages}
CHAT = "/v1/chat/completions"
EVERY_WIRE = pytest.mark.parametrize("path", BODIES)


class Served:
    """A gateway that serves, and a client of it."""

    def __init__(self, play: Play, gateway: RolloutGateway, url: str, client: aiohttp.ClientSession) -> None:
        self.play, self.gateway, self.url, self.client = play, gateway, url, client

    def post(self, path: str, body: Any, **headers: str):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(f"{self.url}{path}", data=data, headers={"Authorization": self.bearer, **headers})

    @property
    def bearer(self) -> str:
        return f"Bearer {self.gateway.token}"

    async def call(self, path: str, **fields: Any) -> tuple[int, Any]:
        async with self.post(path, BODIES[path] | fields) as answer:
            return answer.status, await answer.json()

    async def stream(self, path: str, **fields: Any) -> bytes:
        async with self.post(path, BODIES[path] | {"stream": True} | fields) as answer:
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            return await answer.read()


@asynccontextmanager
async def served(*script: Any, side_calls: Sequence[str] = (), **settings: Any):
    play = Play(script[0] if callable(script[0]) else list(script), **settings)
    limits = {key: value for key, value in settings.items() if key.startswith("max_t")}
    resolved = resolve_settings(RolloutSettings(**limits))
    gateway = RolloutGateway(play.session, play.codec, resolved, side_calls, program="a-program")
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with aiohttp.ClientSession() as client, gateway.serving(listener):
        yield Served(play, gateway, url, client)


def held() -> Reply:
    return said("I am still at it.", hold=asyncio.Event())


@EVERY_WIRE
async def test_streaming_and_not_give_equal_answers_and_records(path: str):
    async with served(said(SPOKEN)) as plain, served(said(SPOKEN)) as streaming:
        status, answer = await plain.call(path)
        joined = JOINS[path](await streaming.stream(path, stream_options={"include_usage": True}))
        assert status == 200
        volatile = ("id", "created", "created_at")
        assert without_ids(joined, volatile) == without_ids(answer, volatile)
        assert streaming.play.segments == plain.play.segments


def without_ids(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: without_ids(inner, names) for key, inner in value.items() if key not in names}
    return [without_ids(inner, names) for inner in value] if isinstance(value, list) else value


@EVERY_WIRE
async def test_the_rollouts_sampling_and_limits_hold(path: str):
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    async with served(said("x " * 50), said("x " * 50), max_turn_tokens=9) as one:
        await one.call(path, temperature=0.0, top_p=0.1, seed=3, **{limit: 4000})
        await one.call(path, **{limit: 3, "user": "another body"})
        sent = one.play.engine.requests
        assert [(request.temperature, request.top_p, request.max_tokens) for request in sent] == [
            (1.0, 1.0, 9),
            (1.0, 1.0, 3),
        ]


@EVERY_WIRE
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer x"}, {"x-api-key": "x"}, {"Authorization": "é"}])
async def test_only_its_token_opens_it(path: str, headers: dict[str, str]):
    async with served(said("Hi.")) as one, one.client.post(one.url + path, json=BODIES[path], headers=headers) as got:
        assert got.status == 401
        assert one.play.engine.requests == []


async def test_what_programs_ask_beside_calls():
    async with served(said("Hi.")) as one:
        async with one.client.head(one.url) as got:
            assert got.status == 200
        async with one.client.get(f"{one.url}/v1/models", headers={"x-api-key": one.gateway.token}) as got:
            assert [model["id"] for model in (await got.json())["data"]] == ["policy"]
        async with one.client.get(f"{one.url}/v1/nothing", headers={"Authorization": one.bearer}) as got:
            assert got.status == 404
        async with one.post("/v1/messages/count_tokens", BODIES["/v1/messages"] | {"tools": []}) as got:
            counted = (await got.json())["input_tokens"]
        usage = (await one.call("/v1/messages", tools=[{"type": "web_search"}]))[1]["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


@EVERY_WIRE
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"messages": 3, "input": 3}'])
async def test_what_is_no_call_is_the_programs_own_fault(path: str, body: bytes):
    async with served(said("Hi.")) as one, one.post(path, body) as got:
        assert got.status == 400
        assert (await got.json())["error"]["message"]


async def test_a_tool_that_cannot_be_shown_is_refused_with_the_fix():
    async with served(said("Hi.")) as one:
        status, answer = await one.call("/v1/responses", tools=[{"type": "local_shell"}])
        what, fix = answer["error"]["message"].split("\n")
        assert (status, "'local_shell'" in what, fix.startswith("Make the program offer it")) == (400, True, True)


async def test_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_gateway, "BODY_BYTES", 0)
    async with served(said("Hi."), max_tokens=40) as one:
        async with one.post(CHAT, BODIES[CHAT] | {"user": "x" * 2000}) as got:
            assert got.status == 413
        assert (await one.call(CHAT, tools=[]))[0] == 200


@pytest.mark.parametrize("endless", ["X: a\r\n", "a"], ids=["fields", "line"])
async def test_heads_are_bounded(endless: str):
    async with served(said("Hi.")) as one:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(one.url.rpartition(":")[2]))
        with suppress(ConnectionError):  # reset before the answer is read where more was on its way
            writer.write(b"GET / HTTP/1.1\r\nX: " + endless.encode() * 100_000)
            assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.0 400")
        assert (await one.call(CHAT))[0] == 200


@EVERY_WIRE
async def test_messages_that_no_context_holds_are_refused_unread(path: str):
    key = "input" if path == "/v1/responses" else "messages"
    async with served(said("Hi."), max_tokens=400) as one:
        status, answer = await one.call(path, **{key: [{"role": "user", "content": {}}] * 101})
        assert (status, "more than 100" in answer["error"]["message"]) == (400, True)


async def test_a_compressed_body_is_refused_as_it_is():
    async with served(said("Hi.")) as one:
        body = gzip.compress(json.dumps(BODIES[CHAT]).encode())
        async with one.post(CHAT, body, **{"Content-Encoding": "gzip"}) as got:
            assert got.status == 415
        assert one.play.engine.requests == []


async def test_bodies_are_read_one_at_a_time(monkeypatch: pytest.MonkeyPatch):
    reading, most, read = 0, 0, web.Request.read

    async def count(request: web.Request) -> bytes:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        try:
            return await read(request)
        finally:
            reading -= 1

    monkeypatch.setattr(web.Request, "read", count)
    async with served(lambda request: said("Hi.")) as one:
        padding = "x" * 500_000  # more than comes at once
        answers = await asyncio.gather(*(one.call(CHAT, user=f"{number}{padding}") for number in range(4)))
        assert ([status for status, _ in answers], most) == ([200] * 4, 1)


async def test_bytes_of_bodies_whose_calls_run_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_gateway, "MAX_HELD_BYTES", 9000)
    async with served(held(), said("Hi.")) as one:
        first = asyncio.create_task(one.call(CHAT, user="x" * 2000))
        await one.play.engine.call_held.wait()
        assert (await one.call(CHAT, user="x" * 5000))[0] == 503
        assert (await one.call(CHAT, user="small"))[0] == 200
        first.cancel()


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_gateway, "MAX_CONNECTIONS", 2)
    async with served(said("Hi."), said("Hi.")) as one:
        address = ("127.0.0.1", int(one.url.rpartition(":")[2]))
        idle = [await asyncio.open_connection(*address) for _ in range(2)]
        with pytest.raises(aiohttp.ClientConnectionError):
            await one.call(CHAT)
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(10):
            while True:  # the server notices the closed connections in its own time
                with suppress(aiohttp.ClientConnectionError):
                    assert (await one.call(CHAT))[0] == 200
                    break


async def test_calls_at_the_same_time_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_gateway, "MAX_CALLS", 1)
    async with served(held()) as one:
        first = asyncio.create_task(one.call(CHAT))
        await one.play.engine.call_held.wait()
        status, answer = await one.call(CHAT, user="another")
        assert (status, answer["error"]["type"]) == (503, "api_error")
        first.cancel()


@EVERY_WIRE
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_disconnect_stops_the_engines_call_and_keeps_its_tokens(path: str, is_streamed: bool):
    async with served(held()) as one:
        call = asyncio.create_task(one.call(path, stream=is_streamed))
        await one.play.engine.call_held.wait()
        call.cancel()
        await asyncio.wait({call})
        await until(lambda: not one.play.engine.in_flight and sampled_tokens(one.play) > 0)
        assert sampled_tokens(one.play) == len(held().token_ids) // 2


async def until(condition: Callable[[], bool]) -> None:
    """Return when something holds that raises no event here: what a server notices of a connection."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def sampled_tokens(play: Play) -> int:
    return sum(sum(segment.mask) for segment in play.segments)


async def test_an_equal_call_while_one_runs_gets_the_same_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_gateway, "KEEP_ALIVE_SECONDS", 0.01)
    reply = held()
    async with served(reply) as one, one.post(CHAT, BODIES[CHAT] | {"stream": True}) as first:
        seen = await first.content.readany()
        async with one.post(CHAT, BODIES[CHAT] | {"stream": True, "stream_options": {}}) as second:
            again = await second.content.readany()  # it waits for the same call: this engine was asked once
            reply.hold.set()
            assert join_chat(again + await second.read()) == join_chat(seen + await first.read())
        assert len(one.play.engine.requests) == 1


async def test_a_call_goes_on_while_one_request_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_gateway, "KEEP_ALIVE_SECONDS", 0.01)
    reply = held()
    async with served(reply, said("Hi.")) as one:
        first = await one.post(CHAT, BODIES[CHAT] | {"stream": True})
        async with one.post(CHAT, BODIES[CHAT] | {"stream": True}) as second:
            again = await second.content.readany()
            first.close()
            assert (await one.call(CHAT, user="another"))[0] == 200
            reply.hold.set()
            assert join_chat(again + await second.read())["choices"][0]["finish_reason"] == "stop"


async def test_a_delivered_answer_is_not_given_twice():
    async with served(said("One."), said("Two.")) as one:
        texts = [(await one.call(CHAT))[1]["choices"][0]["message"]["content"] for _ in range(2)]
        assert texts == ["One.", "Two."]
        assert one.play.causes == ["first", "retry"]


def engine_error() -> EngineError:
    return EngineError(FailureKind.ENGINE_REFUSED, "engine e: refused.", "Look.")


@EVERY_WIRE
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_failure_of_ours_is_a_503_and_the_program_may_go_on(path: str, is_streamed: bool):
    async with served(engine_error(), said("Hi.")) as one:
        status, answer = await one.call(path, stream=is_streamed)
        assert (status, answer["error"]["message"]) == (503, "engine e: refused.\nLook.")
        assert (await one.call(path))[0] == 200


@EVERY_WIRE
async def test_of_an_answer_that_fails_no_part_is_sent(path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_gateway, "KEEP_ALIVE_SECONDS", 0.01)
    reply = Reply(said("I begin to look.", end=False).token_ids, "abort", hold=asyncio.Event())
    with pytest.raises(EngineError):
        async with served(reply, engine_error()) as one, one.post(path, BODIES[path] | {"stream": True}) as answer:
            seen = await answer.content.readany()
            reply.hold.set()
            *_, (_, last) = parse(stream := seen + await answer.read())
            assert "refused" in json.dumps(last)
            assert b"begin" not in stream


async def test_a_program_that_goes_on_without_an_answer_is_no_measurement():
    with pytest.raises(EngineError, match="refused"):
        async with served(said("Hi."), engine_error(), said("A title.")) as one:
            await one.call(CHAT)
            assert (await one.call(CHAT, user="the task"))[0] == 503
            assert (await one.call(CHAT, user="a title"))[0] == 200


async def test_a_call_that_is_answered_when_it_is_made_again_is_a_measurement():
    async with served(engine_error(), said("A title."), said("Hi.")) as one:
        assert (await one.call(CHAT))[0] == 503
        assert (await one.call(CHAT, user="a title"))[0] == 200
        assert (await one.call(CHAT))[0] == 200


@pytest.mark.parametrize("hangs", [True, False])
@pytest.mark.parametrize("is_made_again", [True, False])
async def test_a_program_that_gives_up_a_call_is_a_measurement_unless_the_engine_hung(hangs: bool, is_made_again: bool):
    expected = pytest.raises(EngineError, match="no answer") if hangs and not is_made_again else nullcontext()
    with expected:
        script = [said("Hi."), *([] if hangs else [held()]), said("Hi.")]
        async with served(*script) as one:
            await one.call(CHAT, user="first")
            one.play.engine.is_hanging = hangs
            call = asyncio.create_task(one.call(CHAT))
            await until(lambda: len(one.play.engine.requests) == 2)
            call.cancel()
            await asyncio.wait({call})
            await until(lambda: one.play.pool.find_call(one.play.engine.requests[1].request_id) is None)
            if is_made_again:
                one.play.engine.is_hanging = False
                assert (await one.call(CHAT))[0] == 200


async def test_failures_in_a_row_stop_the_rollout():
    with pytest.raises(EngineError, match="refused"):
        async with served(lambda request: engine_error()) as one:
            for _ in range(rollout_gateway.MAX_FAILURES):
                assert (await one.call(CHAT))[0] == 503
            reason = await one.gateway.wait_stopped()
            assert isinstance(reason, EngineError)
            assert (await one.call(CHAT))[0] == 503
            assert len(one.play.engine.requests) == rollout_gateway.MAX_FAILURES


async def test_a_limit_stops_the_rollout():
    async with served(said("Hi."), max_turns=1) as one:
        await one.call(CHAT)
        messages, before = one.gateway.conversation()
        assert [message.content for message in messages[before:]] == ["Hi."]
        assert (await one.call(CHAT, messages=[*TASK, TASK[-1]]))[0] == 503
        reason = await one.gateway.wait_stopped()
        assert isinstance(reason, LimitReached)
        assert reason.limit is Limit.TURNS


async def test_a_first_prompt_that_is_too_long_stops_the_rollout():
    async with served(said("Hi."), max_tokens=8) as one:
        assert (await one.call(CHAT))[0] == 503
        assert isinstance(await one.gateway.wait_stopped(), TaskError)


async def test_calls_end_with_the_block():
    async with served(held()) as one:
        call = asyncio.create_task(one.call(CHAT))
        await one.play.engine.call_held.wait()
    with suppress(aiohttp.ClientError):
        assert (await call)[0] == 503
    assert one.play.engine.in_flight == 0


@EVERY_WIRE
async def test_a_quiet_stream_is_kept_alive(path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_gateway, "KEEP_ALIVE_SECONDS", 0.01)
    reply = held()
    async with served(reply) as one, one.post(path, BODIES[path] | {"stream": True}) as answer:
        seen = b""
        while seen.count(b"data: ") < 5:
            seen += await answer.content.readany()
        assert b"still" not in seen
        reply.hold.set()
        joined = JOINS[path](seen + await answer.read())
        assert "still" in json.dumps(joined)


@pytest.mark.parametrize("place", ["task", "policy", "later note"])
async def test_words_that_the_program_did_not_open_a_call_with_decide_nothing(place: str):
    words = "You are a title generator."
    said_first, task = words if place == "policy" else "Main.", words if place == "task" else "Rename it."
    opening = [{"role": "system", "content": "You edit."}, {"role": "user", "content": task}]
    later = {"role": "system" if place == "later note" else "user", "content": words if place == "later note" else "on"}
    async with served(said(said_first), said("Two."), side_calls=(words,)) as one:
        await one.call(CHAT, messages=opening, tools=[])
        shown = {"role": "assistant", "content": said_first}
        await one.call(CHAT, messages=[*opening, shown, later], tools=[])
        assert [(segment.cause, segment.trained) for segment in one.play.segments] == [("first", True)]


async def test_side_calls_and_sub_agents_are_told_apart():
    title = [{"role": "system", "content": "You are a title generator."}, TASK[1]]
    search = [{"role": "user", "content": "Search for it."}]
    async with served(said("A title."), said("Main."), said("Sub."), side_calls=("you are a TITLE",)) as one:
        await one.call(CHAT, messages=title, tools=[])
        await one.call(CHAT)
        async with one.post(CHAT, BODIES[CHAT] | {"messages": search}, **{"x-claude-code-agent-id": "a"}) as got:
            assert got.status == 200
        assert [(segment.cause, segment.trained) for segment in one.play.segments] == [
            ("side_call", False),
            ("first", True),
            ("sub_agent", True),
        ]
