"""What rows' handlers stand on in tests: a scripted connection, and an embedded service over a socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from closing import closing
from fastapi import FastAPI
from quick_server import QuickServer

from prorl_gym.api.app import create_embedded_app
from prorl_gym.api.service_process import bind_socket
from prorl_gym.client.wire_models import FirstPrompt, FirstPromptBody
from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.row_handler import AgentProfile, RowHandler
from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.service_connection import SERVICE_PATH
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    ScriptedEnvironment,
    environment_lookup,
)
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger
from prorl_gym.trainers.gym_result import Placeholder


class FakeConnection:
    """Implements ``ServiceConnection``: every rollout ends at once, with ``record``."""

    def __init__(self, record: Rollout) -> None:
        self.record = record
        self.submitted: list[RolloutRequest] = []
        self._records: dict[str, asyncio.Future[Rollout]] = {}

    def connect(self, url: str, token: str, run_id: str, on_listed: Any, on_finished: Any) -> "FakeConnection":
        return self

    async def wait_listed(self) -> None:
        """Nothing is left of an earlier process."""

    def expect_record(self, rollout_id: str, run_id: str) -> "asyncio.Future[Rollout]":
        self._records[rollout_id] = asyncio.get_running_loop().create_future()
        return self._records[rollout_id]

    def drop_record(self, rollout_id: str) -> None:
        self._records.pop(rollout_id, None)

    def submit(self, request: RolloutRequest) -> "asyncio.Future[None]":
        self.submitted.append(request)
        named = ("rollout_id", "run_id", "group_id", "group_size", "replica", "evaluation")
        changes: dict[str, Any] = {name: getattr(request, name) for name in named}
        self._records[request.rollout_id].set_result(self.record.model_copy(update=changes))
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        accepted.set_result(None)
        return accepted

    async def render_prompt(self, prompt: Mapping[str, Any]) -> Placeholder:
        if prompt["input"] == "poison":
            raise ZeroDivisionError("a template of somebody's")
        return Placeholder((7, 8), 9)

    def acknowledge(self, rollout_ids: Iterable[str]) -> None:
        """Nothing is kept."""


class EmbeddedRollouts:
    """A rollout server's service at a fixed port; it can be stopped and started again.

    Args:
        ledger: returns the ledger of each start.
    """

    def __init__(self, ledger: Callable[[], SqliteLedger] = MemoryLedger) -> None:
        self.environment = ScriptedEnvironment()
        self.service: RolloutService
        self.server: QuickServer
        self.port = 0
        self._ledger = ledger
        self._is_running = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{SERVICE_PATH}"

    async def start(self) -> None:
        runner = InProcessRunner(environment_lookup(self.environment), FakePolicySource(), EmptyBackend())
        self.service = RolloutService(self._ledger(), runner)
        await self.service.start()
        app = FastAPI()
        app.mount(SERVICE_PATH, create_embedded_app(self.service, _render_prompt))
        self.server = QuickServer(uvicorn.Config(app, log_config=None, lifespan="off", access_log=False))
        listener = bind_socket("127.0.0.1", self.port)
        self.port = listener.getsockname()[1]
        await self.server.begin(listener)
        self._is_running = True

    async def stop(self) -> None:
        """Close every connection, as the end of the process would."""
        if not self._is_running:
            return
        self._is_running = False
        self.service.begin_shutdown()
        self.server.force_exit = True
        await self.server.end()
        await self.service.stop(drain=False)


@asynccontextmanager
async def agent(rollouts: EmbeddedRollouts, **profile: Any) -> AsyncIterator["Agent"]:
    """An agent's handler of rows, with its caller."""
    made = Agent(rollouts.url, **profile)
    async with closing(made.handler):
        yield made


class Agent:
    def __init__(self, url: str, **profile: Any) -> None:
        self.handler = RowHandler(AgentProfile(**{"agent": "a", **profile}), url)

    async def post(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the result of a row, which is delivered."""
        answer = await asyncio.wait_for(self.handler.answer_row(row), 20)
        self.handler.mark_delivered(answer)
        assert answer.status == 200, answer.body
        return json.loads(answer.body)


def _render_prompt(_: FirstPromptBody) -> FirstPrompt:
    return FirstPrompt(prompt_token_ids=(7, 8), terminator_id=9)
