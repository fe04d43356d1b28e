"""Other Gym agents over HTTP: every declared tool has a route, and what a lost session held is never graded."""

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
from test_rollout_server import ROW, answered, post, server  # noqa: E402

from prorl_gym.agents.protocol import Observation, ToolSpec  # noqa: E402
from prorl_gym.environments.math.environment import MathEnvironment  # noqa: E402
from prorl_gym.environments.playback import fill_step, gold_steps  # noqa: E402
from prorl_gym.environments.protocol import Episode  # noqa: E402
from prorl_gym.gym_root.resources_servers.prorl_rollout import tool_sessions as module  # noqa: E402
from prorl_gym.gym_root.resources_servers.prorl_rollout.tool_sessions import ToolSession, ToolSessions  # noqa: E402
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend  # noqa: E402
from prorl_gym.testing.virtual_clock import run_virtually  # noqa: E402

ROOT = Path(__file__).parents[2]
LOCAL = {"sandbox": {"backend": "local", "allow_unsafe_local": True}}
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
    monkeypatch.setattr(module.registry, "get", lambda environment: WithTool(name))
    post(client, "/seed_session", declaring("python", name, "finish"))
    assert post(client, f"/{name}", {"n": 21}) == "42"


def test_arguments_that_do_not_fit_are_explained_to_the_model(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module.registry, "get", lambda environment: WithTool("double_it"))
    post(client, "/seed_session", declaring("double_it"))
    assert "'n' is missing" in post(client, "/double_it", {}, status=422)
    assert "must be of type integer" in post(client, "/double_it", {"n": "21"}, status=422)


@pytest.mark.parametrize("name", ["verify", "close_session"])
def test_a_tool_with_the_name_of_a_route_is_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(module.registry, "get", lambda environment: WithTool(name))
    assert "name of a route" in str(post(client, "/seed_session", declaring("python"), status=422))


def test_a_row_with_a_tool_that_is_not_there_is_refused(client: TestClient):
    said = str(post(client, "/seed_session", declaring("python", "search"), status=422))
    assert "'search'" in said and "python, finish" in said


def masked_as_lost(verdict: dict[str, Any]) -> bool:
    masks = verdict["mask_sample"] and verdict["instance_config"]["mask_sample"]
    return masks and (verdict["failure_kind"], verdict["reward"]) == ("session_lost", 0.0)


@pytest.mark.parametrize("row", [ROW, ROW | {"environment": "code", "task": CODE}])
def test_a_closed_session_is_not_graded(client: TestClient, row: dict[str, Any]):
    post(client, "/seed_session", row)
    post(client, "/close_session", {})
    assert masked_as_lost(post(client, "/verify", row | {"response": answered("\\boxed{42}")}))


def test_an_idle_session_is_not_graded(client: TestClient, monkeypatch: pytest.MonkeyPatch):
    close, closed = ToolSessions.close, Event()

    async def closing(sessions: ToolSessions, session_id: str) -> None:
        await close(sessions, session_id)
        closed.set()

    monkeypatch.setattr(ToolSessions, "close", closing)
    post(client, "/seed_session", ROW | {"prorl": {"settings": {"run_seconds": 0.05}}})
    assert closed.wait(30)
    post(client, "/python", {"code": "1"}, status=409)
    assert masked_as_lost(post(client, "/verify", ROW | {"response": answered("\\boxed{42}")}))


def test_a_session_of_an_earlier_process_is_not_graded(client: TestClient):
    post(client, "/seed_session", ROW)
    with TestClient(server(**LOCAL).setup_webserver()) as restarted:
        restarted.cookies.update(client.cookies)
        post(restarted, "/python", {"code": "1"}, status=409)
        assert masked_as_lost(post(restarted, "/verify", ROW | {"response": answered("\\boxed{42}")}))


@pytest.mark.parametrize("environment", ["swe", "taskdir"])
def test_what_needs_the_agents_sandbox_is_not_graded_without_a_session(client: TestClient, environment: str):
    row = example(environment)
    assert masked_as_lost(post(client, "/verify", row | {"response": answered("I repaired it.")}))


def test_settings_of_the_row_count(monkeypatch: pytest.MonkeyPatch):
    row = ROW | {"prorl": {"settings": {"eval_seconds": 7.0, "action_seconds": 3.0}}}
    session = asyncio.run(module.open_session(row, ToolSessions(EmptyBackend, None).new_leases()))
    assert (session.settings.eval_seconds, session.settings.action_seconds) == (7.0, 3.0)


@pytest.mark.parametrize("block", [{"settings": {"run_seconds": -1}}, {"setings": {}}])
def test_bad_settings_of_a_row_are_refused(client: TestClient, block: dict[str, Any]):
    assert next(iter(block)) in str(post(client, "/seed_session", ROW | {"prorl": block}, status=422))


def test_a_session_does_not_expire_while_a_call_is_served():
    async def scenario() -> None:
        sessions = ToolSessions(EmptyBackend, 0.02)
        await sessions.open("s", ROW)
        async with sessions.acquire_session("s") as session:
            await asyncio.sleep(3600)  # of a virtual clock: longer than it may be idle
            assert isinstance(session, ToolSession) and not sessions.was_closed("s")
        await sessions.close_all()

    run_virtually(scenario())


async def test_a_session_waits_as_long_as_its_rollout_may_run(monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda seconds, *a: (waits.append(seconds), call_later(seconds, *a))[1])
    sessions = ToolSessions(EmptyBackend, None)
    await sessions.open("s", ROW | {"prorl": {"settings": {"run_seconds": 86400.0}}})
    assert 86400.0 in waits
    await sessions.close_all()


def test_tools_are_offered_over_mcp():
    exposure = pytest.importorskip("nemo_gym.mcp_auto_exposure")
    made = server(**LOCAL)
    offered = exposure.harvest_tools(made.setup_webserver(), made)
    assert sorted(offered) == ["bash", "editor", "finish", "python", "think"]
    assert offered["editor"].tool.inputSchema["required"] == ["command", "path"]
