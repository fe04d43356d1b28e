"""What a trainer relies on, as 15 numbered items, over the servers that ship: ``test_01_...`` to ``test_15_...``.

The servers are started once, and the rows of every environment and ending are posted once; all tests of this folder run
on one event loop, which serves the policy. To run them on another NeMo Gym, see ``.ci/gym-versions``.

Elsewhere: item 14, the keys of the recipes (``tests/recipes/test_nemo_rl_recipes.py``), that Gym starts and lists the
servers by itself (``.ci/gym-versions``), that a model server keeps the session of other agents
(``tests/gym/test_model_end_to_end.py``), thousands of rows at once (``bench/gym.py``).
"""

import asyncio
import inspect
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract_world import Answer, World, open_world
from rollout_endings import ENVIRONMENTS, Ending, row_that_ends, script_of

import prorl_gym
from prorl_gym.trainers.gym_request import row_digest

AGENTS = ("mask", "raise")


def pytest_report_header() -> str:
    try:
        gym = version("nemo-gym")
    except PackageNotFoundError:
        gym = "missing"
    return f"contract: NeMo Gym {gym}, prorl_gym of {Path(prorl_gym.__file__).parent}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if not isinstance(item, pytest.Function) or not inspect.iscoroutinefunction(item.function):
            continue
        marked = item.get_closest_marker("asyncio")
        if marked is None or not marked.kwargs:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def world() -> AsyncIterator[World]:
    async with open_world() as opened:
        yield opened


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def answers(world: World) -> dict[tuple[str, str, Ending], Answer]:
    """An answer for each agent, environment and ending; the endings of an environment are one group."""
    gate = asyncio.Event()  # stays closed
    keys = [(agent, name, ending) for agent in AGENTS for name in ENVIRONMENTS for ending in Ending]
    rows = {key: row_that_ends(key[1], key[2], key[0]) for key in keys}
    for (_, name, ending), row in rows.items():
        world.plan(row, script_of(name, ending, gate))
    by_agent = {agent: [key for key in keys if key[0] == agent] for agent in AGENTS}
    posted = [
        asyncio.create_task(world.run(*(rows[key] for key in some), agent=agent)) for agent, some in by_agent.items()
    ]
    held = await world.policy.waiting_of({row_digest(row) for key, row in rows.items() if key[2] is Ending.CANCELLED})
    async with world.client() as client:
        assert sorted(await client.cancel(held)) == sorted(held)
    found = [answer for answered in await asyncio.gather(*posted) for answer in answered]
    return dict(zip([key for some in by_agent.values() for key in some], found, strict=True))


@pytest.fixture
def results(answers: dict[tuple[str, str, Ending], Answer]) -> dict[tuple[str, Ending], dict[str, Any]]:
    """The answers of the agent that masks, by environment and ending."""
    return {(name, ending): body for (agent, name, ending), (_, body) in answers.items() if agent == "mask"}
