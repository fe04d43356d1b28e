"""Sessions of other Gym agents: every declared tool has a route, what a lost session held is never graded, and nothing
is left of a session that ended before it began.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any, cast

import gym_needed  # noqa: F401
import pytest

pytestmark = pytest.mark.gym

from fastapi.testclient import TestClient  # noqa: E402
from simulation.virtual_clock import run_virtually  # noqa: E402
from test_rollout_server import LOCAL, ROW, answered, post, server  # noqa: E402

from prorl_gym.agents.protocol import Observation, ToolSpec  # noqa: E402
from prorl_gym.environments.math.environment import MathEnvironment  # noqa: E402
from prorl_gym.environments.playback import fill_step, gold_steps  # noqa: E402
from prorl_gym.environments.protocol import Episode  # noqa: E402
from prorl_gym.errors import FailureKind, TaskError  # noqa: E402
from prorl_gym.gym_root.resources_servers.prorl_rollout import tool_sessions as module  # noqa: E402
from prorl_gym.gym_root.resources_servers.prorl_rollout.tool_sessions import ToolSession, ToolSessions  # noqa: E402
from prorl_gym.sandbox.protocol import SandboxSpec  # noqa: E402
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend  # noqa: E402

ROOT = Path(__file__).parents[2]

CODE = {"question": "Print 1.", "tests": {"kind": "stdio", "cases": [{"stdin": "", "stdout": "1"}]}, "id": "c"}


def example(environment: str) -> dict[str, Any]:
    rows = (ROOT / f"environments/prorl_{environment}/data/example.jsonl").read_text(encoding="utf-8").splitlines()
    return min(map(json.loads, rows), key=lambda row: row["task"].get("tests", {}).get("parser") != "unittest")


def play_gold(client: TestClient, row: dict[str, Any]) -> set[str]:
    """Play the gold trajectory of a row through the tools' routes; return which tools that took."""
    observation, used = "", set[str]()
    for step in (fill_step(step, observation) for step in gold_steps(row["environment"], row["task"])):
        if step.tool:
            answer = client.post(f"/{step.tool}", json=cast("Any", step.arguments))
            assert answer.status_code == 200, answer.text
            observation = answer.text
            used.add(step.tool)
    return used


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(server(**LOCAL).setup_webserver()) as client:
        yield client


class OddTool:
    """A tool as an environment of another package, an MCP server or an API may bring it."""

    def __init__(self, name: str) -> None:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        self.spec = ToolSpec(name, "Doubles n.", schema)

    async def __call__(self, arguments: Any) -> Observation:
        return Observation(str(2 * arguments["n"]))


class WithTool(MathEnvironment):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    async def init(self, task: Any, leases: Any, settings: Any) -> Episode:
        episode = await super().init(task, leases, settings)
        return Episode(episode.messages, (*episode.tools, OddTool(self._name)))


def declaring(*names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name, "parameters": {}, "strict": False} for name in names]
    return ROW | {"responses_create_params": {"input": [], "tools": tools}}


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["swe", "taskdir", "code"])
def test_gold_played_by_another_agent_earns_its_reward(environment: str):
    with TestClient(server().setup_webserver()) as client:
        row = example(environment)
        post(client, "/seed_session", row)
        used = play_gold(client, row)
        for unused in {tool["name"] for tool in row["responses_create_params"]["tools"]} - used:
            assert "were not accepted" in post(client, f"/{unused}", {"nonsense": 1}, status=422)
        verdict = post(client, "/verify", row | {"response": answered("done")})
        assert (verdict["reward"], verdict["mask_sample"]) == (1.0, False), verdict["failure_reason"]


@pytest.mark.parametrize("name", ["double_it", "server__double", "think"])
def test_a_tool_that_an_environment_brings_has_a_route(client: TestClient, monkeypatch: pytest.MonkeyPatch, name: str):
    """Arguments that do not fit are explained to the model."""
    monkeypatch.setattr(module.registry, "get", lambda environment: WithTool(name))
    post(client, "/seed_session", declaring("python", name, "finish"))
    assert post(client, f"/{name}", {"n": 21}) == "42"
    assert "'n' is missing" in post(client, f"/{name}", {}, status=422)
    assert "must be of type integer" in post(client, f"/{name}", {"n": "21"}, status=422)


@pytest.mark.parametrize("name", ["verify", "close_session"])
def test_a_tool_with_the_name_of_a_route_is_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(module.registry, "get", lambda environment: WithTool(name))
    assert "name of a route" in str(post(client, "/seed_session", declaring("python"), status=422))


def test_a_row_with_a_tool_that_is_not_there_is_refused(client: TestClient):
    said = str(post(client, "/seed_session", declaring("python", "search"), status=422))
    assert "'search'" in said and "python, finish" in said


def is_lost(client: TestClient, row: dict[str, Any] = ROW) -> bool:
    """Have an answer graded; return whether it is masked, since its session was lost."""
    verdict = post(client, "/verify", row | {"response": answered("\\boxed{42}")})
    masks = verdict["mask_sample"] and verdict["instance_config"]["mask_sample"]
    return masks and (verdict["failure_kind"], verdict["reward"]) == ("session_lost", 0.0)


@pytest.mark.parametrize("row", [ROW, ROW | {"environment": "code", "task": CODE}])
def test_a_closed_session_is_not_graded(client: TestClient, row: dict[str, Any]):
    post(client, "/seed_session", row)
    post(client, "/close_session", {})
    assert is_lost(client, row)


def test_an_idle_session_is_not_graded(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    close, closed = ToolSessions.close, Event()

    async def closing(sessions: ToolSessions, session_id: str) -> None:
        await close(sessions, session_id)
        closed.set()

    monkeypatch.setattr(ToolSessions, "close", closing)
    post(client, "/seed_session", ROW | {"prorl": {"settings": {"run_seconds": 0.05}}})
    assert closed.wait(30)
    post(client, "/python", {"code": "1"}, status=409)
    assert is_lost(client)


def test_a_session_of_an_earlier_process_is_not_graded(client: TestClient):
    post(client, "/seed_session", ROW)
    with TestClient(server(**LOCAL).setup_webserver()) as restarted:
        restarted.cookies.update(client.cookies)
        post(restarted, "/python", {"code": "1"}, status=409)
        assert is_lost(restarted)


@pytest.mark.parametrize("environment", ["swe", "taskdir"])
def test_what_needs_the_agents_sandbox_is_not_graded_without_a_session(client: TestClient, environment: str):
    assert is_lost(client, example(environment))


def test_a_session_does_not_expire_while_a_call_is_served():
    async def scenario() -> None:
        sessions = ToolSessions(EmptyBackend, 0.02)
        await sessions.open("s", ROW)
        async with sessions.acquire_session("s") as session:
            await asyncio.sleep(3600)  # of a virtual clock: longer than it may be idle
            assert isinstance(session, ToolSession) and not sessions.was_closed("s")
        await sessions.close_all()

    run_virtually(scenario())


def test_tools_are_offered_over_mcp():
    exposure = pytest.importorskip("nemo_gym.mcp_auto_exposure")
    made = server(**LOCAL)
    offered = exposure.harvest_tools(made.setup_webserver(), made)
    assert sorted(offered) == ["bash", "editor", "finish", "python", "think"]
    assert offered["editor"].tool.inputSchema["required"] == ["command", "path"]


# --- sessions that end before they began


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
    bench.environment.go_on.set()
    async with asyncio.timeout(5):
        while bench.backend.sandbox_count:  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0.005)


async def test_closing_a_session_that_fails_to_open_raises_nothing(monkeypatch: pytest.MonkeyPatch):
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
