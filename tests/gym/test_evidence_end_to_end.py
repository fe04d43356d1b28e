"""What Gym collects of rollouts of ours, and of its own agent over our model server. Slow: it starts Gym and Ray."""

import json
from pathlib import Path

import pytest
from foreign_run import agent_server, check_ids, read_lines, run_foreign

from prorl_gym._bootstrap import has_environment_servers
from prorl_gym.cli.installation import gym_root

pytestmark = [
    *(pytest.mark.gym, pytest.mark.release, pytest.mark.timeout(400)),
    pytest.mark.skipif(not has_environment_servers(), reason="needs NeMo Gym 0.7 or newer"),
]


def test_health_is_observed_and_captured_ids_are_the_engines(tmp_path: Path, short_directory: Path):
    """Each row goes to our agent, and to Gym's simple agent, whose ids Gym captures at our model server."""
    file = gym_root() / "environments/prorl_math/data/example.jsonl"
    ours = read_lines(file)
    theirs = [row | {"agent_ref": row["agent_ref"] | {"name": "simple"}} for row in ours]
    servers, keys = agent_server("simple_agent", "simple", max_steps=20, token_id_capture=True)
    servers += [
        ("resources_servers", "prorl_rollout", "prorl_rollout"),
        ("responses_api_agents", "prorl_rollout_agent", "prorl_math_agent"),
        ("environment_servers", "legacy_agent", "prorl_math_environment_server"),
    ]
    run = run_foreign(
        tmp_path,
        short_directory,
        [*ours, *theirs],
        servers,
        configs=["environments/prorl_math/config.yaml"],
        keys=keys,
        repeats=1,
        disable_health_check=False,
        observability_enabled=True,
        model_call_capture_dir=str(short_directory / "calls"),
        token_id_capture={"enabled": True, "dir": str(short_directory / "ids")},
    )
    check_ids(run)
    assert {one["reward"] for one in run.results} == {1.0}
    verdicts = {one["rollout_id"]: one for one in map(json.loads, verdict_lines(tmp_path))}
    for result in run.results:
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


def verdict_lines(folder: Path) -> list[str]:
    (file,) = folder.rglob("*verdicts*.jsonl")
    return file.read_text().splitlines()
