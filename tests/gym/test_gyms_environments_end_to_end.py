"""Our model server below environments and agents of NeMo Gym's own. Slow: it starts Gym and Ray."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gym_needed  # noqa: F401
import pytest
from foreign_run import Server, check_ids, run_foreign

pytestmark = [pytest.mark.gym, pytest.mark.release, pytest.mark.timeout(300)]

AGENTS = {"example_multi_step": "simple_agent", "workplace_assistant": "simple_agent", "blackjack": "gymnasium_agent"}
"""Environments with tools, with tools that change a session's state, and with a user who answers."""
INSTANCES = {"example_multi_step": "example_multi_step_resources_server"}
"""Of resources servers, where it is not the environment's name."""


def gyms_rows(environment: str) -> list[dict[str, Any]]:
    spec = find_spec("nemo_gym")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parents[1] / f"resources_servers/{environment}/data/example.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    agent = {"type": "responses_api_agents", "name": f"{environment}_{AGENTS[environment]}"}
    return [row | {"agent_ref": agent} for row in rows]


def test_ids_are_those_of_the_engines(tmp_path: Path, short_directory: Path):
    servers: list[Server] = []
    for environment, agent in AGENTS.items():
        servers.append(("resources_servers", environment, INSTANCES.get(environment, environment)))
        servers.append(("responses_api_agents", agent, f"{environment}_{agent}"))
    rows = [row for environment in AGENTS for row in gyms_rows(environment)]
    configs = [f"resources_servers/{environment}/configs/{environment}.yaml" for environment in AGENTS]
    run = run_foreign(tmp_path, short_directory, rows, servers, configs=configs)
    check_ids(run)
    solved = {environment: 0 for environment in AGENTS}
    turns = dict(solved)
    for result in run.results:
        environment = next(name for name in AGENTS if result["agent_ref"]["name"].startswith(name))
        solved[environment] += result["reward"] == 1.0
        turns[environment] += sum("prompt_token_ids" in item for item in result["response"]["output"])
    assert (solved["example_multi_step"], solved["workplace_assistant"]) == (10, 10)
    assert turns["example_multi_step"] == 40 and turns["workplace_assistant"] == 38 and turns["blackjack"] > 10
