"""Every recipe that ``recipes/nemo_rl/make.py`` can write: its keys, and the rules of NeMo-RL that no key shows.

The lists below ``nemo_rl_keys`` are those of NeMo-RL's own recipes: ``gym`` is what GRPO, DAPO and asynchronous GRPO
build on, ``native`` and ``single_controller`` (an overlay over it) are what the SingleController's overlay builds on.
``recipes/nemo_rl/check.py`` validates the recipes by NeMo-RL's own code.
"""

import os
import re
import runpy
import sys
from collections.abc import Iterator
from itertools import combinations as combinations_of
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from nemo_rl_recipes import FOLDER, MAKE, composed, written

from prorl_gym.cli.installation import server_roots
from prorl_gym.gym_roots import component_roots, has_environment_servers

COMBINATIONS = list(product(MAKE.ALGORITHMS, MAKE.DOMAINS, MAKE.SIZES))
WHOLE = [one for one in COMBINATIONS if one[0] != "sc"]
OVERLAYS = [one for one in COMBINATIONS if one[0] == "sc"]
ON_GYM = [one for one in COMBINATIONS if one[2] == "4b" and (one[0] == "dapo" or one[1] == "blend")]
"""Each domain and each algorithm; the size changes nothing that NeMo Gym reads."""
PAIRWISE = {
    (algorithm, domain, sizes[(row + column) % len(sizes)])
    for sizes in [list(MAKE.SIZES)]
    for row, algorithm in enumerate(MAKE.ALGORITHMS)
    for column, domain in enumerate(MAKE.DOMAINS)
} | set(MAKE.COMMITTED)
"""Every two values of different settings stand together in one of these: the others wait for ``make release-check``."""

# Why a recipe's keys may differ from the base recipe's.
DROPPED = {
    "env.nemo_gym.code_gen.resources_servers.code_gen.num_processes",  # configures a server that we do not use
    # of the base recipe's model only:
    "env.nemo_gym.policy_model.responses_api_models.vllm_model.extra_body.chat_template_kwargs.enable_thinking",
    "policy.generation.vllm_kwargs.mamba_ssm_cache_dtype",
}
ADDED = {
    "env.nemo_gym.use_absolute_ip",  # sandboxes and other nodes call back
    "env.nemo_gym.skip_venv_if_present",  # our servers run in an environment that has prorl-gym
    "policy.megatron_cfg.moe_per_layer_logging",  # NeMo-RL's configuration model requires what its recipe lacks
}
OUR_SERVERS = re.compile(r"env\.nemo_gym\.prorl_\w+\.")


def named(combinations: list[tuple[str, str, str]]) -> Any:
    cases = [pytest.param(one, marks=() if one in PAIRWISE else pytest.mark.release) for one in combinations]
    return pytest.mark.parametrize("combination", cases, ids="-".join)


def test_every_two_settings_stand_together_in_a_recipe_that_is_checked():
    for one in COMBINATIONS:
        for left, right in combinations_of(range(len(one)), 2):
            assert any((other[left], other[right]) == (one[left], one[right]) for other in PAIRWISE)


def base_keys(name: str) -> set[str]:
    lines = (Path(__file__).parent / f"nemo_rl_keys/{name}.txt").read_text().splitlines()
    return {line for line in lines if not line.startswith("#")}


