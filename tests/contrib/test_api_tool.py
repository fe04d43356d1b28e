"""Tools that ask an API: typed arguments, a key that shows nowhere, and one origin that is talked to."""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal
from urllib.parse import quote

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError

from prorl_gym.agents.tool_arguments import BadArguments, parse_arguments
from prorl_gym.config import load_config
from prorl_gym.contrib.api import ApiClient, ApiConfig, ApiOutage, ApiRefused, ApiTool, schema_of
from prorl_gym.contrib.tool_text import Secret, printable_text, shorten
from prorl_gym.errors import Cause, ConfigError, FailureKind, SandboxError
from prorl_gym.logs import JsonFormatter

KEY = 'k3y+with/odd=signs&"quotes"'


class Weather(BaseModel):
    """For people."""

    city: str = Field(max_length=20, description="Name of a city.")
    unit: Literal["C", "F"] = "C"
    title: int | None = None


class Server:
    """An API that answers as a test says, and remembers what it was asked."""

    def __init__(self) -> None:
        self.seen: list[web.Request] = []
        self.answers: list[Callable[[web.Request], Awaitable[web.StreamResponse]]] = []
        self.url = ""

    def say(self, text: str = "fine", status: int = 200, **more: Any) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            return web.Response(text=text, status=status, **more)

        self.answers.append(answer)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.seen.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    running = TestServer(app)
    await running.start_server(shutdown_timeout=0)
    server.url = str(running.make_url("")).rstrip("/")
    yield server
    await running.close()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEATHER_KEY", KEY)
    monkeypatch.setattr("prorl_gym.contrib.api.RETRY_SECONDS", 0.0)


async def forecast(arguments: Weather, api: ApiClient) -> str:
    return (await api.get("/forecast", {"city": arguments.city, "unit": arguments.unit})).text()


def tool(
    server: Server, answer: Callable[[Weather, ApiClient], Awaitable[str]] = forecast, **config: Any
) -> ApiTool[Weather]:
    config = {"url": f"{server.url}/v1", "secret": "WEATHER_KEY", **config}
    return ApiTool("weather", "Tell the weather.", Weather, answer, ApiConfig(**config))


async def said(tool: ApiTool[Weather], **arguments: Any) -> str:
    return (await tool({"city": "Bonn", **arguments})).text


async def test_it_sends_the_key_and_returns_the_answer(server: Server) -> None:
    server.say("sunny")
    assert await said(tool(server)) == "sunny"
    assert server.seen[0].path_qs == "/v1/forecast?city=Bonn&unit=C"
    assert server.seen[0].headers["Authorization"] == f"Bearer {KEY}"


async def test_the_key_may_stand_in_the_query_and_json_be_sent(server: Server) -> None:
    async def posts(arguments: Weather, api: ApiClient) -> str:
        return str((await api.post("search", {"q": arguments.city})).json()["n"])

    server.say('{"n": 3}')
    assert await said(tool(server, posts, secret_in="query", secret_name="key", secret_form="{}")) == "3"
    assert server.seen[0].query["key"] == KEY
    assert await server.seen[0].json() == {"q": "Bonn"}


def echoes(key: str) -> list[str]:
    whole = base64.b64encode(f"Bearer {key}".encode()).decode()
    return [key, quote(key, safe=""), json.dumps({"key": key}), key.encode().hex(), whole, f"a{key}b{key}"]


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_an_echoed_key_is_hidden(server: Server, status: int) -> None:
    for text in echoes(KEY):
        server.answers.clear()
        server.say(text, status)
        observation = await said(tool(server))
        assert not any(
            part in observation for part in (KEY, KEY[:12], base64.b64encode(KEY.encode()).decode()[4:20])
        ), observation
        assert KEY.encode().hex() not in observation
        line = JsonFormatter().format(logging.LogRecord("x", logging.INFO, "", 0, f"it said {text}", (), None))
        assert KEY[:12] not in line


