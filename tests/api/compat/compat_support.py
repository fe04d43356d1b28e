"""The published routes over a real socket, a service on fakes behind them."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
from fastapi import FastAPI
from uvicorn.server import ServerState

from prorl_gym.api.compat.compat_app import create_compat_app, has_compat_token
from prorl_gym.api.compat.compat_service import CompatService
from prorl_gym.api.compat.config import CompatConfig
from prorl_gym.api.config import AllowedUrls
from prorl_gym.api.http.http_server import HttpServer
from prorl_gym.api.policy_control import EngineRegistry
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.rollout.protocol import Ledger
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    ScriptedEnvironment,
    environment_lookup,
)
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

TOKEN = "test-token-of-no-worth"
ENGINES = ("http://127.0.0.1:9001/v1", "http://127.0.0.1:9002/v1")


@dataclass
class Published:
    """A server of the published routes, and what stands behind it."""

    url: str
    service: RolloutService
    port: CompatService
    pool: EnginePool
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body)
        async with self.http.post(self.url + path, data=data, **options) as response:
            return response.status, json.loads(await response.read())

    async def status(self) -> dict[str, Any]:
        async with self.http.get(self.url + "/status") as response:
            assert response.status == 200
            return await response.json()

    async def until(self, **wanted: Any) -> None:
        """Wait until ``/status`` says so."""
        async with asyncio.timeout(10):
            while wanted != {key: (await self.status())[key] for key in wanted}:  # noqa: ASYNC110 - it is the route that is looked at
                await asyncio.sleep(0.005)


def process(job_id: str | None = None, *, sampling: dict[str, Any] | None = None, **script: Any) -> dict[str, Any]:
    """Return a body of ``/process`` whose rollout does what a script says."""
    instance = {"data_source": "scripted", "instance_id": "row-1", "trajectory_id": 0, "task": script}
    return {"instance": instance, "sampling_params": sampling or {}, **({"job_id": job_id} if job_id else {})}


@asynccontextmanager
async def published(
    environment: ScriptedEnvironment | None = None,
    *,
    config: CompatConfig | None = None,
    runner: RunnerConfig | None = None,
    ledger: Ledger | None = None,
    max_pending: int = 100_000,
    max_ended: int = 4096,
    **limits: Any,
) -> AsyncGenerator[Published]:
    config = config or CompatConfig()
    config = config.model_copy(update={"data_sources": {"scripted": "scripted", **config.data_sources}})
    environments = environment_lookup(environment or ScriptedEnvironment())
    backend, policies = EmptyBackend(), FakePolicySource()
    service = RolloutService(
        ledger or MemoryLedger(),
        InProcessRunner(environments, policies, backend, runner),
        RetryConfig(pause_seconds=0.001),
    )
    await service.start()
    pool = EnginePool("policy")
    names: dict[str, str] = {}
    for index, url in enumerate(ENGINES):
        pool.add_engine(_engine(f"policy-{index}", url))
        names[f"policy-{index}"] = url
    fleet = EngineRegistry(pool, names, _engine, AllowedUrls(ENGINES))
    port = CompatService(service, config, environments, pool, fleet, max_pending=max_pending, max_ended=max_ended)
    await port.cancel_leftover_jobs()
    try:
        async with _listening(create_compat_app(port, TOKEN, **limits)) as url:
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
                yield Published(url, service, port, pool, http)
            service.begin_shutdown()
    finally:
        await service.stop(drain=False)
        await fleet.close()
        await pool.close()
    assert (backend.sandbox_count, policies.open_sessions) == (0, 0)


def _engine(name: str, url: str) -> FakeEngine:
    return FakeEngine(name, lambda request: Reply((1, 2, 3)))


@asynccontextmanager
async def _listening(app: FastAPI) -> AsyncGenerator[str]:
    """Serve as uvicorn does, without its main loop: that looks for its end ten times a second only."""
    config = HttpServer(app, partial(has_compat_token, token=TOKEN.encode())).config
    config.load()
    state = ServerState()
    make = partial(config.http_protocol_class, config=config, server_state=state, app_state={})
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        if state.tasks:
            await asyncio.wait(set(state.tasks), timeout=10)
        for connection in list(state.connections):
            connection.transport.close()
