"""The rollout server, three of its agents and Gym's relay as NeMo Gym starts them, over servers like NeMo-RL's.

Each is a process that runs the ``app.py`` which ships, with the service, sandboxes, environments and graders that it
starts by itself, and with Gym's own configuration in its environment. Run as a program this is one of the servers.
"""

import asyncio
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp

import prorl_gym
from prorl_gym.cli.demo.stack import HOST
from prorl_gym.free_ports import free_ports
from prorl_gym.gym_roots import has_environment_servers

GYM_ROOT = Path(prorl_gym.__file__).parent / "gym_root"
HAS_RELAY = has_environment_servers()
"""Gym 0.7 and newer reach an agent through an environment server."""
GROUP_SIZE = 4
"""``num_generations`` of the agents."""
INSTANCES = {
    "rollouts": "prorl_rollout",
    "mask": "masking_agent",
    "raise": "raising_agent",
    "stop": "stopping_agent",
    **({"relay": "relay"} if HAS_RELAY else {}),
}
"""Names of the servers, and of their instances in Gym's configuration."""


@dataclass
class ContractServers:
    """Servers on loopback. ``start`` before use; ``stop`` kills what is left.

    Agents are named after what they do with failures and groups; rows name their environments.
    """

    folder: Path
    engines: Sequence[str]
    template: Path
    ports: dict[str, int] = field(default_factory=dict[str, int])
    children: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ports = dict(zip((*INSTANCES, "head"), free_ports(len(INSTANCES) + 1), strict=True))

    def url(self, name: str) -> str:
        return f"http://{HOST}:{self.ports[name]}"

    def config(self) -> dict[str, Any]:
        """Gym's whole configuration, as ``gym env start`` would have merged it."""

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
        config = {
            "head_server": {"host": HOST, "port": self.ports["head"]},
            "default_host": HOST,
            "dry_run": False,
            # as NeMo-RL sets them
            "global_aiohttp_connector_limit": 65536,
            "global_aiohttp_connector_limit_per_host": 16384,
            "prorl_rollout": {"resources_servers": {"prorl_rollout": at("rollouts", domain="agent", **served)}},
            "masking_agent": agent("mask", on_failure="mask"),
            "raising_agent": agent("raise", on_failure="raise"),
            "stopping_agent": agent("stop", early_stop={"informative_groups": 1}, repost_seconds=0.1),
        }
        if HAS_RELAY:
            reference = {"type": "responses_api_agents", "name": "masking_agent"}
            config["relay"] = {"environment_servers": {"legacy_agent": at("relay", agent_server=reference)}}
        return config

    async def start(self, *names: str) -> None:
        """Start these (all by default) and wait until each answers."""
        for name in names or INSTANCES:
            self._spawn(name)
        async with aiohttp.ClientSession() as session:
            for name in names or INSTANCES:
                await self._ready(session, name)

    def _spawn(self, name: str) -> None:
        keys = {"NEMO_GYM_CONFIG_DICT": json.dumps(self.config()), "NEMO_GYM_CONFIG_PATH": INSTANCES[name]}
        env = {**os.environ, **keys, "TMPDIR": str(self.folder)}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.children[name] = subprocess.Popen(
                [sys.executable, __file__, name], env=env, stdout=log, stderr=log, start_new_session=True
            )

    async def _ready(self, session: aiohttp.ClientSession, name: str) -> None:
        deadline = time.monotonic() + 90
        while True:
            try:
                async with session.get(self.url(name)):
                    return  # any answer: a server listens when it is ready
            except aiohttp.ClientError:
                pass
            if self.children[name].poll() is not None or time.monotonic() > deadline:
                log = (self.folder / f"{name}.log").read_text(errors="replace")
                raise AssertionError(f"{name} did not start:\n" + log[-4000:])
            await asyncio.sleep(0.1)  # another process: there is no event to wait for

    def kill(self, name: str) -> None:
        child = self.children.pop(name)
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@contextmanager
def contract_servers(folder: Path, engines: Sequence[str], template: Path) -> Iterator[ContractServers]:
    servers = ContractServers(folder, engines, template)
    try:
        yield servers
    finally:
        for name in tuple(servers.children):
            servers.kill(name)


async def post(url: str, rows: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Post rows to ``/run``, all of them at once."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def one(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            async with session.post(url + "/run", json=body) as answer:
                text = await answer.read()
                return answer.status, json.loads(text) if answer.status == 200 else {"text": text.decode()}

        return await asyncio.gather(*map(one, rows))


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
