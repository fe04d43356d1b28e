"""Gym's servers for ``bench gym``, each in a process of its own, as Gym starts them.

Agent and rollouts are ours, over an instant environment and policy. Beside them an empty agent only gives as many bytes
back: what a row costs there is Gym's own. Both have an environment server in front of them. ``running_servers`` starts
all. Run as a program this module is one of them.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import _service_work as work
import aiohttp

from prorl_gym.cli.demo.stack import HOST, free_ports
from prorl_gym.cli.installation import gym_root

AGENT, RELAY = "bench_agent", "bench_environment_server"
EMPTY, EMPTY_RELAY = "bench_empty_agent", "bench_empty_environment_server"
ROLLOUTS = "prorl_rollout"
SERVERS = (ROLLOUTS, AGENT, RELAY, EMPTY, EMPTY_RELAY)
AGENT_SERVER = gym_root() / "responses_api_agents" / "prorl_rollout_agent" / "app.py"
AS_NEMO_RL = {"global_aiohttp_connector_limit": 65536, "global_aiohttp_connector_limit_per_host": 16384}
"""Connections of Gym's clients. The default of 1,024 for a host would not let thousands of rows in."""


def is_installed() -> bool:
    """Whether there is a NeMo Gym here that has environment servers."""
    return find_spec("nemo_gym") is not None and find_spec("environment_servers") is not None


@dataclass(frozen=True, slots=True)
class GymServers:
    """The running servers."""

    config: dict[str, Any]
    children: dict[str, asyncio.subprocess.Process]
    directory: Path

    @property
    def pids(self) -> list[int]:
        """Their processes."""
        return [child.pid for child in self.children.values()]

    def peak_mb(self, instance: str) -> float:
        """Return the largest resident set that a server had."""
        status = Path(f"/proc/{self.children[instance].pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    async def run_program(self, script: Path, *arguments: str) -> Any:
        """Run a program as Gym's client of these servers; return the JSON that it prints.

        Raises:
            RuntimeError: it failed.
        """
        child = await _spawn([str(script), *arguments], AGENT, self.config, self.directory / "client.log")
        output, _ = await child.communicate()
        if child.returncode:
            raise RuntimeError("Gym's client failed:\n" + _tail(self.directory / "client.log"))
        return json.loads(output.splitlines()[-1])


@asynccontextmanager
async def running_servers(directory: Path) -> AsyncGenerator[GymServers]:
    """Run the servers for the block.

    Raises:
        RuntimeError: one did not start.
    """
    config = _config()
    children: dict[str, asyncio.subprocess.Process] = {}
    try:
        for instance in SERVERS:
            script = [str(AGENT_SERVER)] if instance == AGENT else [__file__, instance]
            children[instance] = await _spawn(script, instance, config, directory / f"{instance}.log")
        async with aiohttp.ClientSession() as session:
            for instance, child in children.items():
                await _wait_ready(session, _address(config, instance), child, directory / f"{instance}.log")
        yield GymServers(config, children, directory)
    finally:
        for child in children.values():
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
                await child.wait()


def _config() -> dict[str, Any]:
    """Return Gym's whole configuration, as ``gym env start`` would have merged it."""
    head, *ports = free_ports(1 + len(SERVERS))
    port_of: dict[str, int] = dict(zip(SERVERS, ports, strict=True))

    def at(instance: str, **keys: Any) -> dict[str, Any]:
        return {"entrypoint": "app.py", "host": HOST, "port": port_of[instance], **keys}

    def agent(instance: str) -> dict[str, Any]:
        server = {"type": "resources_servers", "name": ROLLOUTS}
        return {"responses_api_agents": {"prorl_rollout_agent": at(instance, resources_server=server)}}

    def relay(instance: str, to: str) -> dict[str, Any]:
        server = {"type": "responses_api_agents", "name": to}
        return {"environment_servers": {"legacy_agent": at(instance, agent_server=server)}}

    engines: dict[str, Any] = {"engines": f"http://{HOST}:9/v1", "model": "m", "tokenizer": "small", "service": {}}
    return {
        "head_server": {"host": HOST, "port": head},
        "default_host": HOST,
        "dry_run": False,
        **AS_NEMO_RL,
        ROLLOUTS: {"resources_servers": {ROLLOUTS: at(ROLLOUTS, domain="agent", **engines)}},
        AGENT: agent(AGENT),
        EMPTY: agent(EMPTY),
        RELAY: relay(RELAY, AGENT),
        EMPTY_RELAY: relay(EMPTY_RELAY, EMPTY),
    }


def _address(config: dict[str, Any], instance: str) -> str:
    (kind,) = config[instance].values()
    (server,) = kind.values()
    return f"http://{HOST}:{server['port']}"


async def _spawn(script: list[str], instance: str, config: dict[str, Any], log: Path) -> asyncio.subprocess.Process:
    environment = {
        **os.environ,
        "NEMO_GYM_CONFIG_DICT": json.dumps(config),
        "NEMO_GYM_CONFIG_PATH": instance,
        "TMPDIR": str(log.parent),  # the ledger of an embedded service is kept there
    }
    with log.open("wb") as errors:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, *script),
            env=environment,
            stdout=asyncio.subprocess.PIPE if log.stem == "client" else errors,
            stderr=errors,
            start_new_session=True,
        )


