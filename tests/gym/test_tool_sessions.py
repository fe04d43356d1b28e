"""Tool sessions that end before they began: nothing may be left of them."""

import asyncio
from typing import Any

import gym_needed  # noqa: F401
import pytest

pytestmark = pytest.mark.gym

from prorl_gym.environments.math.environment import MathEnvironment  # noqa: E402
from prorl_gym.errors import FailureKind, TaskError  # noqa: E402
from prorl_gym.gym_root.resources_servers.prorl_rollout import tool_sessions as module  # noqa: E402
from prorl_gym.gym_root.resources_servers.prorl_rollout.tool_sessions import ToolSessions  # noqa: E402
from prorl_gym.sandbox.protocol import SandboxSpec  # noqa: E402
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend  # noqa: E402

ROW = {"environment": "math", "task": {"question": "2+2?", "answer": "4"}}


class Prepares(MathEnvironment):
    """Starts a sandbox in ``init``, then waits or fails."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.error: Exception | None = None

    async def init(self, task: Any, leases: Any, settings: Any) -> Any:
        await leases.get_agent_sandbox(SandboxSpec())
        self.begun.set()
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return await super().init(task, leases, settings)


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, idle_seconds: float = 60.0) -> None:
        self.environment = Prepares()
        self.backend = EmptyBackend()
        self.sessions = ToolSessions(lambda: self.backend, idle_seconds)
        monkeypatch.setattr(module.registry, "get", lambda name: self.environment)


@pytest.mark.parametrize("error", [TaskError(FailureKind.BAD_ROW, "row: no such commit."), ValueError("a defect")])
async def test_session_that_cannot_be_opened_leaves_no_sandbox(monkeypatch: pytest.MonkeyPatch, error: Exception):
    bench = Bench(monkeypatch)
    bench.environment.error = error
    bench.environment.go_on.set()
    with pytest.raises(type(error)):
        await bench.sessions.open("s", ROW)
    assert bench.backend.sandbox_count == 0
    bench.environment.error = None
    await bench.sessions.open("s", ROW)  # it may be seeded again
    await bench.sessions.close("s")
    assert bench.backend.sandbox_count == 0


async def test_session_whose_caller_went_away_while_it_opened_expires(monkeypatch: pytest.MonkeyPatch):
    bench = Bench(monkeypatch, idle_seconds=0.01)
    seed = asyncio.create_task(bench.sessions.open("s", ROW))
    await bench.environment.begun.wait()
    seed.cancel()
    await asyncio.wait({seed})
    assert bench.backend.sandbox_count == 1
    closed, close = asyncio.Event(), bench.sessions.close

    async def watched(session_id: str) -> None:
        await close(session_id)
        closed.set()

    monkeypatch.setattr(bench.sessions, "close", watched)
    bench.environment.go_on.set()
    await asyncio.wait_for(closed.wait(), 5)
    assert bench.backend.sandbox_count == 0


async def test_closing_a_session_that_fails_to_open_is_quiet(monkeypatch: pytest.MonkeyPatch):
    bench = Bench(monkeypatch)
    bench.environment.error = TaskError(FailureKind.BAD_ROW, "row: no such commit.")
    seed = asyncio.create_task(bench.sessions.open("s", ROW))
    await bench.environment.begun.wait()
    close = asyncio.create_task(bench.sessions.close("s"))
    bench.environment.go_on.set()
    await close
    with pytest.raises(TaskError):
        await seed
    assert bench.backend.sandbox_count == 0
