"""Unmodified agent programs solve example rows in sandboxes without a network, in front of a scripted model API."""

import os
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from example_turns import let_work, solving_turns

from prorl_gym.agents.catalog import AgentCatalog
from prorl_gym.agents.presets import PRESETS
from prorl_gym.agents.protocol import Artifacts
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.testing.agents.scripted_gateway import ScriptedGateway, ScriptedTurn

pytestmark = [pytest.mark.harness, pytest.mark.slow]

WIRES = {"messages": "/v1/messages", "responses": "/v1/responses", "chat completions": "/v1/chat/completions"}
SUBMITS_BY_COMMAND = "mini-swe-agent"
BASE_IMAGE = SandboxConfig().agents_cache_dir().parent / "images" / f"bookworm-{os.geteuid() or 61099}"
"""Made by ``.ci/base-image``."""


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=["userns", pytest.param("apptainer", marks=pytest.mark.apptainer)],
)
async def real_sandboxes(request: pytest.FixtureRequest) -> AsyncIterator[SandboxBackend]:
    image = str(BASE_IMAGE) if request.param == "apptainer" else "host"
    backend = await open_backend(SandboxConfig(backend=request.param, image=image))
    yield backend
    await backend.close()


def script_for(preset: str, environment: str) -> list[ScriptedTurn]:
    """The turns that solve a row; mini-swe-agent hands in by a last command, the others by a last text."""
    turns = solving_turns(environment)
    if preset == SUBMITS_BY_COMMAND:
        submit = f"cat <<'SUBMIT'\nCOMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n{turns[-1].text}\nSUBMIT"
        turns[-1] = ScriptedTurn("I submit.", submit)
    return turns


@pytest.mark.parametrize("environment", ["swe", "code", "math"])
@pytest.mark.parametrize("name", sorted(PRESETS))
async def test_preset_solves_an_example_row(name: str, environment: str, real_sandboxes: SandboxBackend):
    command = AgentCatalog({}, SandboxConfig().agents_cache_dir()).find(name)
    leases, artifacts = SandboxLeases(real_sandboxes), Artifacts()
    leases.mount_for_agent(command.sandbox_mounts())
    gateway = ScriptedGateway(script_for(name, environment))
    try:
        score = await let_work(environment, leases, command, gateway, artifacts)
    finally:
        await leases.close()
    assert score.reward == 1.0, artifacts.log
    paths = [call.path for call in gateway.calls if call.body.get("tools")]
    assert paths == [WIRES[PRESETS[name].wire]] * len(gateway.turns)
    assert gateway.refused == 0


@pytest.mark.parametrize("real_sandboxes", ["userns"], indirect=True)
@pytest.mark.parametrize("name", sorted(PRESETS))
async def test_prompts_of_two_rollouts_are_the_same(name: str, real_sandboxes: SandboxBackend):
    """Replicas of a group share their first prompt, the time of day apart."""
    command = AgentCatalog({}, SandboxConfig().agents_cache_dir()).find(name)
    first: list[str] = []
    for token in ("token-one", "token-two"):
        leases = SandboxLeases(real_sandboxes)
        leases.mount_for_agent(command.sandbox_mounts())
        gateway = ScriptedGateway(script_for(name, "math")[-1:], token=token)
        try:
            await let_work("math", leases, command, gateway, Artifacts())
        finally:
            await leases.close()
        body: dict[str, Any] = dict(next(call.body for call in gateway.calls if call.body.get("tools")))
        first.append(without_times(str([body.get(part) for part in ("system", "instructions", "messages", "input")])))
    assert first[0] == first[1]


def without_times(text: str) -> str:
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?", "<time>", text)
    return re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "<id>", text)
