"""NeMo Gym's servers for ``bench peers``, started by ``gym env start``: our math environment and its own.

Run as a program, so that what Gym and Ray leave behind ends with it:
``_rollout_gym.py ENGINE_URL DIRECTORY`` prints where each environment's ``/run`` is and serves until its input ends.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from prorl_gym.cli.demo.process_supervisor import ProcessSupervisor
from prorl_gym.cli.demo.stack import HOST, DemoFolders, DemoStack, PolicyEndpoint, free_ports
from prorl_gym.sandbox.syscalls import set_child_subreaper

_SERVERS = {
    "prorl_rollout": ("resources_servers", "prorl_rollout"),
    "prorl_math_agent": ("responses_api_agents", "prorl_rollout_agent"),
    "prorl_math_environment_server": ("environment_servers", "legacy_agent"),
    "math_with_code": ("resources_servers", "math_with_code"),
    "math_with_code_simple_agent": ("responses_api_agents", "simple_agent"),
    "math_with_code_environment_server": ("environment_servers", "legacy_agent"),
    "policy_model": ("responses_api_models", "vllm_model"),
}
_CONFIGS = (
    "environments/prorl_math/config.yaml",
    "resources_servers/math_with_code/configs/math_with_code.yaml",
    "responses_api_models/vllm_model/configs/vllm_model.yaml",
)


class BenchStack(DemoStack):
    """The demo's way to start Gym, with the servers of the bench."""

    servers: Mapping[str, tuple[str, str]] = _SERVERS
    """Kind and implementation by the server's name."""
    configs: Sequence[str] = _CONFIGS
    inference: Mapping[str, Any] = {}
    """Settings of our service beside its defaults."""

    def __init__(self, supervisor: ProcessSupervisor, folders: DemoFolders) -> None:
        super().__init__(supervisor, folders)
        self.addresses: dict[str, str] = {}

    def write_config(self, engines: PolicyEndpoint) -> dict[str, str]:
        """See ``DemoStack``."""
        head, *ports = free_ports(1 + len(self.servers))
        self._head_url = f"http://{HOST}:{head}"
        self.addresses = {name: f"http://{HOST}:{port}" for name, port in zip(self.servers, ports, strict=True)}
        config: dict[str, Any] = {
            "config_paths": list(self.configs),
            **self._base_config(engines, head),
            "disable_health_check": True,  # it reads model calls made through Gym; ours go to the engine directly
            "prorl_service": {
                "ledger": {"path": str(self._folders.scratch / "ledger.sqlite")},
                "sandbox": {"backend": "userns", "scratch": str(self._folders.scratch / "sandboxes")},
                "runner": {"run": 128},
                "inference": dict(self.inference),
            },
        }
        for (name, (kind, implementation)), port in zip(self.servers.items(), ports, strict=True):
            config[name] = {kind: {implementation: {"host": HOST, "port": port}}}
        self._config.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        return {name: f"{address}/readyz" for name, address in self.addresses.items()}


async def serve(url: str, directory: Path, stack_class: type[BenchStack] = BenchStack) -> None:
    """Start the servers, print their addresses, serve until the input ends."""
    set_child_subreaper()
    supervisor = ProcessSupervisor(directory)
    stack = stack_class(supervisor, DemoFolders(directory, directory))
    try:
        await stack.start_gym(PolicyEndpoint((url,), "m", "small"))
        print(json.dumps(stack.addresses), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await supervisor.stop_all()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
