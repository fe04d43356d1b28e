"""The clients against the real routes, and where they find their token."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from loopback_service import TOKEN, served

from prorl_gym.api.service_process import bind_socket
from prorl_gym.client import AcceptedRollout, Client, ServiceError, read_token
from prorl_gym.errors import ConfigError, ConflictError, NotFoundError
from prorl_gym.records import RolloutRequest


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with served() as address:
        yield address


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


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + "\n")
    os.chmod(path, 0o600)
    return path
