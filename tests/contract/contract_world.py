"""The servers, their policy, and who posts rows to them."""

import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_nemo_rl import renderer
from gym_servers import ContractServers, contract_servers, post
from policy_server import VALIDATION, PolicyCall, PolicyServer, Script, ScriptedPolicy
from rollout_endings import ENVIRONMENTS, example, gold

import prorl_gym
from prorl_gym.client import Client
from prorl_gym.environments.playback import task_text
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.trainers.gym_request import row_digest

Answer = tuple[int, dict[str, Any]]
"""Status and body of an answer of ``/run``."""
_TURN = "{{- '<|im_start|>' + message.role + '\\n' + message.content -}}"
_TURN_WITHOUT_THOUGHTS = (
    "{%- set content = message.content -%}"
    "{%- if message.role == 'assistant' and not loop.last -%}"
    "{%- set content = (content.split('</think>') | last).lstrip('\\n') -%}"
    "{%- endif -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + content -}}"
)


def stripping_template(folder: Path) -> Path:
    """Write the small tokenizer's template with one change: it leaves out the thoughts of earlier turns."""
    plain = Path(prorl_gym.__file__).parent / "oracle/tokenizer/chat_template.jinja"
    text = plain.read_text("utf-8")
    assert text.count(_TURN) == 1
    path = folder / "stripping.jinja"
    path.write_text(text.replace(_TURN, _TURN_WITHOUT_THOUGHTS), "utf-8")
    return path


@dataclass
class World:
    """The servers and the policy."""

    servers: ContractServers
    policy: ScriptedPolicy

    def plan(self, row: dict[str, Any], script: Script) -> None:
        """Give the rollout of a row its script; no two tests may post equal rows."""
        assert self.policy.scripts.setdefault(row_digest(row), script) == script

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


@asynccontextmanager
async def open_world() -> AsyncGenerator[World]:
    """Start two engines and the servers over them."""
    folder = Path(tempfile.mkdtemp(prefix="g", dir="/tmp"))  # paths of sockets are short
    try:
        template = stripping_template(folder)
        codec = load_codec("small", template)
        policy = ScriptedPolicy(codec)
        for name in ENVIRONMENTS:
            policy.by_question[task_text(example(name)["task"])] = Script(gold(name))

        def engine() -> PolicyServer:
            return PolicyServer(
                policy=policy,
                render=renderer(codec),
                eos=codec.terminator_id,
                max_model_len=65536,
                validation=VALIDATION,
            )

        async with engine() as one, engine() as two:
            with contract_servers(folder, [one.url, two.url], template) as servers:
                await servers.start()
                yield World(servers, policy)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
