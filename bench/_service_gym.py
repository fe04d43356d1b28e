"""The service inside NeMo Gym: its own servers and its own client, each in a process of its own, as Gym starts them.

``measure`` starts them. Run as a program this module is the agent's server, the rollouts' server, an agent that only
gives as many bytes back (the floor of Gym itself), or the client that posts rows to ``/run`` and prints what it saw.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import _service_work as work
import aiohttp

from prorl_gym.cli.demo.stack import free_ports

HOST = "127.0.0.1"
AGENT, FLOOR, ROLLOUTS = "bench_agent", "bench_floor", "prorl_rollout"


@dataclass(frozen=True, slots=True)
class ThroughGym:
    """What the client saw."""

    per_second: list[float]
    added_ms: list[float]
    """To each rollout at half of the target's load."""
    floor_per_second: list[float]
    floor_ms: list[float]
    bytes: int
    """Of one Gym result."""


def is_installed() -> bool:
    """Whether there is a NeMo Gym here."""
    return find_spec("nemo_gym") is not None


async def measure(directory: Path) -> ThroughGym:
    """Start the servers, let the client measure, end them.

    Raises:
        RuntimeError: a server did not start, or a row was not answered.
    """
    config = _config(*free_ports(4))
    children: list[asyncio.subprocess.Process] = []
    try:
        for instance in (ROLLOUTS, AGENT, FLOOR):
            children.append(await _start(instance, config, directory))
        async with aiohttp.ClientSession() as session:
            for instance, child in zip((ROLLOUTS, AGENT, FLOOR), children, strict=True):
                await _ready(session, _address(config, instance), child, directory / f"{instance}.log")
        client = await _start("client", config, directory)
        children.append(client)
        output, _ = await client.communicate()
        if client.returncode:
            raise RuntimeError("Gym's client failed:\n" + _tail(directory / "client.log"))
        return ThroughGym(**json.loads(output.splitlines()[-1]))
    finally:
        for child in children:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
                await child.wait()


def _config(rollouts: int, agent: int, floor: int, head: int) -> dict[str, Any]:
    """Return Gym's whole configuration, as ``gym env start`` would have merged it."""

    def at(port: int, **keys: Any) -> dict[str, Any]:
        return {"entrypoint": "app.py", "host": HOST, "port": port, **keys}

    engines: dict[str, Any] = {"engines": f"http://{HOST}:9/v1", "model": "m", "tokenizer": "small", "service": {}}
    server = {"type": "resources_servers", "name": ROLLOUTS}
    return {
        "head_server": {"host": HOST, "port": head},
        "default_host": HOST,
        "dry_run": False,
        ROLLOUTS: {"resources_servers": {ROLLOUTS: at(rollouts, domain="agent", **engines)}},
        AGENT: {"responses_api_agents": {"prorl_rollout_agent": at(agent, resources_server=server)}},
        FLOOR: {"responses_api_agents": {"prorl_rollout_agent": at(floor, resources_server=server)}},
    }


def _address(config: dict[str, Any], instance: str) -> str:
    (kind,) = config[instance].values()
    (server,) = kind.values()
    return f"http://{HOST}:{server['port']}"


async def _start(role: str, config: dict[str, Any], directory: Path) -> asyncio.subprocess.Process:
    environment = {
        **os.environ,
        "NEMO_GYM_CONFIG_DICT": json.dumps(config),
        "NEMO_GYM_CONFIG_PATH": role if role != "client" else AGENT,
        "TMPDIR": str(directory),  # the ledger of a hosted service is kept there
    }
    with (directory / f"{role}.log").open("wb") as log:
        output = asyncio.subprocess.PIPE if role == "client" else log
        return await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, role), env=environment, stdout=output, stderr=log, start_new_session=True
        )


async def _ready(session: aiohttp.ClientSession, url: str, child: asyncio.subprocess.Process, log: Path) -> None:
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
    from prorl_gym.gym_root.resources_servers.prorl_rollout.app import ProrlRolloutServer
    from prorl_gym.inference.tokens.template_check import load_codec
    from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
    from prorl_gym.rollout.scheduling.runner import InProcessRunner
    from prorl_gym.rollout.service import RolloutService
    from prorl_gym.testing.rollout.fake_rollout import EmptyBackend, environment_lookup

    class Built:
        """What ``build_service`` would give, on the bench's environment."""

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


def _serve_floor() -> None:
    import orjson
    from fastapi import Request, Response

    from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.app import ProrlRolloutAgent

    result = orjson.dumps({"reward": 1.0, "logprobs": [-0.12345678901234567] * work.TOKENS})

    class Floor(ProrlRolloutAgent):
        """Answers at once."""

        async def run(self, request: Request) -> Response:
            orjson.loads(await request.body())
            return Response(result, media_type="application/json")

    Floor.run_webserver()


def _row(index: int) -> dict[str, Any]:
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "q" * 200}]},
        "agent_ref": {"type": "responses_api_agents", "name": AGENT},
        "environment": work.ENVIRONMENT,
        "task": {"id": index},
        "_ng_task_index": index,
        "_ng_rollout_index": 0,
    }


async def _measure() -> ThroughGym:
    """Post rows with Gym's own client."""
    from _service_load import poisson_arrivals
    from nemo_gym.server_utils import ServerClient, get_response_json  # pyright: ignore[reportMissingTypeStubs]

    gym: Any = ServerClient.load_from_global_config()
    indices = iter(range(1 << 30))

    async def one(agent: str) -> int:
        answer = await gym.post(server_name=agent, url_path="/run", json=_row(next(indices)))
        result = await get_response_json(answer)
        if answer.status != 200 or result["reward"] != 1.0:
            raise RuntimeError(f"{answer.status}: {str(result)[:500]}")
        return len(await answer.read())

    async def closed_loop(agent: str) -> float:
        async def caller(first: int) -> None:
            for _ in range(first, work.THROUGH_GYM, work.CALLERS):
                await one(agent)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as callers:
            for first in range(work.CALLERS):
                callers.create_task(caller(first))
        return work.THROUGH_GYM / (time.perf_counter() - began)

    async def added(agent: str) -> list[float]:
        async def act(due: float) -> Sequence[float]:
            await one(agent)
            return [(time.perf_counter() - due) * 1000]

        return await poisson_arrivals(work.TARGETS["gym"] / 2, act)

    size = await one(AGENT)
    await one(FLOOR)
    per_second = [await closed_loop(AGENT) for _ in range(work.RUNS)]
    floor = [await closed_loop(FLOOR) for _ in range(work.RUNS)]
    return ThroughGym(per_second, await added(AGENT), floor, await added(FLOOR), size)


if __name__ == "__main__":
    if sys.argv[1] == "client":
        seen = asyncio.run(_measure())
        print(json.dumps({name: getattr(seen, name) for name in ThroughGym.__slots__}))
    elif sys.argv[1] == FLOOR:
        _serve_floor()
    elif sys.argv[1] == AGENT:
        from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.app import ProrlRolloutAgent

        ProrlRolloutAgent.run_webserver()
    else:
        _serve_rollouts()
