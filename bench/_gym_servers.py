"""Gym's servers for ``bench gym``, each in a process of its own, as Gym starts them, and the collector's side.

Agent and rollouts are ours, over an instant environment and policy. Beside them an empty agent only gives as many bytes
back: what a row costs there is Gym's own. Both have an environment server in front of them. ``running_servers`` starts
all. Run as a program this module is one of them, or the collector, which posts rows to ``/run`` with Gym's own client:

``latency URL PID...`` posts rows at random moments to every arm in turn, round after round, and prints the milliseconds
of each, and the CPU time of the processes; ``URL`` is a service of the same environment that is called directly.
``rate`` prints rows per second, ``crowd COUNT`` how long so many take that are posted at once.
"""

import asyncio
import gc
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import _service_work as work
from _load import closed_loop, poisson_arrivals
from _processes import cpu_seconds
from _programs import BenchRefusedError, last_words, wait_answering
from _service_server import TOKEN, submit_and_wait

from prorl_gym.cli.demo.stack import HOST
from prorl_gym.cli.installation import gym_root
from prorl_gym.client import Client
from prorl_gym.free_ports import free_ports

AGENT, RELAY = "bench_agent", "bench_environment_server"
EMPTY, EMPTY_RELAY = "bench_empty_agent", "bench_empty_environment_server"
ROLLOUTS = "prorl_rollout"
SERVERS = (ROLLOUTS, AGENT, RELAY, EMPTY, EMPTY_RELAY)
AGENT_SERVER = gym_root() / "responses_api_agents" / "prorl_rollout_agent" / "app.py"
AS_NEMO_RL = {"global_aiohttp_connector_limit": 65536, "global_aiohttp_connector_limit_per_host": 16384}
"""Connections of Gym's clients. The default of 1,024 for a host would not let thousands of rows in."""
DIRECT = "direct"
RATE = 100.0
ROUNDS, ROUND_SECONDS = (2, 1.5) if work.SHORT else (10, 4.0)
CALLERS = 64
CLOSED_LOOP = 200 if work.SHORT else 2000


def row(index: int) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "q" * 200}]},
        "agent_ref": {"type": "responses_api_agents", "name": AGENT},
        "environment": work.ENVIRONMENT,
        "task": {"id": index},
        "_ng_task_index": index,
        "_ng_rollout_index": 0,
    }


class Collector:
    """Posts rows, each with an index of its own."""

    def __init__(self) -> None:
        from nemo_gym.server_utils import ServerClient  # pyright: ignore[reportMissingTypeStubs]

        self._gym: Any = ServerClient.load_from_global_config()
        self._posted = 0

    async def post(self, server: str) -> dict[str, Any]:
        from nemo_gym.server_utils import get_response_json  # pyright: ignore[reportMissingTypeStubs]

        self._posted += 1
        answer = await self._gym.post(server_name=server, url_path="/run", json=row(self._posted))
        result = await get_response_json(answer)
        if answer.status != 200 or result["reward"] != 1.0:
            raise RuntimeError(f"{server} answers {answer.status}: {str(result)[:500]}")
        return result


