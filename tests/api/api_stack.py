"""A service on fakes behind its real routes, over a socket or in process."""

import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from quick_server import QuickHttpServer

from prorl_gym.api.app import create_app
from prorl_gym.api.app_context import AppContext
from prorl_gym.client.wire_models import FirstPrompt, FirstPromptBody
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    ScriptedEnvironment,
    environment_lookup,
)
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

TOKEN = "test-token-of-no-worth"
RETRY = RetryConfig(pause_seconds=0.001)


@dataclass
class Served:
    url: str
    service: RolloutService
    http: aiohttp.ClientSession

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body)
        async with self.http.request(method, self.url + path, data=data, **options) as response:
            return response.status, json.loads(await response.read())


@asynccontextmanager
async def running(ledger: SqliteLedger | None = None, retry: RetryConfig = RETRY) -> AsyncGenerator[RolloutService]:
    """A service that does what the rows of its rollouts say."""
    runner = InProcessRunner(environment_lookup(ScriptedEnvironment()), FakePolicySource(), EmptyBackend())
    service = RolloutService(ledger or MemoryLedger(), runner, retry)
    await service.start()
    try:
        yield service
    finally:
        service.begin_shutdown()
        await service.stop(drain=False)


@asynccontextmanager
async def serving(
    ledger: SqliteLedger | None = None, retry: RetryConfig = RETRY, *, max_body_bytes: int = 64 << 20, **options: Any
) -> AsyncGenerator[Served]:
    """The same over a socket; options are those of ``AppContext``."""
    async with running(ledger, retry) as service:
        context = AppContext(service, render_prompt=_render_prompt, **options)
        server = QuickHttpServer(create_app(context, TOKEN, max_body_bytes))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = await server.begin(listener)
            try:
                async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
                    yield Served(url, service, http)
            finally:
                service.begin_shutdown()
                await server.end()


def _render_prompt(prompt: FirstPromptBody) -> FirstPrompt:
    return FirstPrompt(prompt_token_ids=tuple(range(len(prompt.input))), terminator_id=2)


def ask(rollout_id: str, **task: Any) -> dict[str, Any]:
    """A row that plays this script."""
    return {"rollout_id": rollout_id, "environment": "scripted", "task": task}