async def _wait_ready(session: aiohttp.ClientSession, url: str, child: asyncio.subprocess.Process, log: Path) -> None:
    deadline = time.monotonic() + 90
    while True:
        try:
            async with session.get(url + "/livez") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        if child.returncode is not None or time.monotonic() > deadline:
            raise RuntimeError("a server of Gym did not start:\n" + _tail(log))
        await asyncio.sleep(0.1)  # another process: there is no event to wait for


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]


def _serve_rollouts() -> None:
    import prorl_gym.gym_root.resources_servers.prorl_rollout.embedded_service as hosted
    from prorl_gym.api.build import LoadedService
    from prorl_gym.gym_root.resources_servers.prorl_rollout.app import ProrlRolloutServer
    from prorl_gym.inference.tokens.template_check import load_codec
    from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
    from prorl_gym.rollout.scheduling.runner import InProcessRunner
    from prorl_gym.rollout.service import RolloutService
    from prorl_gym.testing.rollout.fake_rollout import EmptyBackend, environment_lookup

    class Built:
        """What ``build_service`` would give, on the bench's environment."""

        render_prompt = LoadedService.render_prompt

        def __init__(self, service: RolloutService) -> None:
            self.service, self.backend, self.codec = service, EmptyBackend(), load_codec("small")

        async def close(self, *, drain: bool) -> None:
            await self.service.stop(drain=drain)

    async def build(config: Any) -> Built:
        config.state.mkdir(parents=True, exist_ok=True)
        find: Any = environment_lookup(work.TimedEnvironment())  # pyright: ignore[reportArgumentType]
        runner = InProcessRunner(find, work.RecordPolicySource(), EmptyBackend(), config.runner)
        service = RolloutService(await SqliteLedger.open(config.ledger_config), runner)
        await service.start()
        return Built(service)

    hosted.build_service = build  # pyright: ignore[reportAttributeAccessIssue]
    ProrlRolloutServer.run_webserver()


def _serve_empty() -> None:
    import orjson
    from fastapi import Request, Response

    from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.app import ProrlRolloutAgent

    result = orjson.dumps({"reward": 1.0, "logprobs": [-0.12345678901234567] * work.TOKENS})

    class EmptyAgent(ProrlRolloutAgent):
        """Answers at once."""

        async def run(self, request: Request) -> Response:
            orjson.loads(await request.body())
            return Response(result, media_type="application/json")

    EmptyAgent.run_webserver()


def _serve_relay() -> None:
    from environment_servers.legacy_agent import app  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]

    class Relay(app.LegacyAgentEnvironmentServer):
        """Gym's own; without Ray, of which a relay makes no use."""

        ray_enabled = False

    Relay.run_webserver()


if __name__ == "__main__":
    {ROLLOUTS: _serve_rollouts, EMPTY: _serve_empty}.get(sys.argv[1], _serve_relay)()
