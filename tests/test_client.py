"""The clients: against the real routes, and against a server that misbehaves."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from quick_server import listening

from prorl_gym.api.app import create_app
from prorl_gym.api.app_context import AppContext
from prorl_gym.api.http.http_server import KEEP_ALIVE_SECONDS
from prorl_gym.api.service_process import bind_socket
from prorl_gym.client import AcceptedRollout, Client, ServiceError, SyncClient, read_token
from prorl_gym.errors import ConfigError, ConflictError, NotFoundError
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    ScriptedEnvironment,
    environment_lookup,
)
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

TOKEN = "test-token-of-no-worth"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    runner = InProcessRunner(environment_lookup(ScriptedEnvironment()), FakePolicySource(), EmptyBackend())
    service = RolloutService(MemoryLedger(), runner)
    await service.start()
    async with listening(create_app(AppContext.create(service), TOKEN)) as address:
        yield address
        service.begin_shutdown()
    await service.stop(drain=False)


def ask(rollout_id: str, **task: Any) -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, environment="scripted", task=task)


async def test_the_whole_conversation(url: str) -> None:
    async with Client(url, token=TOKEN) as client:
        assert await client.submit(ask("a")) == [AcceptedRollout("a", False)]
        assert await client.submit([ask("a"), ask("b", run="hang")]) == [
            AcceptedRollout("a", True),
            AcceptedRollout("b", False),
        ]
        assert (await client.result("a", timeout=10)).reward == 1.0
        assert await client.poll_result("b") is None
        with pytest.raises(TimeoutError):
            await client.result("b", timeout=0.05)
        assert await client.cancel(["b", "a"]) == ["b"]
        assert (await client.result("b")).outcome.status == "cancelled"
        assert [(one.cursor, one.rollout.rollout_id) async for one in client.stream(follow=False)] == [
            (1, "a"),
            (2, "b"),
        ]
        assert (await client.status()).finished == 2
        with pytest.raises(ConflictError, match="rollout a was submitted before with another body"):
            await client.submit(ask("a", reward=0.0))
        with pytest.raises(NotFoundError):
            await client.poll_result("stranger")


async def test_the_same_without_an_event_loop_of_ones_own(url: str) -> None:
    def talk() -> tuple[Any, ...]:
        with SyncClient(url, token=TOKEN) as client:
            client.submit([ask("a"), ask("b")])
            reward = client.result("a", timeout=10).reward
            client.result("b", timeout=10)
            names = []
            for delivered in client.stream():
                names.append(delivered.rollout.rollout_id)
                if len(names) == 2:
                    break
            return reward, sorted(names), client.cancel(["a"]), client.status().finished

    assert await asyncio.to_thread(talk) == (1.0, ["a", "b"], [], 2)


async def test_a_wrong_token_is_said_at_once(url: str) -> None:
    async with Client(url, token="wrong") as client:
        with pytest.raises(ServiceError, match="refuses the token from its caller"):
            await client.status()


async def test_service_unreachable() -> None:
    with bind_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    async with Client(f"http://127.0.0.1:{port}", token=TOKEN, retry_seconds=0.02, retry_delay=0.001) as client:
        with pytest.raises(ServiceError) as caught:
            await client.status()
    assert f"http://127.0.0.1:{port}: the service cannot be reached (" in str(caught.value)
    assert str(caught.value).endswith("pass --url or set PRORL_GYM_URL.")


# --- a server that misbehaves ---------------------------------------------------------------------------------------

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def misbehaving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    with bind_socket("127.0.0.1", 0) as listener:
        await web.SockSite(runner, listener).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        await runner.cleanup()


async def test_a_broken_submit_is_sent_again_with_the_same_ids() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if len(bodies) == 1:
            assert request.transport is not None
            request.transport.close()
        if len(bodies) == 2:
            return web.json_response({"error": {"what": "busy", "fix": ""}}, status=503)
        return web.json_response({"accepted": [{"rollout_id": bodies[0][0]["rollout_id"], "duplicate": True}]})

    request = RolloutRequest(environment="scripted", task={})
    async with misbehaving(handler) as url, Client(url, token=TOKEN, retry_delay=0.001) as client:
        assert await client.submit(request) == [AcceptedRollout(request.rollout_id, True)]
    assert bodies[0] == bodies[1] == bodies[2]


async def test_an_idle_connection_is_not_used_when_the_service_may_be_closing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callers: set[Any] = set()

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        callers.add(request.transport.get_extra_info("peername"))
        return web.json_response({"cancelled": []})

    async with misbehaving(answer) as url, Client(url, token=TOKEN, retry_seconds=0.0) as client:
        for later in (0.0, KEEP_ALIVE_SECONDS - 1.0):
            now = time.monotonic() + later
            monkeypatch.setattr("aiohttp.connector.monotonic", lambda now=now: now)
            await client.cancel(["a"])
    assert len(callers) == 2


async def test_retries_are_bounded() -> None:
    calls = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        return web.json_response({"error": {"what": "The disk is full.", "fix": "Free space."}}, status=503)

    async with misbehaving(handler) as url, Client(url, token=TOKEN, retry_seconds=0.05, retry_delay=0.001) as client:
        with pytest.raises(ServiceError, match="The disk is full"):
            await client.status()
    assert 3 <= calls < 60


async def test_another_kind_of_server_is_recognised() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>nginx</html>", status=403)

    async with misbehaving(handler) as url, Client(url, token=TOKEN) as client:
        with pytest.raises(ServiceError) as caught:
            await client.status()
    assert str(caught.value) == ("/v1/status: the service answered 403.\nIs that address a prorl-gym service?")


@pytest.mark.parametrize("body", ["<html>hello</html>", "[1]", "[" * 100_000])
async def test_another_kind_of_answer_is_recognised(body: str) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text=body)

    async with misbehaving(page) as address, Client(address, token=TOKEN) as client:
        with pytest.raises(ServiceError, match=r"not answer in JSON\.\n.*a prorl-gym service"):
            await client.status()


def record(number: int) -> dict[str, Any]:
    return {
        "cursor": number,
        "rollout": {
            "rollout_id": f"r{number}",
            "run_id": "default",
            "group_id": None,
            "group_size": 1,
            "replica": 0,
            "environment": "scripted",
            "outcome": {"status": "completed"},
            "messages": [{"role": "user", "content": "x" * 300_000}],
            "accepted_at": 0.0,
            "finished_at": 1.0,
        },
    }


async def test_a_broken_stream_is_resumed_after_the_last_whole_line() -> None:
    asked: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(request.query["cursor"])
        response = web.StreamResponse()
        await response.prepare(request)
        first = int(request.query["cursor"]) + 1
        line = json.dumps(record(first)).encode()
        await response.write(b"\n" + line + b"\n\n")
        await response.write(json.dumps(record(first + 1)).encode()[:1000])  # cut off in the middle
        assert request.transport is not None
        request.transport.close()
        return response

    async with misbehaving(handler) as url, Client(url, token=TOKEN, retry_delay=0.001) as client:
        stream = client.stream("default")
        seen = [await anext(stream) for _ in range(3)]
        await stream.aclose()
    assert [(one.cursor, one.rollout.rollout_id) for one in seen] == [(1, "r1"), (2, "r2"), (3, "r3")]
    assert asked == ["0", "1", "2"]


# --- the token ------------------------------------------------------------------------------------------------------


def test_token_sources_and_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRORL_GYM_TOKEN", "PRORL_GYM_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        read_token()
    assert str(caught.value).splitlines()[1] == (
        "Start the service once as this user, or set PRORL_GYM_TOKEN or PRORL_GYM_TOKEN_FILE."
    )
    _write(tmp_path / "prorl-gym" / "token", "by-default")
    assert read_token() == "by-default"
    monkeypatch.setenv("PRORL_GYM_TOKEN_FILE", str(_write(tmp_path / "mine", "of-the-file")))
    assert read_token() == "of-the-file"
    monkeypatch.setenv("PRORL_GYM_TOKEN", "of-the-environment")
    assert read_token() == "of-the-environment"
    assert read_token(tmp_path / "mine") == "of-the-file"


def test_a_token_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "token", "of-another")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError) as caught:
        read_token(path)
    assert str(caught.value) == (
        f"{path}: the token file belongs to another user ({owner}).\n"
        "Remove it and start the service again; to call another user's service, set PRORL_GYM_TOKEN."
    )


def test_a_pipe_is_no_token_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    with pytest.raises(ConfigError, match="the token is empty"):
        read_token(tmp_path / "token")


def test_an_empty_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the token is empty"):
        read_token(_write(tmp_path / "token", ""))


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + "\n")
    os.chmod(path, 0o600)
    return path
