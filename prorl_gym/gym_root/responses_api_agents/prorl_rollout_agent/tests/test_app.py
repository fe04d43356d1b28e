# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""Which rows the agent accepts. Its other tests are in prorl-gym's own suite (tests/gym)."""

from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from fastapi.testclient import TestClient

from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.app import ProrlRolloutAgent, ProrlRolloutAgentConfig
from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.row_handler import RowAnswer

CONFIG = ProrlRolloutAgentConfig(
    name="prorl_math_agent",
    host="127.0.0.1",
    port=1,
    entrypoint="app.py",
    resources_server={"type": "resources_servers", "name": "prorl_rollout"},
)


class EchoHandler:
    """Answers each row with the row."""

    async def answer_row(self, row: dict[str, Any]) -> RowAnswer:
        return RowAnswer(200, orjson.dumps(row))

    def mark_delivered(self, answer: RowAnswer) -> None:
        """Nothing waits for the report."""

    async def close(self) -> None:
        """Nothing is open."""


class EchoAgent(ProrlRolloutAgent):
    """The agent without a rollout service."""

    def make_row_handler(self) -> Any:
        return EchoHandler()


@pytest.fixture
def agent() -> TestClient:
    server = EchoAgent.model_construct(config=CONFIG, server_client=SimpleNamespace(global_config_dict={}))
    server.model_post_init(None)
    return TestClient(server.setup_webserver())


def test_row_is_answered(agent: TestClient) -> None:
    answer = agent.post("/run", json={"environment": "math"})
    assert (answer.status_code, answer.json()) == (200, {"environment": "math"})


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff"])
def test_what_is_no_row_is_refused(agent: TestClient, body: bytes) -> None:
    assert agent.post("/run", content=body).status_code == 422


def test_a_single_model_call_is_refused(agent: TestClient) -> None:
    with pytest.raises(NotImplementedError, match="prorl_model"):
        agent.post("/v1/responses", json={"input": "2+2?"})
