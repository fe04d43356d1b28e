"""The agent server: which rows it accepts, its configuration, and whether an answer was delivered."""

import gc
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import gym_needed  # noqa: F401
import pytest

pytestmark = pytest.mark.gym

import orjson  # noqa: E402
from fastapi.testclient import TestClient  # noqa: E402
from pydantic import ValidationError  # noqa: E402

from prorl_gym.errors import Limit  # noqa: E402
from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.app import (  # noqa: E402
    ProrlRolloutAgent,
    ProrlRolloutAgentConfig,
    TrackedResponse,
)
from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.row_handler import RowAnswer  # noqa: E402


class FakeRowHandler:
    """Answers each row with the row."""

    def __init__(self, status: int = 200) -> None:
        self.rows: list[Any] = []
        self.status = status
        self.reported: list[str] = []

    async def answer_row(self, row: dict[str, Any]) -> RowAnswer:
        self.rows.append(row)
        return RowAnswer(self.status, orjson.dumps(row))

    def mark_delivered(self, answer: RowAnswer) -> None:
        self.reported.append("delivered")

    def mark_disconnected(self, answer: RowAnswer) -> None:
        self.reported.append("disconnected")

    async def close(self) -> None:
        self.reported.append("closed")


def configured(**config: Any) -> ProrlRolloutAgentConfig:
    server = {"type": "resources_servers", "name": "prorl_rollout"}
    if "service_url" not in config:
        config.setdefault("resources_server", server)
    return ProrlRolloutAgentConfig(name="prorl_math_agent", host="127.0.0.1", port=1, entrypoint="app.py", **config)


def serve(rows: FakeRowHandler, **config: Any) -> TestClient:
    client = SimpleNamespace(global_config_dict={})

    class Agent(ProrlRolloutAgent):
        def make_row_handler(self) -> Any:
            return rows

    agent = Agent.model_construct(config=configured(**config), server_client=client)
    agent.model_post_init(None)
    return TestClient(agent.setup_webserver())


@pytest.mark.parametrize("status", [200, 503])
def test_row_is_answered_and_delivered(status: int):
    rows = FakeRowHandler(status)
    with serve(rows) as served:
        answer = served.post("/run", content=b'{"a": 1,\n "b": "\xc3\xa9"}')
        assert (answer.status_code, answer.json(), rows.rows) == (status, {"a": 1, "b": "é"}, [{"a": 1, "b": "é"}])
        assert answer.headers["content-type"] == "application/json"
        assert rows.reported == ["delivered"]
    assert rows.reported == ["delivered", "closed"]


def test_collections_begin_with_the_server_and_leave_imports_out(monkeypatch: pytest.MonkeyPatch):
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    gc.disable()
    try:
        with serve(FakeRowHandler()):
            assert gc.isenabled()
            assert frozen == [False]
    finally:
        gc.enable()


@pytest.mark.parametrize("body", [b"[1]", b"{", b'{"x": NaN}', b"\xff", b'{"x":' + b"[" * 300 + b"]" * 300 + b"}"])
def test_what_is_no_row_is_refused_here(body: bytes):
    rows = FakeRowHandler()
    assert serve(rows).post("/run", content=body).status_code == 422
    assert not rows.rows


@pytest.mark.parametrize("received", ["http.disconnect", "http.request"], ids=["left before", "broke off"])
async def test_answer_that_did_not_arrive_is_not_delivered(received: str):
    rows = FakeRowHandler()

    async def receive() -> dict[str, Any]:
        return {"type": received, "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if received == "http.request":
            raise ConnectionResetError

    with suppress(ConnectionResetError):
        await TrackedResponse(RowAnswer(200, b"{}"), rows)({"type": "http"}, receive, send)
    assert rows.reported == ["disconnected"]


@pytest.mark.parametrize(("settings", "masked"), [({}, tuple(Limit)), ({"mask_overlong": ["tokens"]}, (Limit.TOKENS,))])
def test_mask_truncated_masks_every_limit_unless_settings_name_some(settings: dict[str, Any], masked: tuple[Limit]):
    assert configured(mask_truncated=True, settings=settings).profile().settings.mask_overlong == masked


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"resources_server": None}, "exactly one"),
        ({"service_url": "http://h:1", "resources_server": {"name": "r"}}, "resources_server"),
        ({"early_stop": {"informative_groups": 8}}, "early_stop needs num_generations"),
    ],
)
def test_configuration_without_one_service_or_with_early_stop_of_no_groups_is_refused(
    config: dict[str, Any], named: str
):
    with pytest.raises(ValidationError, match=named):
        configured(**config)


def test_agents_of_shards_have_runs_of_their_own():
    alone, shard = configured(), configured(service_url="http://head:8770")
    assert (alone.profile().agent, shard.profile().agent) == ("prorl_math_agent", "prorl_math_agent:127.0.0.1:1")


def test_early_stop_names_what_the_recipe_must_set(capsys: pytest.CaptureFixture[str]):
    serve(FakeRowHandler(), num_generations=8, early_stop={"informative_groups": 8})
    assert "use_dynamic_sampling: true" in capsys.readouterr().out


def test_responses_route_names_what_to_use_instead():
    with pytest.raises(NotImplementedError, match="post the row to /run"):
        serve(FakeRowHandler()).post("/v1/responses", json={"input": "hello"})
