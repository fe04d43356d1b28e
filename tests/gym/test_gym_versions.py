"""What differs between the versions of NeMo Gym, as far as one of them, or none, is enough to see it.

`.ci/gym-versions` runs all of them.
"""

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rollout_samples import rollout as sample_rollout

from prorl_gym.cli.demo.stack import DemoFolders, DemoStack, PolicyEndpoint, ProcessSupervisor
from prorl_gym.cli.installation import gym_root
from prorl_gym.gym_roots import component_roots
from prorl_gym.inference.tokens.prompt_builder import function_schema
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.oracle.oracle_policy import OraclePolicy, example_files, load_rows
from prorl_gym.trainers.gym_result import to_gym_result
from prorl_gym.trainers.nemo_rl import check_result
from prorl_gym.trainers.responses_items import messages_from_items

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENTS = ("code", "math", "stem", "swe", "taskdir")


def composed(config: str) -> dict[str, Any]:
    """The blocks of a configuration and of those that it includes, each from the first root that has it."""
    path = next(path for root in component_roots() if (path := Path(root) / config).exists())
    blocks = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    included = [composed(other) for other in blocks.pop("config_paths", [])]
    return {name: block for each in [*included, blocks] for name, block in each.items()}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_only_a_gym_that_has_environment_servers_reads_of_them(name: str, known: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("prorl_gym.gym_roots.has_environment_servers", lambda: known)
    blocks = composed(f"environments/prorl_{name}/config.yaml")
    expected = {"prorl_rollout": "resources_servers", f"prorl_{name}_agent": "responses_api_agents"}
    if known:
        expected[f"prorl_{name}_environment_server"] = "environment_servers"
        agent = blocks[f"prorl_{name}_environment_server"]["environment_servers"]["legacy_agent"]["agent_server"]
        assert agent == {"type": "responses_api_agents", "name": f"prorl_{name}_agent"}
    assert {instance: next(iter(block)) for instance, block in blocks.items()} == expected


CHECK = SimpleNamespace(**runpy.run_path(str(REPOSITORY / ".ci/gym-versions")))


def test_ci_and_documentation_name_the_same_versions():
    *older, newest = CHECK.PINS
    assert f"| | {' | '.join([*older, newest])} |" in (REPOSITORY / "docs/gym.md").read_text(encoding="utf-8")
    assert f"NeMo Gym {', '.join(older)} and {newest}: " in (REPOSITORY / "docs/ci.md").read_text(encoding="utf-8")
    assert f".ci/gym-versions {older[0]};" in (REPOSITORY / ".ci/run").read_text(encoding="utf-8")


def test_what_ci_installs_beside_gym_is_pinned():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {re.split(r"[><=; ]", line)[0].lower() for line in project["dependencies"]} - {"nemo-gym"}
    pins = [line for line in CHECK.LOCK.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    pinned = {name.lower() for name, _, version in (line.partition("==") for line in pins) if version}
    assert len(pinned) == len(pins)
    assert wanted - {name.replace("_", "-") for name in pinned} == set()


def test_a_program_that_ends_before_it_is_ready_fails_with_its_log(tmp_path: Path):
    program = ("bash", "-c", "echo no such server; exit 3")
    with pytest.raises(CHECK.CheckError, match=r"(?s)ended with code 3.*no such server"):
        with CHECK.running(*program, folder=tmp_path, env={}, log=tmp_path / "log", ready=lambda: False):
            pytest.fail("it was never ready")


@pytest.mark.parametrize("known", [True, False])
def test_the_demo_waits_for_servers_that_this_gym_has(known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("prorl_gym.cli.demo.stack.has_environment_servers", lambda: known)
    stack = DemoStack(ProcessSupervisor(tmp_path), DemoFolders(tmp_path, tmp_path))
    ready = stack.write_config(PolicyEndpoint(("http://127.0.0.1:9/v1",), "m", "small"))
    config = yaml.safe_load((tmp_path / "demo.yaml").read_text(encoding="utf-8"))
    assert {name.endswith("_environment_server") for name in ready} == ({True, False} if known else {False})
    assert {url.rpartition("/")[2] for url in ready.values()} == {"readyz" if known else ""}
    assert set(ready) <= set(config)


@pytest.mark.gym
def test_sandbox_provider_without_terminals_in_gym():
    """As in 0.5.1, whose contract has no PTY."""
    script = (
        "from nemo_gym.sandbox.providers import base\n"
        "for name in [name for name in vars(base) if 'Pty' in name]: delattr(base, name)\n"
        "from nemo_gym.sandbox import create_provider\n"
        "print(create_provider({'prorl': {}}).name)"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert child.stdout.strip() == "prorl", child.stderr


@pytest.mark.gym
def test_no_fixture_where_gym_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from prorl_gym._gym_compat import verifier_fixture

    monkeypatch.setitem(sys.modules, "nemo_gym.verifier_fixture", None)
    assert verifier_fixture(object, object, tmp_path) is None


# --- example rollouts

CODEC = load_codec("small")
FILES = sorted(gym_root().glob("*/prorl_*/data/example_rollouts.jsonl"))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parents[1].name)
def test_rollouts_are_those_of_the_rows(file: Path):
    """The prompts, and what the oracle samples behind them. Gym asks a resources server for five, and for metrics.

    What needs Gym, the fields that it adds to a result, ``.ci/gym-versions`` compares.
    """
    policy = OraclePolicy(CODEC, load_rows(example_files()))
    rows, rollouts = rows_of(file.with_name("example.jsonl")), rows_of(file)
    metrics = json.loads(file.with_name("example_metrics.json").read_text(encoding="utf-8"))
    kind, name = file.parts[-4:-2]
    assert (metrics["Number of examples"], metrics["jsonl_fpath"]) == (5, f"{kind}/{name}/data/example.jsonl")
    assert [(rollout["reward"], rollout["mask_sample"]) for rollout in rollouts] == [(1.0, False)] * 5
    for row, rollout in zip(rows, rollouts, strict=True):
        check_result(rollout)
        ours = {key for key in rollout if not key.startswith("_ng_")}
        assert ours == {key for key in to_gym_result(sample_rollout(), row) if not key.startswith("_ng_")}
        assert {key: rollout[key] for key in row} == row
        params = row["responses_create_params"]
        calls = [item for item in rollout["response"]["output"] if "prompt_token_ids" in item]
        tools = [function_schema(tool) for tool in params["tools"]]
        assert calls[0]["prompt_token_ids"] == CODEC.encode_prompt(messages_from_items(params["input"]), tools)
        for call in calls:
            sampled = policy.complete_turn(call["prompt_token_ids"], seed=None, session="")
            assert call["generation_token_ids"] == sampled
            assert call["generation_log_probs"] == policy.synthetic_logprobs(call["prompt_token_ids"], sampled)
