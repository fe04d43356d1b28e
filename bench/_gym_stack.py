"""NeMo Gym's servers as ``gym env start`` starts them: one start for ``bench gym``, and the servers of ``bench peers``.

Run as a program, so that what Gym and Ray leave behind ends with it. ``_gym_stack.py start NAME DIRECTORY`` starts the
servers of one environment, prints the figures as JSON and stops them; ``measure`` runs it. ``_gym_stack.py serve
ENGINE_URL DIRECTORY`` prints where each server of our math environment and of Gym's own is, and serves until its input
ends.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from _processes import cpu_seconds, process_tree

from prorl_gym.cli.demo.stack import (
    HOST,
    DemoFolders,
    DemoStack,
    LoggedProcess,
    PolicyEndpoint,
    ProcessSupervisor,
)
from prorl_gym.free_ports import free_ports
from prorl_gym.sandbox.syscalls import set_child_subreaper

OURS, SMALLEST = "prorl_math", "example_single_tool_call"
"""Our environment; the smallest that ships with Gym: one tool that returns a constant, and a check for its call."""
_MATH_WITH_CODE = "math_with_code"
_CONFIGS = {
    OURS: "environments/prorl_math/config.yaml",
    SMALLEST: "environments/example_single_tool_call/config.yaml",
    _MATH_WITH_CODE: "resources_servers/math_with_code/configs/math_with_code.yaml",
}
_MODEL_CONFIG = "responses_api_models/vllm_model/configs/vllm_model.yaml"


def _servers(environment: str) -> dict[str, tuple[str, str]]:
    if environment == OURS:
        own = {
            "prorl_rollout": ("resources_servers", "prorl_rollout"),
            "prorl_math_agent": ("responses_api_agents", "prorl_rollout_agent"),
        }
    else:
        own = {
            environment: ("resources_servers", environment),
            f"{environment}_simple_agent": ("responses_api_agents", "simple_agent"),
        }
    return {**own, f"{environment}_environment_server": ("environment_servers", "legacy_agent")}


@dataclass(frozen=True, slots=True)
class StartFigures:
    """Seconds of one start."""

    listening: float
    """Until every server answers."""
    ready: float
    """Until Gym says so; it looks every three seconds."""
    cpu: float
    """CPU time of the servers until then, without Gym's command and Ray."""


class BenchStack(DemoStack):
    """The demo's way to start Gym, with the servers of some environments, and a model server for all of them."""

    def __init__(self, directory: Path, environments: Sequence[str], **config: Any) -> None:
        self.supervisor = ProcessSupervisor(directory)
        super().__init__(self.supervisor, DemoFolders(directory, directory))
        self.began = 0.0
        self.addresses: dict[str, str] = {}
        self._environments = environments
        self._more = config

    def write_config(self, engines: PolicyEndpoint) -> dict[str, str]:
        servers = {name: server for each in self._environments for name, server in _servers(each).items()}
        servers["policy_model"] = ("responses_api_models", "vllm_model")
        head, *ports = free_ports(1 + len(servers))
        self._head_url = f"http://{HOST}:{head}"
        self.addresses = {name: f"http://{HOST}:{port}" for name, port in zip(servers, ports, strict=True)}
        config: dict[str, Any] = {
            "config_paths": [*(_CONFIGS[each] for each in self._environments), _MODEL_CONFIG],
            **self._base_config(engines, head),
            **self._more,
        }
        for (name, (kind, implementation)), port in zip(servers.items(), ports, strict=True):
            config[name] = {kind: {implementation: {"host": HOST, "port": port}}}
        self._config.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        return {name: f"{address}/livez" for name, address in self.addresses.items()}

    async def _start(self, name: str, command: str, *arguments: str) -> LoggedProcess:
        self.began = time.perf_counter()
        return await super()._start(name, command, *arguments)


async def measure(environment: str, directory: Path) -> StartFigures:
    """Start the servers of an environment once, in a process of its own."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "start", environment, str(directory)), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await child.communicate()
    if child.returncode:
        raise RuntimeError(f"`gym env start` of {environment} failed; its log is above")
    return StartFigures(**json.loads(output.splitlines()[-1]))


async def _start_once(environment: str, directory: Path) -> StartFigures:
    stack = BenchStack(directory, [environment])
    answered: list[float] = []
    try:
        engines = await stack.start_oracles(1)
        await stack.start_gym(engines, lambda _: answered.append(time.perf_counter()))
        ready, cpu = time.perf_counter(), cpu_seconds(_server_processes())
    finally:
        await stack.supervisor.stop_all()
    return StartFigures(max(answered) - stack.began, ready - stack.began, cpu)


def _server_processes() -> list[int]:
    """Return the servers, which are those that were given Gym's configuration, and their children."""
    found: list[int] = []
    for pid in process_tree(os.getpid()):
        with suppress(OSError):  # it has ended, or is a sandbox
            if b"NEMO_GYM_CONFIG_PATH=" in Path(f"/proc/{pid}/environ").read_bytes():
                found += process_tree(pid)
    return [*dict.fromkeys(found)]


async def _serve(url: str, directory: Path) -> None:
    service = {
        "ledger": {"path": str(directory / "ledger.sqlite")},
        "sandbox": {"backend": "userns", "scratch": str(directory / "sandboxes")},
        "runner": {"run": 128},
    }
    # Gym's health check reads model calls made through Gym; ours go to the engine directly.
    stack = BenchStack(directory, [OURS, _MATH_WITH_CODE], disable_health_check=True, prorl_service=service)
    try:
        await stack.start_gym(PolicyEndpoint((url,), "m", "small"))
        print(json.dumps(stack.addresses), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await stack.supervisor.stop_all()


if __name__ == "__main__":
    set_child_subreaper()
    what, given, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    folder.mkdir(exist_ok=True)
    if what == "serve":
        asyncio.run(_serve(given, folder))
    else:
        print(json.dumps(asdict(asyncio.run(_start_once(given, folder)))))