async def test_a_key_at_the_cut_is_hidden_too(server: Server) -> None:
    server.say("x" * 85 + KEY + "y" * 400)
    observation = await said(tool(server, characters=130))
    assert not any(KEY[:length] in observation for length in range(4, len(KEY)))


LETTERS = st.characters(codec="utf-8", exclude_characters="\0")


@settings(max_examples=40)
@given(st.text(LETTERS, min_size=8, max_size=40).map(str.strip).filter(lambda key: len(key) >= 8))
def test_every_spelling_of_any_key_is_hidden(key: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANY_KEY", key)
        for text in (key, quote(key, safe=""), json.dumps(key), key.encode().hex()):
            assert "[hidden]" in Secret("ANY_KEY").redact(f"<{text}>")


async def test_a_missing_key_is_no_fault_of_the_agent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEATHER_KEY")
    with pytest.raises(SandboxError, match="WEATHER_KEY, which is not set") as caught:
        await said(tool(server))
    assert (caught.value.kind, caught.value.cause) == (FailureKind.SANDBOX_UNAVAILABLE, Cause.INFRASTRUCTURE)
    assert server.seen == []


@pytest.mark.parametrize(
    ("status", "config", "message"),
    [
        (401, {}, r"does not accept the key\.\nCheck the environment variable WEATHER_KEY"),
        (500, {"outage": "fail"}, "is not available: it answered with status 500"),
    ],
    ids=["a refused key", "an outage, where it may fail the attempt"],
)
async def test_what_is_no_fault_of_the_agent(server: Server, status: int, config: dict[str, Any], message: str) -> None:
    server.say(f"bad key {KEY}", status)
    with pytest.raises(SandboxError, match=message):
        await said(tool(server, **config))


@pytest.mark.parametrize(("status", "times"), [(404, 1), (422, 1), (429, 2), (500, 2), (503, 2), (302, 2)])
async def test_errors_are_observations(server: Server, status: int, times: int) -> None:
    server.say("no such city", status, headers={"Location": f"{server.url}/elsewhere"})
    observation = await said(tool(server))
    assert (
        ("no such city" in observation and "refused" in observation) if times == 1 else "not available" in observation
    )
    assert ("redirects elsewhere" in observation) == (status == 302)
    assert [seen.path for seen in server.seen] == ["/v1/forecast"] * times


async def test_an_outage_that_passes_is_not_noticed(server: Server) -> None:
    server.say("", 503)
    server.say("sunny")
    assert await said(tool(server)) == "sunny"


async def test_an_address_where_nothing_listens() -> None:
    gone = ApiConfig(url=f"http://127.0.0.1:{unused_port()}", attempts=1)
    observation = (await ApiTool("weather", "", Weather, forecast, gone)({"city": "x"})).text
    assert "not available: it cannot be reached" in observation


async def test_a_slow_answer_ends_at_the_deadline(server: Server) -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    server.answers.append(never)
    assert "did not answer within 0.1 seconds" in await said(tool(server, seconds=0.1))


async def test_an_endless_answer_is_left(server: Server) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 65536)
        except ConnectionError:
            return response

    server.answers.append(endless)
    assert "larger than 100000 bytes" in await said(tool(server, answer_bytes=100_000))


async def test_a_compressed_answer_is_not_unpacked(server: Server) -> None:
    server.say("\x1f\x8b bomb", headers={"Content-Encoding": "gzip"})
    assert "not requested" in await said(tool(server))


async def test_long_and_odd_answers_are_tamed(server: Server) -> None:
    server.say("\x1b[31mred\x00" + "a" * 5000)
    observation = await said(tool(server, characters=1000))
    assert observation.startswith("\ufffd[31mred\ufffd")
    assert "characters left out" in observation and len(observation) < 1100


