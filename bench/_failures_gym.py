"""NeMo Gym's servers for ``bench failures``: two environments of ours and two of its own, as a trainer starts them.

``_failures_gym.py ENGINE_URL DIRECTORY``, as ``_rollout_gym.py``. Gym's model server returns token ids.
"""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from _failures_plan import CALL_SECONDS
from _rollout_gym import BenchStack, serve

from prorl_gym.cli.demo.stack import PolicyEndpoint


class FailuresStack(BenchStack):
    """The bench's way to start Gym, with more environments."""

    servers: Mapping[str, tuple[str, str]] = {
        **BenchStack.servers,
        "prorl_code_agent": ("responses_api_agents", "prorl_rollout_agent"),
        "prorl_code_environment_server": ("environment_servers", "legacy_agent"),
        "code_gen": ("resources_servers", "code_gen"),
        "code_gen_simple_agent": ("responses_api_agents", "simple_agent"),
        "code_gen_environment_server": ("environment_servers", "legacy_agent"),
    }
    configs = (
        *BenchStack.configs,
        "environments/prorl_code/config.yaml",
        "resources_servers/code_gen/configs/code_gen.yaml",
    )
    inference: Mapping[str, Any] = {"request_seconds": CALL_SECONDS}

    def write_config(self, engines: PolicyEndpoint) -> dict[str, str]:
        """See ``BenchStack``."""
        ready = super().write_config(engines)
        config = yaml.safe_load(self._config.read_text())
        config["policy_model"]["responses_api_models"]["vllm_model"]["return_token_id_information"] = True
        self._config.write_text(yaml.safe_dump(config, sort_keys=False))
        return ready


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2]), FailuresStack))
