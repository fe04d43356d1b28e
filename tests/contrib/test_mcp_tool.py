"""Tools of MCP servers: real ones over both transports, and servers that lie, hang, die and talk nonsense."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import unused_port

from prorl_gym.agents.tool_arguments import BadArguments, parse_arguments
from prorl_gym.config import load_config
from prorl_gym.contrib.mcp import McpConfig, McpServer, McpTool, specs_digest
from prorl_gym.errors import Cause, ConfigError, FailureKind, SandboxError
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend

pytestmark = pytest.mark.mcp

RAW = Path(__file__).parent / "mcp_raw_server.py"
REAL = Path(__file__).parent / "mcp_example_server.py"
TOKEN = "a-token-of-no-worth"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", TOKEN)
    monkeypatch.setenv("OTHER_SECRET", "of-the-service")


def config(mode: str = "good", **more: Any) -> McpConfig:
    return McpConfig(**{"command": (sys.executable, "-I", str(RAW), mode), "tools": ("say",), **more})


@asynccontextmanager
async def kept(config: McpConfig) -> AsyncIterator[dict[str, McpTool]]:
    """As a rollout has it: entered in one task, called in another, left in a third."""
    leases = SandboxLeases(EmptyBackend())
    try:
        tools = await asyncio.create_task(leases.enter_context(McpServer(config)))
        yield {tool.spec.name: tool for tool in tools}
    finally:
        await leases.close()


async def say(tools: dict[str, McpTool], text: str) -> str:
    return (await asyncio.create_task(tools["say"]({"text": text}))).text


async def refusal(config: McpConfig) -> str:
    with pytest.raises(SandboxError) as caught:
        async with kept(config):
            pass
    assert (caught.value.kind, caught.value.cause) == (FailureKind.SANDBOX_UNAVAILABLE, Cause.INFRASTRUCTURE)
    return str(caught.value)


async def test_calls_and_their_answers() -> None:
    async with kept(config(pass_env=("TOKEN",), env={"LANG": "C"}, characters=1000)) as tools:
        assert list(tools) == ["say"]
        assert await say(tools, "hello") == "say:hello"
        assert await say(tools, "failed") == "The tool reports an error: it went wrong"
        assert await say(tools, "picture") == "[A part of kind 'image' cannot be shown here.]"
        assert await say(tools, "structured") == '{"n": 1}'
        assert await say(tools, "token") == "the token is [hidden]"
        assert await say(tools, "refuse") == "The tool reports an error: Connection closed, or so I say"
        poison = await say(tools, "poison")
        assert poison.startswith("\ufffd[31ma") and "left out" in poison and len(poison) < 1100


async def test_the_server_gets_the_variables_that_are_named_and_no_others() -> None:
    async with kept(config(env={"MINE": "1"})) as tools:
        variables = await say(tools, "environment")
    assert '"MINE": "1"' in variables and '"PATH"' in variables
    assert "of-the-service" not in variables and TOKEN not in variables and os.environ.get("HOME", "?") != "/"
    assert f'"HOME": "{os.environ.get("HOME")}"' not in variables


async def test_a_server_that_dies_is_started_again_and_the_model_sees_it() -> None:
    async with kept(config()) as tools:
        assert "broke off during this call" in await say(tools, "nonsense"), "an invalid answer"
        assert "broke off during this call" in await say(tools, "die")
        again = await say(tools, "hello")
        assert again == "[The server was started again before this call: what it held is lost.]\nsay:hello"
        assert await say(tools, "hello") == "say:hello"


@pytest.mark.slow
async def test_a_call_without_end_is_stopped() -> None:
    async with kept(config(call_seconds=2.0)) as tools:
        assert "did not answer within 2 seconds" in await say(tools, "sleep")
        assert (await say(tools, "hello")).endswith("say:hello")


@pytest.mark.slow
async def test_a_cancelled_call_is_not_waited_for() -> None:
    async with kept(config()) as tools:
        call = asyncio.create_task(tools["say"]({"text": "sleep"}))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert time.monotonic() - started < 1.0
        assert (await say(tools, "hello")).endswith("say:hello")


async def test_a_server_that_is_gone_for_good_is_no_observation(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(RAW.read_text())
    async with kept(config(command=(sys.executable, "-I", str(script)))) as tools:
        script.unlink()
        with pytest.raises(SandboxError, match=r"is not available: (its program|it does not)"):
            await say(tools, "die")


async def test_nothing_is_left_running_and_nothing_is_opened_after_the_end() -> None:
    before = set(children())
    async with kept(config()) as tools:
        await say(tools, "hello")
        assert set(children()) > before
    assert set(children()) == before
    with pytest.raises(SandboxError, match="the rollout has ended"):
        await say(tools, "hello")
    assert set(children()) == before


def children() -> list[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(one) for one in listed if b"mcp_raw_server" in Path(f"/proc/{one}/cmdline").read_bytes()]


@pytest.mark.parametrize(
    ("mode", "more", "said"),
    [
        pytest.param("mute", {"start_seconds": 0.3}, "no greeting within 0.3 seconds", marks=pytest.mark.slow),
        pytest.param("babble", {"start_seconds": 0.3}, "no greeting within 0.3 seconds", marks=pytest.mark.slow),
        ("exit", {"pass_env": ("TOKEN",)}, "does not start or does not speak the protocol"),
        ("good", {"command": ("/nowhere/server",)}, "cannot be started (No such file or directory)"),
        ("good", {"pass_env": ("UNSET_VARIABLE",)}, "UNSET_VARIABLE, which is not set"),
        ("good", {"tools": ("missing",)}, "does not offer the tool 'missing'"),
        ("good", {"digest": "0123"}, "words its tools otherwise: their digest is"),
        ("array", {}, "does not list its tools"),
        ("words", {}, "not described as JSON schema"),
        ("huge", {}, "larger than 8000 characters"),
        ("endless", {}, "more than 16 pages"),
    ],
)
async def test_a_server_that_is_not_what_it_should_be(mode: str, more: dict[str, Any], said: str) -> None:
    message = await refusal(config(mode, **more))
    assert said in message or (mode == "array" and "not an object" in message)
    assert message.count("\n") == 1 and TOKEN not in message


async def test_odd_schemas_are_made_readable() -> None:
    async with kept(config("odd")) as tools:
        spec = tools["say"].spec
    assert spec.parameters == {
        "type": "object",
        "properties": {"text": {"type": ["string", "null"], "description": "a\ufffd[31mb"}, "any": {}, "torn": {}},
        "required": ["text"],
    }
    assert parse_arguments(spec, '{"text": null, "any": 5}') == {"text": None, "any": 5}
    with pytest.raises(BadArguments, match="'text' must be of type string or null"):
        parse_arguments(spec, '{"text": 5}')


async def test_descriptions_are_bounded_and_pinned_by_their_digest() -> None:
    async with kept(config("long")) as tools:
        assert len(tools["say"].spec.description) < 1100
        found = specs_digest([tools["say"].spec])
    async with kept(config("long", digest=found)) as tools:
        assert list(tools) == ["say"]
    assert f"expected was {found}" in await refusal(config("other", digest=found))


async def test_tools_come_in_the_order_that_was_asked_for() -> None:
    async with kept(config(tools=("other", "say"), prefix="raw_")) as tools:
        assert list(tools) == ["raw_other", "raw_say"]
        assert (await tools["raw_other"]({"text": "x"})).text == "other:x"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": ["a"]}, "give either a command or a url"),
        ({"tools": ["a"], "command": ["x"], "url": "http://a"}, "give either a command or a url"),
        ({"tools": [], "command": ["x"]}, "'tools'"),
        ({"tools": ["a", "a"], "command": ["x"]}, "given twice"),
        ({"tools": ["a b"], "command": ["x"]}, "'tools.0'"),
        ({"tools": ["a"], "url": "file:///x"}, "give http"),
        ({"tools": ["a"], "url": "https://a", "env": {"A": "1"}}, "belong to a command"),
        ({"tools": ["a"], "command": ["x"], "headers_env": {"X": "Y"}}, "belongs to a url"),
        ({"tools": ["a"], "comand": ["x"]}, "Did you mean 'command'"),
    ],
)
def test_a_bad_configuration_is_reported(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(McpConfig, given)


@pytest.mark.slow
async def test_a_real_server_over_standard_input_and_output() -> None:
    tools = ("note", "environment", "broken", "poisoned")
    async with kept(McpConfig(command=(sys.executable, str(REAL)), tools=tools, env={"MINE": "1"})) as found:
        assert found["note"].spec.description == "Keep a note. Returns how many there are."
        assert (await found["note"]({"text": "x"})).text == "1"
        assert (await found["note"]({"text": "x", "times": 2})).text == "3"
        assert "no y" in (await found["broken"]({"text": "y"})).text
        assert "validation error" in (await found["note"]({"text": "x", "times": "many"})).text
        assert "of-the-service" not in (await found["environment"]({})).text
        assert len((await found["poisoned"]({"text": "long"})).text) <= 8100


@pytest.mark.slow
async def test_a_real_server_over_streamable_http() -> None:
    port = unused_port()
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(REAL), "--port", str(port), stdout=subprocess.DEVNULL
    )
    config = McpConfig(url=f"http://127.0.0.1:{port}/mcp", tools=("note", "slow"), call_seconds=1.0)
    try:
        await listening(port)
        async with kept(config) as one, kept(config) as other:
            assert (await one["note"]({"text": "x"})).text == "1"
            assert (await other["note"]({"text": "x"})).text == "2", "a server at an address is shared"
            assert "did not answer" in (await one["slow"]({})).text
            child.kill()
            await child.wait()
            with pytest.raises(SandboxError, match=r"127\.0\.0\.1 is not available"):
                await one["note"]({"text": "x"})
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def listening(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            return
