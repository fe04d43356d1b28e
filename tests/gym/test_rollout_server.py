"""The rollout server: the service below /service, and tool sessions for other agents."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gym_needed  # noqa: F401
import pytest

pytestmark = pytest.mark.gym

from fastapi.testclient import TestClient  # noqa: E402
from nemo_gym.base_resources_server import ResourcesSeedSessionRequest  # noqa: E402
from nemo_gym.testing.session_conformance import check_resources_session_contract  # noqa: E402

import prorl_gym.gym_root.resources_servers.prorl_rollout.app as hosted  # noqa: E402
from prorl_gym.agents.tools import PythonTool  # noqa: E402
from prorl_gym.api.build import LoadedService  # noqa: E402
from prorl_gym.api.config import ServiceConfig  # noqa: E402
from prorl_gym.errors import ConfigError, FailureKind, SandboxError  # noqa: E402
from prorl_gym.gym_root.resources_servers.prorl_rollout.app import (  # noqa: E402
    ProrlRolloutConfig,
    ProrlRolloutServer,
)

ROWS = Path(__file__).parents[2] / "environments/prorl_math/data/example.jsonl"
ROW: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "What is 6*7?"}]},
    "environment": "math",
    "task": {"id": "t", "question": "What is 6*7?", "answer": "42"},
}


LOCAL = {"sandbox": {"backend": "local", "allow_unsafe_local": True}}


def answered(text: str) -> dict[str, Any]:
    return {
        "id": "r",
        "created_at": 0,
        "model": "m",
        "object": "response",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "output": [
            {
                "type": "message",
                "id": "m",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": text, "annotations": []}],
            }
        ],
    }


def server(**service: Any) -> ProrlRolloutServer:
    config = ProrlRolloutConfig(
        name="prorl_rollout",
        host="127.0.0.1",
        port=1,
        entrypoint="app.py",
        domain="agent",
        engines="http://127.0.0.1:9/v1",  # no server listens there
        model="m",
        tokenizer="small",
        service={"retry": {"attempts": 1}, **service},
    )
    made = ProrlRolloutServer.model_construct(config=config, server_client=None)
    made.model_post_init(None)
    return made


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    real = hosted.build_service

    async def with_short_waits(config: ServiceConfig) -> LoadedService:
        short = config.inference.model_copy(update={"wait_seconds": 0.1, "attempts": 1, "connect_seconds": 1.0})
        return await real(config.model_copy(update={"inference": short}))

    monkeypatch.setattr(hosted, "build_service", with_short_waits)
    with TestClient(server(**LOCAL).setup_webserver()) as client:
        yield client


def post(client: TestClient, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json() if "json" in answer.headers["content-type"] else answer.text


def test_row_ends_even_without_an_engine(client: TestClient):
    submission = {"rollout_id": "r", "environment": "math", "task": ROW["task"]}
    assert post(client, "/service/v1/rollouts", submission)["accepted"] == [{"rollout_id": "r", "duplicate": False}]
    record = client.get("/service/v1/rollouts/r?wait=30").json()["rollout"]
    assert (record["outcome"]["status"], record["outcome"]["kind"]) == ("failed", "engine_unreachable")


def test_service_is_called_past_gym_s_middlewares(client: TestClient):
    assert "set-cookie" in client.get("/livez").headers
    answer = client.get("/service/v1/unacknowledged")
    assert (answer.status_code, "set-cookie" in answer.headers) == (200, False)


def test_tasks_are_not_shown_to_callers_without_a_token(client: TestClient):
    assert client.get("/service/v1/rollouts/r/request").status_code == 404


def test_first_prompt_of_a_row_is_rendered(client: TestClient):
    prompt = post(client, "/service/v1/first_prompt", {"input": [{"role": "user", "content": "2+2?"}]})
    assert prompt["prompt_token_ids"] and prompt["terminator_id"]
    refused = post(client, "/service/v1/first_prompt", {"input": [5]}, status=422)
    assert "cannot be rendered" in str(refused)


def test_tools_share_state_and_finish_is_graded(client: TestClient):
    post(client, "/seed_session", ROW)
    post(client, "/python", {"code": "x = 6"})
    assert "42" in post(client, "/python", {"code": "x * 7"})
    post(client, "/finish", {"answer": "\\boxed{42}"})
    verdict = post(client, "/verify", ROW | {"response": answered("done")})
    assert (verdict["reward"], verdict["mask_sample"]) == (1.0, False)
    assert verdict["task"] == ROW["task"]


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("It is \\boxed{42}.", 1.0),
        ("It is \\boxed{41}.", 0.0),
        ("<think>Perhaps \\boxed{42}.</think>I do not know.", 0.0),
        ("<think>\nPerhaps \\boxed{42}.", 0.0),
        ("Perhaps \\boxed{41}.</think>It is \\boxed{42}.", 1.0),
        ("Perhaps \\boxed{42}.</think>I do not know.", 0.0),
    ],
)
def test_last_message_without_thoughts_is_graded(client: TestClient, text: str, reward: float, seeded: bool):
    if seeded:
        post(client, "/seed_session", ROW)
    assert post(client, "/verify", ROW | {"response": answered(text)})["reward"] == reward


def test_tool_that_cannot_be_called_is_explained_to_the_model(client: TestClient):
    assert "never seeded" in post(client, "/python", {"code": "1"}, status=409)
    post(client, "/seed_session", ROW)
    assert "There is no tool 'bash' here" in post(client, "/bash", {"command": "ls"}, status=404)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"task": {"question": "?"}}, "answer"),
        ({"prorl": {"settings": {"run_seconds": -1}}}, "settings"),
        ({"prorl": {"setings": {}}}, "setings"),
    ],
)
def test_bad_row_is_refused_naming_the_key(client: TestClient, change: dict[str, Any], key: str):
    assert key in str(post(client, "/seed_session", ROW | change, status=422))


@pytest.mark.parametrize(
    ("kind", "reward", "word"),
    [
        (FailureKind.SANDBOX_LOST, 0.0, "session_lost"),
        (FailureKind.SANDBOX_BROKEN_BY_AGENT, 1.0, "prorl:sandbox_broken_by_agent"),
    ],
)
def test_grade_after_a_failed_tool_is_masked_unless_the_model_broke_it(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, kind: FailureKind, reward: float, word: str
):
    async def fails(self: PythonTool, arguments: Any) -> Any:
        raise SandboxError(kind, "the sandbox is gone.")

    monkeypatch.setattr(PythonTool, "__call__", fails)
    post(client, "/seed_session", ROW)
    post(client, "/python", {"code": "1"}, status=503)
    row = ROW | {"instance_config": {"level": 3}, "response": answered("\\boxed{42}")}
    verdict = post(client, "/verify", row)
    is_masked = reward == 0.0
    assert (verdict["reward"], verdict["mask_sample"], verdict["failure_kind"]) == (reward, is_masked, word)
    assert verdict["instance_config"] == {"level": 3, "mask_sample": is_masked}


def test_session_contract_of_gym(client: TestClient):
    seed = ResourcesSeedSessionRequest(
        resources_session_id="s1",
        episode_id={"rollout_id": "e1", "attempt": 0},
        task_id={"taskset": "t", "task_id": "1"},
        task_data=json.loads(ROWS.read_text().splitlines()[0]),
    )
    check_resources_session_contract(client.app, seed, keeps_state=True)


@pytest.mark.parametrize(
    ("service", "named"), [({"retry": {"atempts": 2}}, "Did you mean 'attempts'"), ({"nodes": {}}, "service_url")]
)
def test_keys_that_the_service_cannot_have_are_refused(service: dict[str, Any], named: str):
    """Nodes among them: no route lets one join a service inside Gym, and its rollouts would wait without end."""
    with pytest.raises(ConfigError, match=named):
        server(**service)


def test_ledger_of_a_gym_run_is_removed_with_it(client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with TestClient(server(**LOCAL).setup_webserver()):
        (ledger,) = tmp_path.glob("prorl-gym-*/ledger.sqlite")
    assert not ledger.parent.exists()