def leaves(tree: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix


def file_keys(combination: tuple[str, str, str]) -> set[str]:
    return set(leaves(written(*combination)))


def agents(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    section = config["env"]["nemo_gym"]
    named_agents = {name: block for name, block in section.items() if name.endswith("_agent")}
    return {name: block["responses_api_agents"]["prorl_rollout_agent"] for name, block in named_agents.items()}


def test_committed_recipes_are_those_of_the_template():
    wanted = {MAKE.recipe_name(*one) + ".yaml": MAKE.recipe(*one) for one in MAKE.COMMITTED}
    assert {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.yaml")} == wanted


def test_overlay_is_written_with_what_it_builds_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "new"
    monkeypatch.setattr(sys, "argv", ["make.py", "sc", "swe", "8b", "--output", str(folder)])
    runpy.run_path(str(FOLDER / "make.py"), run_name="__main__")
    assert sorted(file.name for file in folder.iterdir()) == ["async_grpo_swe_qwen3_8b.yaml", "sc_swe_qwen3_8b.yaml"]


@named(WHOLE)
def test_keys_are_those_of_the_base_recipe(combination: tuple[str, str, str]):
    keys, base = file_keys(combination), base_keys("gym")
    assert base - keys == DROPPED
    added = {key for key in keys - base if not OUR_SERVERS.match(key)}
    assert added == ADDED


@named(OVERLAYS)
def test_keys_of_the_overlay_are_those_of_its_base_recipes(combination: tuple[str, str, str]):
    keys = file_keys(combination) - base_keys("native") - base_keys("single_controller") - {"defaults"}
    assert all(OUR_SERVERS.match(key) and key.endswith(".on_failure") for key in keys)


@named(COMBINATIONS)
def test_published_hyper_parameters(combination: tuple[str, str, str]):
    config = composed(combination)
    assert (config["grpo"]["num_prompts_per_step"], config["grpo"]["num_generations_per_prompt"]) == (32, 8)
    optimizer = config["policy"]["megatron_cfg"]["optimizer"]
    assert optimizer["lr"] == optimizer["min_lr"] == 1e-6
    penalty = config["loss_fn"]["reference_policy_kl_penalty"]
    assert penalty == (0 if combination[0] == "dapo" else 1e-4)
    assert config["grpo"]["skip_reference_policy_logprobs_calculation"] is (penalty == 0)
    is_synchronous = combination[0] in ("grpo", "dapo")
    assert config["policy"]["train_global_batch_size"] == (64 if is_synchronous else 256)


@named(COMBINATIONS)
def test_turns_and_tokens_belong_to_the_rollout(combination: tuple[str, str, str]):
    config = composed(combination)
    assert config["grpo"]["max_rollout_turns"] == 1
    length = config["policy"]["max_total_sequence_length"]
    for agent in agents(config).values():
        assert agent["settings"]["max_turns"] == 50
        assert agent["settings"]["max_tokens"] == length
    assert config["policy"]["generation"]["vllm_cfg"]["max_model_len"] == length


@named(COMBINATIONS)
def test_what_gym_demands_of_the_trainer(combination: tuple[str, str, str]):
    config = composed(combination)
    generation = config["policy"]["generation"]
    assert generation["vllm_cfg"]["async_engine"] is True
    assert generation["vllm_cfg"]["expose_http_server"] is True
    assert (generation["stop_strings"], generation["stop_token_ids"], generation["top_k"]) == (None, None, None)
    assert config["grpo"]["max_val_samples"] is None
    # NeMo-RL writes its sampling into the rows, and its server asserts it: the agents' settings must not.
    assert all(not {"temperature", "top_p"} & set(agent["settings"]) for agent in agents(config).values())


@named(COMBINATIONS)
def test_groups_are_the_trainers(combination: tuple[str, str, str]):
    for name, agent in agents(composed(combination)).items():
        is_training = "validation" not in name
        assert agent.get("num_generations") == (8 if is_training else None)
        assert agent.get("evaluation", False) is not is_training


@named(COMBINATIONS)
def test_dapo_is_synchronous_and_stops_early_only_with_dynamic_sampling(combination: tuple[str, str, str]):
    config = composed(combination)
    grpo, is_dapo = config["grpo"], combination[0] == "dapo"
    assert grpo["use_dynamic_sampling"] is is_dapo
    assert grpo["batch_multiplier"] == (2 if is_dapo else 1)  # NeMo-RL asserts 1 without dynamic sampling
    assert grpo["use_leave_one_out_baseline"] is not is_dapo  # its deviation is per row: the filter would split groups
    assert grpo["overlong_filtering"] is is_dapo
    for agent in agents(config).values():
        early = agent.get("early_stop")
        assert agent.get("mask_truncated", False) is (is_dapo and not agent.get("evaluation", False))
        stops = is_dapo and combination[1] != "blend" and not agent.get("evaluation", False)
        assert (early is not None) is stops
        assert early is None or early["informative_groups"] == grpo["num_prompts_per_step"]


@named(COMBINATIONS)
def test_asynchronous_training_has_engines_of_its_own_and_corrects(combination: tuple[str, str, str]):
    config = composed(combination)
    is_async = combination[0] in ("async_grpo", "sc")
    generation, cluster = config["policy"]["generation"], config["cluster"]
    assert config["loss_fn"]["use_importance_sampling_correction"] is is_async
    assert generation["colocated"]["enabled"] is not is_async
    assert config["env"]["nemo_gym"]["prorl_service"]["inference"]["engine"] == "chat_prefix"
    gpus, nodes = cluster["gpus_per_node"], cluster["num_nodes"]
    resources = generation["colocated"]["resources"]
    if not is_async:
        train = gpus * nodes
        assert resources == {"gpus_per_node": None, "num_nodes": None}
    elif nodes == 1:
        train = gpus - resources["gpus_per_node"]
        assert resources["num_nodes"] == 1
    else:
        train = gpus * (nodes - resources["num_nodes"])
        assert resources["gpus_per_node"] == gpus
    assert 0 < train
    replicas, rest = divmod(train, config["policy"]["megatron_cfg"]["tensor_model_parallel_size"])
    assert rest == 0
    assert config["policy"]["train_global_batch_size"] % replicas == 0


@named(OVERLAYS)
def test_single_controller_sees_no_masks_and_has_one_update_a_step(combination: tuple[str, str, str]):
    config = composed(combination)
    grpo = config["grpo"]
    assert grpo["async_grpo"] is None
    assert grpo["val_period"] == 0
    assert config["data"]["validation"] is None
    assert config["checkpointing"]["metric_name"] is None
    assert config["data_plane"]["enabled"] is True
    batch = grpo["num_prompts_per_step"] * grpo["num_generations_per_prompt"]
    assert config["policy"]["train_global_batch_size"] == batch
    window = (config["async_rl"]["sampler"]["max_lookahead_versions"] + 1) * grpo["num_prompts_per_step"]
    assert config["async_rl"]["max_buffered_rollouts"] >= window  # fewer would deadlock it
    for agent in agents(config).values():
        assert agent.get("on_failure") == (None if agent.get("evaluation") else "raise")
        assert not agent.get("mask_truncated", False)
        assert "mask_overlong" not in agent["settings"]


@named(WHOLE)
def test_other_trainers_get_masked_rows(combination: tuple[str, str, str]):
    config = composed(combination)
    assert config["env"]["should_mask_flagged_samples"] is True
    assert all("on_failure" not in agent for agent in agents(config).values())


@pytest.mark.gym
@named(ON_GYM)
def test_gym_composes_the_servers_of_the_recipe(combination: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", os.pathsep.join(component_roots()))
    from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig
    from omegaconf import OmegaConf

    from prorl_gym.gym_root.resources_servers.prorl_rollout.app import service_config
    from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.app import ProrlRolloutAgentConfig

    section = dict(composed(combination)["env"]["nemo_gym"])
    del section["is_trajectory_collection"]  # NeMo-RL's own
    for path in section["config_paths"]:
        assert any((root / path).is_file() for root in server_roots())
    injected = {"policy_base_url": ["http://127.0.0.1:1/v1"], "policy_model_name": "m", "policy_api_key": "k"}
    parser = GlobalConfigDictParser()
    config = parser.parse(
        GlobalConfigDictParserConfig(
            initial_global_config_dict=OmegaConf.create(section | injected),
            skip_load_from_cli=True,
            skip_load_from_dotenv=True,
            offline=True,
        )
    )
    instances = {server.name for server in parser.filter_for_server_instance_configs(config)}
    names = MAKE.DOMAINS[combination[1]].environments
    assert {"policy_model", "prorl_rollout"} <= instances
    for name in names:
        assert {f"prorl_{name}_agent", f"prorl_{name}_validation_agent"} <= instances
        assert (f"prorl_{name}_environment_server" in instances) == has_environment_servers()
        for agent in (f"prorl_{name}_agent", f"prorl_{name}_validation_agent"):
            block: Any = OmegaConf.to_container(config[agent].responses_api_agents.prorl_rollout_agent, resolve=True)
            profile = ProrlRolloutAgentConfig(**block, name=agent).profile()
            assert profile.settings.max_turns == 50
            assert (profile.early_stop is not None) == ("early_stop" in block)
    rollout = config.prorl_rollout.resources_servers.prorl_rollout
    assert rollout.engines == ["http://127.0.0.1:1/v1"]
    service = OmegaConf.to_container(rollout.service, resolve=True)
    checked = service_config(list(rollout.engines), rollout.model, "small", service)
    assert checked.inference.engine == "chat_prefix"
    assert checked.runner.run == MAKE.DOMAINS[combination[1]].running
