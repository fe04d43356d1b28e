"""mini-swe-agent, which NeMo Gym runs in sandboxes, in a session of our rollout server and over our model server.

Its loop, prompts, calls and histories are its own; only where a command runs is ours: the session's ``/bash``.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import gym_needed  # noqa: F401
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.gym, pytest.mark.mini_swe_agent]

from fastapi.testclient import TestClient  # noqa: E402
from foreign_run import LoggedOracle, read_lines  # noqa: E402
from model_over_http import AgentRollout, listening, trained_on  # noqa: E402
from served_model import CODEC  # noqa: E402
from test_foreign_sessions import example  # noqa: E402
from test_rollout_server import answered, post, server  # noqa: E402

from prorl_gym.environments.protocol import ScriptedStep  # noqa: E402
from prorl_gym.oracle.oracle_policy import (  # noqa: E402
    KnownRow,
    OraclePolicy,
    RowIndex,
)
from prorl_gym.oracle.oracle_server import serve_oracle  # noqa: E402

ENDED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class OnlyBash:
    """The environment as far as the oracle looks at one, with turns of the one tool that this harness has."""

    name = "swe"

    def gold_steps(self, row: Any) -> list[ScriptedStep]:
        commands = [
            "git log --oneline; ls",
            f"git apply <<'END'\n{row['patch']}END",
            "git diff --stat",
            f"echo {ENDED}",
        ]
        return [ScriptedStep("I go on.", "bash", {"command": command}) for command in commands]

    def wrong_steps(self, row: Any, seed: int) -> list[ScriptedStep]:
        return [ScriptedStep("No.")]


def run_agent(base: str, client: TestClient, task: str) -> list[dict[str, Any]]:
    """Let the harness work to its end; return its messages."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.openrouter_model import OpenRouterModel

    class SessionEnvironment(LocalEnvironment):
        def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
            text = post(client, "/bash", {"command": action["command"]})
            output = {"output": text, "returncode": 0, "exception_info": ""}
            self._check_finished(output)
            return output

    model = OpenRouterModel(model_name="oracle", model_kwargs={"temperature": 1.0}, cost_tracking="ignore_errors")
    model._api_url = f"{base}/v1/chat/completions"  # noqa: SLF001
    agent = DefaultAgent(
        model, SessionEnvironment(), system_template="Repair it.", instance_template="{{task}}", step_limit=9
    )
    assert agent.run(task)["exit_status"] == "Submitted"
    return agent.messages


async def test_its_repair_is_graded_and_its_tokens_are_those_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")
    row, options = example("swe"), {"ignore_parameters": ["usage"]}
    question = row["task"]["question"]
    oracle = LoggedOracle(CODEC, OraclePolicy(CODEC, RowIndex([KnownRow("r", question, OnlyBash(), row["task"])])))
    oracle.log = tmp_path / "calls.jsonl"
    with TestClient(server().setup_webserver()) as client:
        post(client, "/seed_session", row)
        async with (
            serve_oracle(oracle, "127.0.0.1", 0) as engine,
            listening([engine], **options) as base,
        ):
            messages = await asyncio.to_thread(run_agent, base, client, question)
        verdict = post(client, "/verify", row | {"response": answered("done")})
    assert (verdict["reward"], verdict["mask_sample"]) == (1.0, False), verdict["failure_reason"]
    said = [message for message in messages if message["role"] == "assistant"]
    fields = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    assert json.loads(json.dumps([[message[field] for field in fields] for message in said])) == read_lines(oracle.log)
    assert len(said) == 4 and trained_on(AgentRollout(said)) > 30
