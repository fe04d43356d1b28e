from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from prorl_gym._bootstrap import has_environment_servers
from prorl_gym.cli.installation import server_roots

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted((REPOSITORY / "recipes/nemo_rl").glob("*.yaml"))
BASE_KEYS = {
    line
    for line in (Path(__file__).parent / "nemo_rl_base_keys.txt").read_text().splitlines()
    if line and not line.startswith("#")
}

# Why a recipe's keys may differ from the base recipe's.
ADDED = {
    "env.nemo_gym.use_absolute_ip",  # sandboxes and other nodes call back
    "env.nemo_gym.prorl_math_agent.responses_api_agents.prorl_rollout_agent.num_generations",  # of our own server
    "env.nemo_gym.prorl_service.inference.engine",  # NeMo-RL's server takes messages, no ids
}
DROPPED = {
    "env.nemo_gym.code_gen.resources_servers.code_gen.num_processes",  # configures a server that we do not use
    # of the base recipe's model only:
    "env.nemo_gym.policy_model.responses_api_models.vllm_model.extra_body.chat_template_kwargs.enable_thinking",
    "policy.generation.vllm_kwargs.mamba_ssm_cache_dtype",
}


def load(recipe: Path) -> dict[str, Any]:
    return yaml.safe_load(recipe.read_text())


def leaves(tree: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix


def test_there_is_a_recipe():
    assert [recipe.name for recipe in RECIPES] == ["dapo_math_qwen3_4b.yaml"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_key_set_is_that_of_the_base_recipe(recipe: Path):
    keys = set(leaves(load(recipe)))
    assert keys - BASE_KEYS == ADDED
    assert BASE_KEYS - keys == DROPPED


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_what_gym_demands_of_the_trainer(recipe: Path):
    config = load(recipe)
    vllm = config["policy"]["generation"]["vllm_cfg"]
    assert vllm["async_engine"] is True
    assert vllm["expose_http_server"] is True
    assert config["grpo"]["max_val_samples"] is None
    assert config["policy"]["generation"]["stop_strings"] is None


@pytest.mark.gym
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_gym_config_resolves(recipe: Path):
    paths = load(recipe)["env"]["nemo_gym"]["config_paths"]
    missing = [path for path in paths if not any((root / path).is_file() for root in server_roots())]
    assert not missing


def composed(recipe: Path) -> tuple[Any, Any]:
    """Return Gym's parser and what it makes of the recipe's section."""
    from nemo_gym.global_config import GlobalConfigDictParser, GlobalConfigDictParserConfig
    from omegaconf import OmegaConf

    section = load(recipe)["env"]["nemo_gym"]
    section.pop("is_trajectory_collection")
    section["prorl_math_agent"]["responses_api_agents"]["prorl_rollout_agent"]["num_generations"] = 8
    injected = {"policy_base_url": ["http://127.0.0.1:1/v1"], "policy_model_name": "m", "policy_api_key": "k"}
    parser = GlobalConfigDictParser()
    resolved = parser.parse(
        GlobalConfigDictParserConfig(
            initial_global_config_dict=OmegaConf.create(section | injected),
            skip_load_from_cli=True,
            skip_load_from_dotenv=True,
            offline=True,
        )
    )
    return parser, resolved


@pytest.mark.gym
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_gym_composes_the_servers_of_the_recipe(recipe: Path):
    parser, resolved = composed(recipe)
    servers = {server.name for server in parser.filter_for_server_instance_configs(resolved)}
    assert {"policy_model", "prorl_rollout", "prorl_math_agent"} <= servers
    assert ("prorl_math_environment_server" in servers) == has_environment_servers()
    assert resolved.prorl_rollout.resources_servers.prorl_rollout.engines == ["http://127.0.0.1:1/v1"]


@pytest.mark.gym
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_rollout_service_speaks_to_nemo_rl_s_own_server(recipe: Path):
    from omegaconf import OmegaConf

    from prorl_gym.gym_root.resources_servers.prorl_rollout.embedded_service import service_config

    _, resolved = composed(recipe)
    rollout = resolved.prorl_rollout.resources_servers.prorl_rollout
    service = OmegaConf.to_container(rollout.service, resolve=True)
    config = service_config(list(rollout.engines), rollout.model, "small", service)
    assert config.inference.engine == "chat_prefix"
