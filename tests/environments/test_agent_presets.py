"""Unmodified agent programs solve example rows in sandboxes without a network, behind the gateway of a rollout."""

import os
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from example_turns import let_work, solving_turns
from scripted_gateway import ScriptedGateway, ScriptedTurn

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.harness.presets import PRESETS
from prorl_gym.harness.programs import find_program
from prorl_gym.harness.rollout_gateway import WIRES
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxBackend

pytestmark = [pytest.mark.harness, pytest.mark.slow, pytest.mark.timeout(400)]

PATHS = {"messages": "/v1/messages", "responses": "/v1/responses", "chat completions": "/v1/chat/completions"}
"""By the name of a wire that presets give."""
BASE_IMAGE = SandboxConfig().agents_cache_dir().parent / "images" / f"bookworm-{os.geteuid() or 61099}"
"""Made by ``.ci/base-image``."""
TIMES = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?")


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=["userns", pytest.param("apptainer", marks=pytest.mark.apptainer)]
)
async def real_sandboxes(request: pytest.FixtureRequest) -> AsyncIterator[SandboxBackend]:
    image = str(BASE_IMAGE) if request.param == "apptainer" else "host"
    backend = await open_backend(SandboxConfig(backend=request.param, image=image))
    yield backend
    await backend.close()


@pytest.fixture
def called_wires(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    found = set[str]()
    for name, wire in list(WIRES.items()):

        def read(*arguments, _name=name, _read=wire.read):
            found.add(_name)
            return _read(*arguments)

        monkeypatch.setitem(WIRES, name, replace(wire, read=read))
    return found


def script_for(preset: str, environment: str) -> list[ScriptedTurn]:
    """The turns that solve a row; some programs hand in by a last command, the others by a last text."""
    turns = solving_turns(environment)
    if PRESETS[preset].command.answer_key:
        submit = f"cat <<'SUBMIT'\nCOMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n{turns[-1].text}\nSUBMIT"
        turns[-1] = ScriptedTurn("I submit.", submit)
    return turns


async def roll_out(preset: str, environment: str, sandboxes: SandboxBackend) -> ScriptedGateway:
    """Let a preset solve a row, and check what is recorded."""
    command = find_program(preset, {}, SandboxConfig().agents_cache_dir())
    leases, artifacts = SandboxLeases(sandboxes), Artifacts()
    leases.mount_for_agent(command.sandbox_mounts())
    gateway = ScriptedGateway(script_for(preset, environment), side_calls=command.side_calls)
    try:
        score = await let_work(environment, leases, command, gateway, artifacts)
    finally:
        await leases.close()
    assert score.reward == 1.0, artifacts.log
    sampled, captured = gateway.count_captured()
    assert captured == sampled > 0
    segments = gateway.session.segments()
    assert [segment.cause for segment in segments if segment.trained] == ["first"]
    assert len(segments[0].generations) == len(gateway.turns) or len(segments) > 1
    return gateway


# One kind of row is always played; the others, and the other backend, are products of it.
@pytest.mark.parametrize(
    ("real_sandboxes", "environment"),
    [
        ("userns", "code"),
        pytest.param("userns", "swe", marks=pytest.mark.product),
        pytest.param("apptainer", "swe", marks=[pytest.mark.apptainer, pytest.mark.product]),
    ],
    indirect=["real_sandboxes"],
)
@pytest.mark.parametrize("preset", sorted(PRESETS))
async def test_preset_solves_an_example_row_and_every_token_is_captured(
    preset: str, environment: str, real_sandboxes: SandboxBackend, called_wires: set[str]
):
    await roll_out(preset, environment, real_sandboxes)
    assert called_wires == {PATHS[PRESETS[preset].wire]}


@pytest.mark.product
@pytest.mark.parametrize("real_sandboxes", ["userns"], indirect=True)
@pytest.mark.parametrize("preset", sorted(PRESETS))
async def test_prompts_of_two_rollouts_are_the_same(preset: str, real_sandboxes: SandboxBackend):
    """Replicas of a group share their first prompt, the time of day apart."""
    first, second = [first_prompt(await roll_out(preset, "math", real_sandboxes)) for _ in range(2)]
    assert first == second


def first_prompt(gateway: ScriptedGateway) -> str:
    shown = (gateway.codec.decode(call.prompt) for call in gateway.pool.calls)
    return TIMES.sub("", next(text for text in shown if "<tools>" in text))
