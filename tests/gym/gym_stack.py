"""The servers as Gym starts them (environment relay, agent, rollouts), over an environment and a policy that are
instant.

Each is a process of its own with Gym's own ``run_webserver`` and Gym's own configuration in its environment; only what
a rollout does is scripted (``prorl_gym/testing/rollout/fake_rollout.py``). Run as a program this is one of the servers.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import aiohttp

from prorl_gym.cli.demo.stack import free_ports
from prorl_gym.client import Client

HOST = "127.0.0.1"
AGENT = "prorl_scripted_agent"


@dataclass
class GymStack:
    """Servers on loopback. ``start`` before use; ``stop`` kills what is left."""

    instances: ClassVar[Mapping[str, str]] = {"relay": "relay", "agent": AGENT, "rollouts": "prorl_rollout"}
    """Names of the servers, and of their instances in Gym's configuration."""
    program: ClassVar[str] = __file__
    """Runs the server whose name is its argument."""
    folder: Path
    agent: dict[str, Any] = field(default_factory=dict[str, Any])
    service: dict[str, Any] = field(default_factory=dict[str, Any])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    ports: dict[str, int] = field(default_factory=dict[str, int])
    children: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ports = dict(zip((*self.instances, "head"), free_ports(len(self.instances) + 1), strict=True))

    def url(self, name: str) -> str:
        return f"http://{HOST}:{self.ports[name]}"

    def config(self) -> dict[str, Any]:
        """Gym's whole configuration, as ``gym env start`` would have merged it."""

        def at(name: str, **keys: Any) -> dict[str, Any]:
            return {"entrypoint": "app.py", "host": HOST, "port": self.ports[name], **keys}

        rollouts = {"type": "resources_servers", "name": "prorl_rollout"}
        engines = {"engines": "http://127.0.0.1:9/v1", "model": "m", "tokenizer": "small", "service": self.service}
        return {
            "head_server": {"host": HOST, "port": self.ports["head"]},
            "default_host": HOST,
            "dry_run": False,
            "prorl_rollout": {"resources_servers": {"prorl_rollout": at("rollouts", domain="agent", **engines)}},
            AGENT: {
                "responses_api_agents": {"prorl_rollout_agent": at("agent", resources_server=rollouts, **self.agent)}
            },
            "relay": {
                "environment_servers": {
                    "legacy_agent": at("relay", agent_server={"type": "responses_api_agents", "name": AGENT})
                }
            },
            **self.settings,
        }

    async def start(self, *names: str) -> None:
        """Start these (all by default) and wait until each answers."""
        for name in names or self.instances:
            env = {
                **os.environ,
                "NEMO_GYM_CONFIG_DICT": json.dumps(self.config()),
                "NEMO_GYM_CONFIG_PATH": self.instances[name],
                "PYTHONPATH": str(Path(__file__).parent),
                "TMPDIR": str(self.folder),
            }
            self._spawn(name, env)
        async with aiohttp.ClientSession() as session:
            for name in names or self.instances:
                await self._ready(session, name)

    def _spawn(self, name: str, env: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.children[name] = subprocess.Popen(
                [sys.executable, self.program, name], env=env, stdout=log, stderr=log, start_new_session=True
            )

    async def _ready(self, session: aiohttp.ClientSession, name: str) -> None:
        deadline = time.monotonic() + 90
        while True:
            try:
                async with session.get(self.url(name)):
                    return  # any answer: a server listens when it is ready
            except aiohttp.ClientError:
                pass
            if self.children[name].poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{name} did not start:\n" + self.log(name)[-4000:])
            await asyncio.sleep(0.1)  # another process: there is no event to wait for

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        child = self.children.pop(name)
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    def stop(self) -> None:
        for name in tuple(self.children):
            self.kill(name)

    def begun(self) -> Counter[str]:
        """How often each rollout was begun, by the ``id`` of its task."""
        return Counter((self.folder / "begun").read_text().split())

    def open_gate(self) -> None:
        """Let rollouts go on whose script says ``run: gate``."""
        (self.folder / "gate").touch()

    async def until_begun(self, count: int) -> None:
        while (self.folder / "begun").read_bytes().count(b"\n") < count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # another process: there is no event to wait for

    async def until_acknowledged(self, rollout_ids: Collection[str]) -> None:
        async with Client(self.url("rollouts") + "/service", token="none") as client:
            while {one.rollout_id for one in (await client.unacknowledged()).rollouts} & set(rollout_ids):  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # another process: there is no event to wait for

    def peak(self, name: str) -> int:
        """Peak resident memory in MiB."""
        status = Path(f"/proc/{self.children[name].pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) >> 10

    def descriptors(self, name: str) -> int:
        return len(os.listdir(f"/proc/{self.children[name].pid}/fd"))


StackT = TypeVar("StackT", bound=GymStack)


@contextmanager
def stacked(folder: Path, kind: type[StackT] = GymStack, **options: Any) -> Iterator[StackT]:
    stack = kind(folder, **options)
    try:
        yield stack
    finally:
        stack.stop()


def row(index: int, repeat: int = 0, **script: Any) -> dict[str, Any]:
    """A row as Gym's collector posts it; the script says what its rollout does."""
    return {
        "responses_create_params": {"input": [{"role": "user", "content": f"Do {index}."}]},
        "agent_ref": {"type": "responses_api_agents", "name": AGENT},
        "environment": "scripted",
        "task": {"id": f"t{index}-{repeat}", **script},
        "_ng_task_index": index,
        "_ng_rollout_index": repeat,
    }


async def post(url: str, rows: Sequence[dict[str, Any]], at_once: int = 0) -> list[tuple[int, dict[str, Any]]]:
    """Post rows to ``/run``, all of them at once unless told otherwise."""
    gate = asyncio.Semaphore(at_once or len(rows))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def one(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            async with gate, session.post(url + "/run", json=body) as answer:
                text = await answer.read()
                return answer.status, json.loads(text) if answer.status == 200 else {"text": text.decode()}

        return await asyncio.gather(*map(one, rows))


def _serve_rollouts() -> None:
    import prorl_gym.gym_root.resources_servers.prorl_rollout.embedded_service as hosted
    from prorl_gym.api.build import LoadedService
    from prorl_gym.gym_root.resources_servers.prorl_rollout.app import ProrlRolloutServer
    from prorl_gym.inference.tokens.template_check import load_codec
    from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
    from prorl_gym.rollout.scheduling.runner import InProcessRunner
    from prorl_gym.rollout.service import RolloutService
    from prorl_gym.testing.rollout.fake_rollout import (
        EmptyBackend,
        FakePolicySource,
        ScriptedEnvironment,
        environment_lookup,
    )

    begun = os.open(os.environ["TMPDIR"] + "/begun", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    gate = Path(os.environ["TMPDIR"]) / "gate"

    class Counted(ScriptedEnvironment):
        async def init(self, task: Any, leases: Any, settings: Any) -> Any:
            os.write(begun, f"{task.id}\n".encode())  # who was computed, and how often
            return await super().init(task, leases, settings)

        async def _act(self, task: Any, action: str) -> None:
            while action == "gate" and not gate.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # the test is another process
            await super()._act(task, "ok" if action == "gate" else action)

    class Built:
        render_prompt = LoadedService.render_prompt

        def __init__(self, service: RolloutService, backend: EmptyBackend, codec: Any) -> None:
            self.service, self.backend, self.codec = service, backend, codec

        async def close(self, *, drain: bool) -> None:
            await self.service.stop(drain=drain)

    async def build(config: Any) -> Built:
        backend = EmptyBackend()
        codec = load_codec("small", None, {}, "auto")
        config.state.mkdir(parents=True, exist_ok=True)
        ledger = await SqliteLedger.open(config.ledger_config)
        runner = InProcessRunner(environment_lookup(Counted()), FakePolicySource(), backend, config.runner)
        service = RolloutService(ledger, runner)
        await service.start()
        return Built(service, backend, codec)

    hosted.build_service = build  # type: ignore[assignment]
    ProrlRolloutServer.run_webserver()


def _serve(name: str) -> None:
    if name == "rollouts":
        _serve_rollouts()
    elif name == "agent":
        from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.app import ProrlRolloutAgent

        ProrlRolloutAgent.run_webserver()
    else:
        from environment_servers.legacy_agent.app import LegacyAgentEnvironmentServer

        class Relay(LegacyAgentEnvironmentServer):
            ray_enabled = False  # Gym's own does not say, and would start Ray here, in every test

        Relay.run_webserver()


if __name__ == "__main__":
    _serve(sys.argv[1])
