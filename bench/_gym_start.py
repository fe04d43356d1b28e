"""One ``gym env start``, from the command to the moment at which Gym reports that all servers are ready.

Run as a program, so that what Gym and Ray leave behind ends with it: ``_gym_start.py NAME DIRECTORY`` starts the
servers of one environment, prints the figures as JSON and stops them. ``measure`` runs it.
"""

import asyncio
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import _processes
import yaml

from prorl_gym.cli.demo.process_supervisor import LoggedProcess, ProcessSupervisor
from prorl_gym.cli.demo.stack import HOST, DemoFolders, DemoStack, PolicyEndpoint, free_ports
from prorl_gym.sandbox.syscalls import set_child_subreaper

OURS, SMALLEST = "prorl_math", "example_single_tool_call"
"""Our environment; the smallest that ships with Gym: one tool that returns a constant, and a check for its call."""

_SERVERS = {
    OURS: {
        "prorl_rollout": ("resources_servers", "prorl_rollout"),
        "prorl_math_agent": ("responses_api_agents", "prorl_rollout_agent"),
        "prorl_math_environment_server": ("environment_servers", "legacy_agent"),
    },
    SMALLEST: {
        "example_single_tool_call": ("resources_servers", "example_single_tool_call"),
        "example_single_tool_call_simple_agent": ("responses_api_agents", "simple_agent"),
        "example_single_tool_call_environment_server": ("environment_servers", "legacy_agent"),
    },
}
_MODEL = {"policy_model": ("responses_api_models", "vllm_model")}
"""The same server for both: ``simple_agent`` needs one, and a user of ours may have one."""


@dataclass(frozen=True, slots=True)
class StartFigures:
    """Seconds of one start."""

    listening: float
    """Until every server answers."""
    ready: float
    """Until Gym says so; it looks every three seconds."""
    cpu: float
    """CPU time of the servers until then, without Gym's command and Ray."""


class StartStack(DemoStack):
    """The servers of one environment, as ``gym env start`` starts them."""

    def __init__(self, supervisor: ProcessSupervisor, folders: DemoFolders, environment: str) -> None:
        super().__init__(supervisor, folders)
        self.began = 0.0
        self._environment = environment

    def write_config(self, engines: PolicyEndpoint) -> dict[str, str]:
        """Write the configuration; return the address of each server's readiness."""
        servers = _SERVERS[self._environment] | _MODEL
        head, *ports = free_ports(1 + len(servers))
        self._head_url = f"http://{HOST}:{head}"
        config: dict[str, Any] = {
            "config_paths": [
                f"environments/{self._environment}/config.yaml",
                "responses_api_models/vllm_model/configs/vllm_model.yaml",
            ],
            **self._base_config(engines, head),
        }
        for (name, (kind, implementation)), port in zip(servers.items(), ports, strict=True):
            config[name] = {kind: {implementation: {"host": HOST, "port": port}}}
        self._config.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        return {name: f"http://{HOST}:{port}/livez" for name, port in zip(servers, ports, strict=True)}

    async def _start(self, name: str, command: str, *arguments: str) -> LoggedProcess:
        self.began = time.perf_counter()
        return await super()._start(name, command, *arguments)


async def measure(environment: str, directory: Path) -> StartFigures:
    """Start the servers of an environment once, in a process of its own.

    Raises:
        RuntimeError: they did not become ready.
    """
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, environment, str(directory)), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await child.communicate()
    if child.returncode:
        raise RuntimeError(f"`gym env start` of {environment} failed; its log is above")
    return StartFigures(**json.loads(output.splitlines()[-1]))


async def _start_once(environment: str, directory: Path) -> StartFigures:
    set_child_subreaper()
    supervisor = ProcessSupervisor(directory)
    stack = StartStack(supervisor, DemoFolders(directory, directory), environment)
    answered: list[float] = []
    try:
        engines = await stack.start_oracles(1)
        await stack.start_gym(engines, lambda _: answered.append(time.perf_counter()))
        ready, cpu = time.perf_counter(), _processes.cpu_seconds(_server_processes())
    finally:
        await supervisor.stop_all()
    return StartFigures(max(answered) - stack.began, ready - stack.began, cpu)


def _server_processes() -> list[int]:
    """Return the servers, which are those that were given Gym's configuration, and their children."""
    found: list[int] = []
    for pid in _processes.process_tree(os.getpid()):
        with suppress(OSError):  # it has ended, or is a sandbox
            if b"NEMO_GYM_CONFIG_PATH=" in Path(f"/proc/{pid}/environ").read_bytes():
                found += _processes.process_tree(pid)
    return [*dict.fromkeys(found)]


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    folder.mkdir()
    print(json.dumps(asdict(asyncio.run(_start_once(sys.argv[1], folder)))))
