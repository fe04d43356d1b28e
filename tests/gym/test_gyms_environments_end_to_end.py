"""Our servers with agents and environments of NeMo Gym's own, and what Gym collects. Slow: it starts Gym and Ray."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gym_needed  # noqa: F401
import pytest
from foreign_run import Server, read_lines, run_foreign

from prorl_gym.cli.installation import gym_root
from prorl_gym.gym_roots import has_environment_servers

pytestmark = [pytest.mark.gym, pytest.mark.release, pytest.mark.timeout(400)]

AGENTS = {"example_multi_step": "simple_agent", "workplace_assistant": "simple_agent", "blackjack": "gymnasium_agent"}
"""Environments with tools, with tools that change a session's state, and with a user who answers."""
INSTANCES = {"example_multi_step": "example_multi_step_resources_server"}
"""Of resources servers, where it is not the environment's name."""


def gyms_rows(environment: str) -> list[dict[str, Any]]:
    spec = find_spec("nemo_gym")
    assert spec is not None and spec.origin is not None
    file = Path(spec.origin).parents[1] / f"resources_servers/{environment}/data/example.jsonl"
    agent = {"type": "responses_api_agents", "name": f"{environment}_{AGENTS[environment]}"}
    return [row | {"agent_ref": agent} for row in read_lines(file)]


def test_ids_are_those_of_the_engines(tmp_path: Path, short_directory: Path):
    servers: list[Server] = []
    for environment, agent in AGENTS.items():
        servers.append(("resources_servers", environment, INSTANCES.get(environment, environment)))
        servers.append(("responses_api_agents", agent, f"{environment}_{agent}"))
    rows = [row for environment in AGENTS for row in gyms_rows(environment)]
    configs = [f"resources_servers/{environment}/configs/{environment}.yaml" for environment in AGENTS]
    results = run_foreign(tmp_path, short_directory, rows, servers, configs=configs)
    solved = {environment: 0 for environment in AGENTS}
    turns = dict(solved)
    for result in results:
        environment = next(name for name in AGENTS if result["agent_ref"]["name"].startswith(name))
        solved[environment] += result["reward"] == 1.0
        turns[environment] += sum("prompt_token_ids" in item for item in result["response"]["output"])
    assert (solved["example_multi_step"], solved["workplace_assistant"]) == (10, 10)
    assert turns["example_multi_step"] == 40 and turns["workplace_assistant"] == 38 and turns["blackjack"] > 10


@pytest.mark.skipif(not has_environment_servers(), reason="needs NeMo Gym 0.7 or newer")
def test_health_is_observed_and_captured_ids_are_the_engines(tmp_path: Path, short_directory: Path):
    """Each row goes to our agent, and to Gym's simple agent, whose ids Gym captures at our model server."""
    ours = read_lines(gym_root() / "environments/prorl_math/data/example.jsonl")
    theirs = [row | {"agent_ref": row["agent_ref"] | {"name": "simple"}} for row in ours]
    agent = {
        "resources_server": {"type": "resources_servers", "name": "prorl_rollout"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
        "entrypoint": "app.py",
        "max_steps": 20,
        "token_id_capture": True,
    }
    relay = {"entrypoint": "app.py", "agent_server": {"type": "responses_api_agents", "name": "simple"}}
    servers: list[Server] = [
        ("responses_api_agents", "simple_agent", "simple"),
        ("environment_servers", "legacy_agent", "simple_environment"),
        ("resources_servers", "prorl_rollout", "prorl_rollout"),
        ("responses_api_agents", "prorl_rollout_agent", "prorl_math_agent"),
        ("environment_servers", "legacy_agent", "prorl_math_environment_server"),
    ]
    results = run_foreign(
        tmp_path,
        short_directory,
        [*ours, *theirs],
        servers,
        configs=["environments/prorl_math/config.yaml"],
        keys={"simple": agent, "simple_environment": relay},
        repeats=1,
        disable_health_check=False,
        observability_enabled=True,
        model_call_capture_dir=str(short_directory / "calls"),
        token_id_capture={"enabled": True, "dir": str(short_directory / "ids")},
    )
    assert {one["reward"] for one in results} == {1.0}
    (file,) = tmp_path.rglob("*verdicts*.jsonl")
    verdicts = {one["rollout_id"]: one for one in read_lines(file)}
    for result in results:
        trajectory = result["ng_trajectory"]
        verdict = verdicts[trajectory["rollout_id"]]
        assert (verdict["verdict"], verdict["findings"]) == ("healthy", []), result["agent_ref"]["name"]
        sampled = [len(item.get("generation_token_ids", ())) for item in result["response"]["output"]]
        counted = [call["token_stats"]["completion_tokens"] for call in trajectory["model_calls"]]
        assert counted == [count for count in sampled if count]
        if result["agent_ref"]["name"] == "prorl_math_agent":
            assert [gap["code"] for gap in trajectory["gaps"]] == [
                "turn_timestamps_unavailable",
                "model_call_capture_no_records",
            ]
            assert [turn["resolved"] for turn in trajectory["turns"]][-1] is True
