"""What the contract's tests share: the servers, started once, and an answer for each environment, ending and agent.

All tests of this folder run on one event loop, which serves the policy.
"""

import asyncio
import inspect
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fake_nemo_rl import renderer
from gym_servers import ContractServers
from gym_stack import post, stacked
from policy_server import VALIDATION, PolicyCall, PolicyServer, Script, ScriptedPolicy
from rollout_endings import ENVIRONMENTS, Ending, example, gold, row_that_ends, script_of

import prorl_gym
from prorl_gym.client import Client
from prorl_gym.environments.playback import task_text
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.trainers.gym_request import row_digest

Answer = tuple[int, dict[str, Any]]
"""Status and body of an answer of ``/run``."""
AGENTS = ("mask", "raise")
_SHORT = "{{- '<|im_start|>' + message.role + '\\n' + message.content -}}"
_STRIPPED = (
    "{%- set content = message.content -%}"
    "{%- if message.role == 'assistant' and not loop.last -%}"
    "{%- set content = (content.split('</think>') | last).lstrip('\\n') -%}"
    "{%- endif -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + content -}}"
)


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


def stripping_template(folder: Path) -> Path:
    """Write the small tokenizer's template with one change: it leaves out the thoughts of earlier turns."""
    plain = Path(prorl_gym.__file__).parent / "oracle/tokenizer/chat_template.jinja"
    text = plain.read_text("utf-8")
    assert text.count(_SHORT) == 1
    path = folder / "stripping.jinja"
    path.write_text(text.replace(_SHORT, _STRIPPED), "utf-8")
    return path


@dataclass
class World:
    """The servers and the policy."""

    servers: ContractServers
    policy: ScriptedPolicy

    def plan(self, row: dict[str, Any], script: Script) -> None:
        """Give the rollout of a row its script."""
        self.policy.scripts[row_digest(row)] = script

    async def run(self, *rows: dict[str, Any], agent: str = "mask") -> list[Answer]:
        """Post rows to ``/run`` of an agent, all at once."""
        return await post(self.servers.url(agent), rows)

    def calls(self, row: dict[str, Any]) -> list[PolicyCall]:
        """Return the calls of the only rollout of a row."""
        (found,) = [calls for name, calls in self.policy.calls.items() if name.partition("-")[0] == row_digest(row)]
        return found

    def client(self) -> Client:
        """Return a client of the service; a context manager."""
        return Client(self.servers.url("rollouts") + "/service", token="unused")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def world() -> AsyncIterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="g", dir="/tmp"))  # paths of sockets are short
    try:
        template = stripping_template(folder)
        codec = load_codec("small", template)
        policy = ScriptedPolicy(codec)
        for name in ENVIRONMENTS:
            policy.by_question[task_text(example(name)["task"])] = Script(gold(name))
        server = {"render": renderer(codec), "eos": codec.terminator_id, "validation": VALIDATION, "policy": policy}
        async with (
            PolicyServer(max_model_len=65536, **server) as one,
            PolicyServer(max_model_len=65536, **server) as two,
        ):
            with stacked(folder, ContractServers, engines=[one.url, two.url], template=template) as servers:
                await servers.start()
                yield World(servers, policy)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def answers(world: World) -> dict[tuple[str, str, Ending], Answer]:
    """An answer for each agent, environment and ending; the endings of an environment are one group."""
    gate = asyncio.Event()  # stays closed: what waits for it is cancelled
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