async def latency(url: str, servers: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds by arm: of each row, and of the servers' CPU for a row, by round.

    The arms take turns, and see the same arrivals.
    """
    collector = Collector()
    async with Client(url, token=TOKEN, retry_seconds=0.0) as client:
        arms: dict[str, Callable[[], Awaitable[object]]] = {
            DIRECT: lambda: submit_and_wait(client, work.request("direct"))
        }
        arms |= {name: lambda name=name: collector.post(name) for name in (AGENT, RELAY, EMPTY, EMPTY_RELAY)}
        rows: dict[str, list[float]] = {name: [] for name in arms}
        cpu: dict[str, list[float]] = {name: [] for name in arms}

        async def measure(name: str, seconds: float) -> list[float]:
            async def act(due: float) -> list[float]:
                await arms[name]()
                return [(time.perf_counter() - due) * 1000]

            return await poisson_arrivals(RATE, act, seconds, work.SEED)

        for name in arms:
            await measure(name, 1.0)  # opens connections
        for first in range(ROUNDS):
            order = [*arms][first % len(arms) :] + [*arms][: first % len(arms)]
            for name in order:
                before = cpu_seconds(servers)
                measured = await measure(name, ROUND_SECONDS)
                rows[name] += measured
                cpu[name].append((cpu_seconds(servers) - before) * 1000 / len(measured))
    return {"rows": rows, "cpu": cpu}


async def rate() -> dict[str, list[float]]:
    """Return rows per second of callers that each post one row after the other, by arm; the arms take turns."""
    collector = Collector()

    found: dict[str, list[float]] = {name: [] for name in (AGENT, RELAY, EMPTY, EMPTY_RELAY)}
    for _ in range(work.RUNS):
        for name, rates in found.items():
            seconds = await closed_loop(CLOSED_LOOP, CALLERS, lambda name=name: collector.post(name))
            rates.append(CLOSED_LOOP / seconds)
    return found


async def crowd(count: int) -> dict[str, Any]:
    """Return the seconds in which rows posted at once are answered, by arm; and how many rollouts there were."""
    collector = Collector()
    seconds: dict[str, float] = {}
    rollouts: set[str] = set()
    for name in (EMPTY_RELAY, RELAY):
        began = time.perf_counter()
        results = await asyncio.gather(*(collector.post(name) for _ in range(count)))
        seconds[name] = time.perf_counter() - began
        rollouts = {str(result.get("prorl_rollout_id")) for result in results}
    return {"seconds": seconds, "answered": len(rollouts)}


def _collect(arguments: list[str]) -> Any:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    import nemo_gym.server_utils  # noqa: F401  # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]

    gc.freeze()  # a collection over what Gym imports would count as latency of the servers
    match arguments:
        case ["latency", url, *servers]:
            return asyncio.run(latency(url, [*map(int, servers)]))
        case ["rate"]:
            return asyncio.run(rate())
        case ["crowd", count]:
            return asyncio.run(crowd(int(count)))
        case _:
            raise SystemExit(__doc__)


def is_installed() -> bool:
    return find_spec("nemo_gym") is not None and find_spec("environment_servers") is not None


@dataclass(frozen=True, slots=True)
class GymServers:
    config: dict[str, Any]
    children: dict[str, asyncio.subprocess.Process]
    directory: Path

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self.children.values()]

    async def collect(self, *arguments: str) -> Any:
        """Run the collector as Gym's client of these servers; return the JSON that it prints."""
        child = await _spawn([__file__, *arguments], AGENT, self.config, self.directory / "client.log")
        output, _ = await child.communicate()
        if child.returncode:
            raise BenchRefusedError("Gym's client failed.", last_words(self.directory / "client.log"))
        return json.loads(output.splitlines()[-1])


@asynccontextmanager
async def running_servers(directory: Path) -> AsyncGenerator[GymServers]:
    """Run the servers for the block. Raises ``RuntimeError`` if one did not start."""
    config = _config()
    children: dict[str, asyncio.subprocess.Process] = {}
    try:
        for instance in SERVERS:
            script = [str(AGENT_SERVER)] if instance == AGENT else [__file__, instance]
            children[instance] = await _spawn(script, instance, config, directory / f"{instance}.log")
        for instance, child in children.items():
            await wait_answering(_address(config, instance) + "/livez", child, directory / f"{instance}.log")
        yield GymServers(config, children, directory)
    finally:
        for child in children.values():
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
                await child.wait()


def _config() -> dict[str, Any]:
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


def _serve_rollouts() -> None:
    import prorl_gym.gym_root.resources_servers.prorl_rollout.app as hosted
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
    match sys.argv[1:]:
        case ["bench_empty_agent"]:
            _serve_empty()
        case ["prorl_rollout"]:
            _serve_rollouts()
        case ["latency" | "rate" | "crowd", *_]:
            print(json.dumps(_collect(sys.argv[1:])))
        case _:
            _serve_relay()