@pytest.mark.parametrize("path", ["//evil.example/x", "/../admin", "../../admin", "/%2e%2e/admin", "?x#y"])
async def test_a_path_cannot_leave_the_base(server: Server, path: str) -> None:
    async def anywhere(arguments: Weather, api: ApiClient) -> str:
        return (await api.get(path)).text()

    server.say("inside")
    observation = await said(tool(server, anywhere))
    assert "leads elsewhere" in observation or all(seen.path.startswith("/v1/") for seen in server.seen)
    assert all("/admin" not in seen.path for seen in server.seen)


async def test_a_name_that_leads_inside_is_refused(server: Server) -> None:
    """``localhost`` is a name: without its address on the list, nothing inside the site is reached."""
    port = server.url.rpartition(":")[2]
    server.say("secret of the site")
    for addresses, expected in (((), "inside the site"), ((f"127.0.0.1:{port}",), "secret of the site")):
        config = ApiConfig(url=f"http://localhost:{port}", addresses=addresses)
        assert expected in (await ApiTool("weather", "", Weather, forecast, config)({"city": "x"})).text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [({"city": "x" * 30}, "'city'"), ({"city": 5}, "'city'"), ({}, "'city'"), ({"city": "x", "unit": "K"}, "'unit'")],
)
async def test_bad_arguments_are_reported_and_not_sent(
    server: Server, arguments: dict[str, Any], complaint: str
) -> None:
    observation = (await tool(server)(arguments)).text
    assert "not accepted" in observation and complaint in observation
    assert server.seen == []


async def test_a_defect_of_the_function_is_no_observation(server: Server) -> None:
    async def broken(arguments: Weather, api: ApiClient) -> str:
        return (await api.get("/x")).json()["missing"]

    server.say("{}")
    with pytest.raises(KeyError):
        await said(tool(server, broken))


async def test_error_that_the_function_raises_for_the_model_is_shown(server: Server) -> None:
    async def picky(arguments: Weather, api: ApiClient) -> str:
        raise (ApiRefused if arguments.unit == "C" else ApiOutage)("no such place")

    assert "refused: no such place" in await said(tool(server, picky))
    assert "not available: no such place" in await said(tool(server, picky), unit="F")


def test_the_schema_is_what_the_model_sees_and_the_loop_reads() -> None:
    assert schema_of(Weather) == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20, "description": "Name of a city."},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            "title": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        },
        "required": ["city"],
    }
    spec = ApiTool("weather", "", Weather, forecast, ApiConfig(url="https://a.example")).spec
    assert parse_arguments(spec, '{"city": "x", "title": null}') == {"city": "x", "title": None}
    with pytest.raises(BadArguments, match="'city' is missing"):
        parse_arguments(spec, "{}")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"url": "ftp://a.example"}, "give http"),
        ({"url": "https://user:pw@a.example"}, "give http"),
        ({"url": "https://a.example?x=1"}, "give http"),
        ({"url": "http://a.example", "secret": "KEY"}, "must not travel unencrypted"),
        ({"url": "https://a.example", "secret": "KEY", "secret_form": "Bearer"}, "must hold"),
        ({"url": "https://a.example", "secret": "k-e-y"}, "secret"),
        ({"url": "https://a.example", "addresses": ["http://x"]}, "no host name|no port"),
        ({"url": "https://a.example", "secrt": "KEY"}, "Did you mean 'secret'"),
    ],
)
def test_a_bad_configuration_is_reported(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(ApiConfig, config)
    with pytest.raises(ValidationError):
        ApiConfig(**config)


@given(st.text(max_size=300), st.integers(min_value=1, max_value=100))
def test_texts_are_bounded_and_writable(text: str, characters: int) -> None:
    bounded = shorten(printable_text(text), characters)
    bounded.encode()
    assert len(bounded) <= max(characters, 0) + 60
    assert all(letter in "\n\t" or letter.isprintable() or ord(letter) >= 0x80 for letter in bounded)
