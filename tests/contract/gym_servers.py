"""The rollout server and two of its agents as NeMo Gym starts them, over servers like NeMo-RL's.

Each is a process that runs the ``app.py`` which ships, with the service, sandboxes, environments and graders that it
starts by itself. Run as a program this is one of the servers.
"""

import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from gym_stack import HOST, GymStack

import prorl_gym
from prorl_gym._bootstrap import has_environment_servers

GYM_ROOT = Path(prorl_gym.__file__).parent / "gym_root"
HAS_RELAY = has_environment_servers()
"""Gym 0.7 and newer reach an agent through an environment server."""
GROUP_SIZE = 4
"""``num_generations`` of the agents."""


@dataclass
class ContractServers(GymStack):
    """See ``GymStack``. Agents are named after what they do with failures and groups; rows name their environments."""

    instances: ClassVar[Mapping[str, str]] = {
        "rollouts": "prorl_rollout",
        "mask": "masking_agent",
        "raise": "raising_agent",
        "stop": "stopping_agent",
        **({"relay": "relay"} if HAS_RELAY else {}),
    }
    program: ClassVar[str] = __file__
    engines: Sequence[str] = field(kw_only=True)
    template: Path = field(kw_only=True)

    def config(self) -> dict[str, Any]:
        def at(name: str, **keys: Any) -> dict[str, Any]:
            return {"entrypoint": "app.py", "host": HOST, "port": self.ports[name], **keys}

        def agent(name: str, **keys: Any) -> dict[str, Any]:
            rollouts = {"type": "resources_servers", "name": "prorl_rollout"}
            keys |= {"resources_server": rollouts, "num_generations": GROUP_SIZE}
            return {"responses_api_agents": {"prorl_rollout_agent": at(name, **keys)}}

        service = {
            "inference": {"engine": "chat_prefix", "chat_template": str(self.template)},
            "retry": {"attempts": 2, "pause_seconds": 0.05},
            "ledger": {"path": str(self.folder / "ledger.sqlite")},
        }
        served = {"engines": list(self.engines), "model": "m", "tokenizer": "small", "service": service}
        return {
            "head_server": {"host": HOST, "port": self.ports["head"]},
            "default_host": HOST,
            "dry_run": False,
            # as NeMo-RL sets them
            "global_aiohttp_connector_limit": 65536,
            "global_aiohttp_connector_limit_per_host": 16384,
            "prorl_rollout": {"resources_servers": {"prorl_rollout": at("rollouts", domain="agent", **served)}},
            "masking_agent": agent("mask", on_failure="mask"),
            "raising_agent": agent("raise", on_failure="raise"),
            "stopping_agent": agent("stop", early_stop={"informative_groups": 1}),
        } | ({"relay": self._relay(at)} if HAS_RELAY else {})

    def _relay(self, at: Any) -> dict[str, Any]:
        agent = {"type": "responses_api_agents", "name": "masking_agent"}
        return {"environment_servers": {"legacy_agent": at("relay", agent_server=agent)}}


def _serve(name: str) -> None:
    import nemo_gym.server_utils as gym

    # Before 0.7 every server starts Ray, and Gym's relay still does; none of these uses it.
    gym.initialize_ray = lambda: None
    apps = {"rollouts": "resources_servers/prorl_rollout", "relay": "environment_servers/legacy_agent"}
    folder = GYM_ROOT / apps.get(name, "responses_api_agents/prorl_rollout_agent")
    if name == "relay":
        folder = Path(str(find_spec("environment_servers.legacy_agent").origin)).parent  # type: ignore[union-attr]
    runpy.run_path(str(folder / "app.py"), run_name="__main__")


if __name__ == "__main__":
    _serve(sys.argv[1])
