"""NeMo Gym's own simple agent over our model server and our rollout server's tools. Slow: it starts Gym and Ray."""

import json
from pathlib import Path

import pytest
from foreign_run import agent_server, check_ids, run_foreign

from prorl_gym.cli.installation import gym_root

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(300)]

ENVIRONMENTS = ("math", "stem", "code", "swe", "taskdir")


def test_simple_agent_solves_rows_of_every_environment(tmp_path: Path, short_directory: Path):
    folder = gym_root() / "environments"
    files = [folder / f"prorl_{environment}/data/example.jsonl" for environment in ENVIRONMENTS]
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["agent_ref"]["name"] = "simple"
    servers, keys = agent_server("simple_agent", "simple", max_steps=20)
    servers.append(("resources_servers", "prorl_rollout", "prorl_rollout"))
    config = "resources_servers/prorl_rollout/configs/prorl_rollout.yaml"
    run = run_foreign(tmp_path, short_directory, rows, servers, configs=[config], keys=keys, repeats=1)
    check_ids(run)
    bad = [(one["task"]["id"], one["reward"], one.get("failure_reason")) for one in run.results if one["reward"] != 1.0]
    assert not bad
    for environment in ENVIRONMENTS:
        outputs = [one["response"]["output"] for one in run.results if one["environment"] == environment]
        observations = [str(item["output"]) for items in outputs for item in items if "output" in item]
        assert observations and not any("Not Found" in text for text in observations), environment
