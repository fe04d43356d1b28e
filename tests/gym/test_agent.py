"""The agent server over a scripted rollout server."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import gym_needed  # noqa: F401
import pytest

pytestmark = pytest.mark.gym

from fastapi.testclient import TestClient  # noqa: E402
from nemo_gym.openai_utils import NeMoGymResponse  # noqa: E402

from prorl_gym.errors import FailureKind  # noqa: E402
from prorl_gym.gym_root.responses_api_agents.prorl_agent.app import ProrlAgent, ProrlAgentConfig  # noqa: E402
from prorl_gym.records import Message, Rollout  # noqa: E402
from prorl_gym.trainers.nemo_rl import check_group, check_result, first_prompt  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "trainers"))
from rollout_samples import MESSAGES, ROW, failed, rollout  # noqa: E402


class Answer:
    """What Gym's client returns, as far as the agent uses it."""

    def __init__(self, body: str, status: int = 200) -> None:
        self._body = body.encode()
        self.status = status
        self.ok = status < 400

    async def read(self) -> bytes:
        return self._body


class RolloutServer:
    """Stands in for the server client: answers as the prorl_rollout server would."""

    def __init__(self, record: Rollout) -> None:
        self.record = record
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.global_config_dict: dict[str, Any] = {}
        self.hold: asyncio.Event | None = None
        self.called = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def post(self, server_name: str, url_path: str, json: dict[str, Any]) -> Answer:
        self.posts.append((url_path, json))
        self.called.set()
        if url_path == "/cancel_rollouts":
            self.cancelled.set()
            return Answer("{}")
        if self.hold is not None:
            await self.hold.wait()
        if url_path == "/prompt_ids":
            return Answer('{"prompt_token_ids": [7, 8], "terminator_id": 9}')
        return Answer(self.record.model_copy(update={"rollout_id": json["rollout_id"]}).model_dump_json())


class Connected:
    """A request whose caller is still there."""

    async def is_disconnected(self) -> bool:
        return False


def make(record: Rollout, **config: Any) -> tuple[ProrlAgent, RolloutServer]:
    server = RolloutServer(record)
    agent = ProrlAgent.model_construct(
        config=ProrlAgentConfig(
            name="prorl_math_agent",
            host="127.0.0.1",
            port=1,
            entrypoint="app.py",
            resources_server={"type": "resources_servers", "name": "prorl_rollout"},
            **config,
        ),
        server_client=server,
    )
    agent.model_post_init(None)
    return agent, server


def serve(record: Rollout, **config: Any) -> tuple[TestClient, RolloutServer]:
    agent, server = make(record, **config)
    return TestClient(agent.setup_webserver()), server


def test_row_becomes_one_rollout_and_its_result_passes_the_trainer():
    client, server = serve(rollout())
    answer = client.post("/run", json=ROW)
    assert answer.status_code == 200
    check_result(answer.json())
    assert [path for path, _ in server.posts] == ["/rollouts"]
    assert server.posts[0][1]["task"] == ROW["task"]


def test_response_is_what_gym_itself_accepts():
    malformed = [*MESSAGES[:3], Message(role="user", content="That call was not valid JSON."), MESSAGES[4]]
    client, _ = serve(rollout(messages=malformed))
    response = NeMoGymResponse.model_validate(client.post("/run", json=ROW).json()["response"])
    assert response.output[0].generation_token_ids == [100, 9]


def test_failed_rollout_is_masked_not_an_error():
    client, _ = serve(failed(FailureKind.SANDBOX_LOST))
    answer = client.post("/run", json=ROW)
    assert answer.status_code == 200
    assert (answer.json()["mask_sample"], answer.json()["failure_kind"]) == (True, "session_lost")


def test_on_failure_raise_answers_503():
    client, _ = serve(failed(), on_failure="raise")
    answer = client.post("/run", json=ROW)
    assert answer.status_code == 503
    assert "engine e0 is down" in answer.text


def test_on_failure_raise_keeps_failures_of_the_model():
    client, _ = serve(failed(FailureKind.SANDBOX_LIMIT), on_failure="raise")
    assert client.post("/run", json=ROW).status_code == 200


def test_rollout_that_never_had_a_prompt_gets_the_ids_of_the_row():
    client, _ = serve(failed(segments=[], messages=[]))
    result = client.post("/run", json=ROW).json()
    check_result(result)
    assert first_prompt(result) == [7, 8]
    assert result["prorl_placeholder"] is True


def test_placeholders_of_a_group_agree():
    client, _ = serve(failed(segments=[], messages=[]))
    check_group([client.post("/run", json=ROW | {"_ng_rollout_index": i}).json() for i in range(3)])


def test_bad_row_is_a_masked_result_that_names_the_key():
    client, server = serve(rollout())
    result = client.post("/run", json=ROW | {"prorl": {"grup_id": "x"}}).json()
    check_result(result)
    assert result["failure_kind"] == "prorl:bad_row"
    assert "grup_id" in result["failure_reason"]
    assert not any(path == "/rollouts" for path, _ in server.posts)


def test_every_post_is_a_rollout_of_its_own():
    client, server = serve(rollout())
    for _ in range(2):
        client.post("/run", json=ROW)
    assert len({body["rollout_id"] for _, body in server.posts}) == 2


def test_environment_of_the_instance_serves_rows_that_name_none():
    client, server = serve(rollout(), environment="math")
    client.post("/run", json={key: value for key, value in ROW.items() if key != "environment"})
    assert server.posts[0][1]["environment"] == "math"


def test_responses_route_says_what_to_use_instead():
    client, _ = serve(rollout())
    with pytest.raises(NotImplementedError, match="post the row to /run"):
        client.post("/v1/responses", json={"input": "hello"})


async def test_row_posted_again_after_a_dropped_connection_meets_its_rollout():
    """Gym cancels the handler of a caller that went away; its client then posts the same row again."""
    agent, server = make(rollout())
    server.hold = asyncio.Event()
    first = asyncio.create_task(agent.run(Connected(), dict(ROW)))
    await server.called.wait()
    first.cancel()
    await asyncio.wait({first})
    server.hold.set()
    await agent.run(Connected(), dict(ROW))
    ids = [body["rollout_id"] for path, body in server.posts if path == "/rollouts"]
    assert len(ids) == 2
    assert ids[0] == ids[1]


async def test_rollout_whose_caller_stays_away_is_cancelled():
    agent, server = make(rollout(), repost_seconds=0.0)
    server.hold = asyncio.Event()
    first = asyncio.create_task(agent.run(Connected(), dict(ROW)))
    await server.called.wait()
    first.cancel()
    await asyncio.wait_for(server.cancelled.wait(), 5)
    path, body = server.posts[-1]
    assert path == "/cancel_rollouts"
    assert body == {"rollout_ids": [server.posts[0][1]["rollout_id"]], "reason": "disconnected"}


def test_result_is_json_without_nan():
    client, _ = serve(rollout())
    text = client.post("/run", json=ROW).text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the answer"))
