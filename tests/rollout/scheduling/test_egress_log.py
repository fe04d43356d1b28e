"""What a rollout's sandbox asks of the network is in the log, under the rollout's name."""

import asyncio
import io
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from prorl_gym import logs
from prorl_gym.environments.protocol import Episode, RunContext
from prorl_gym.errors import SandboxError
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.protocol import Finished, Job
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxBackend, SandboxSpec
from prorl_gym.testing.rollout.fake_rollout import FakePolicySource, Script, ScriptedEnvironment, environment_lookup

PYTHON = "/usr/bin/python3"
FETCH = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=10).read()"

pytestmark = pytest.mark.skipif(not os.path.exists(PYTHON), reason=f"the host has no {PYTHON}")


class Fetching(ScriptedEnvironment):
    """Its agent fetches a page from the one host that its task allows, and one from another."""

    def __init__(self, allowed: int, other: int) -> None:
        super().__init__()
        self.spec = SandboxSpec(egress=(f"127.0.0.1:{allowed}",))
        self._ports = (allowed, other)

    async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
        box = await context.leases.get_agent_sandbox(self.spec)
        for port in self._ports:
            await box.exec([PYTHON, "-c", FETCH, f"http://127.0.0.1:{port}/"], timeout=20)


async def _page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
    writer.close()


@pytest.fixture
async def server() -> AsyncIterator[int]:
    async with await asyncio.start_server(_page, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture(params=[0, 1], ids=["cold", "warm"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[SandboxBackend]:
    try:
        backend = await open_backend(SandboxConfig(backend="userns", warm=request.param))
    except SandboxError as error:
        pytest.skip(f"user namespaces are refused here: {error.what}")
    yield backend
    await backend.close()


@pytest.fixture
def lines() -> Iterator[Any]:
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    logs.configure_logging("info", "json", stream)
    yield lambda: [line for line in map(json.loads, stream.getvalue().splitlines()) if "event" in line]
    root.handlers[:] = handlers
    root.setLevel(level)


async def test_each_request_is_a_line_that_names_its_rollout(backend: SandboxBackend, server: int, lines: Any) -> None:
    environment = Fetching(server, 1)
    runner = InProcessRunner(
        environment_lookup(environment), FakePolicySource(), backend, RunnerConfig(queue=1, init=1, run=1)
    )
    events = runner.events()
    for name in ("r0", "r1", "r2"):  # one after the other: what warms up on behalf of one is handed to the next
        request = RolloutRequest(rollout_id=name, group_id="g", environment="scripted", task={})
        await runner.accept(Job(request=request, accepted_at=time.time()))
        async with asyncio.timeout(60):
            finished = await anext(event async for event in events if isinstance(event, Finished))
        assert finished.rollout.outcome.status == "completed", finished.rollout.outcome
    await runner.close()
    logged = [
        (*(line[name] for name in ("rollout_id", "group_id", "stage")), line["event"]["port"], line["event"]["outcome"])
        for line in lines()
    ]
    assert logged == [
        (name, "g", "run", port, outcome)
        for name in ("r0", "r1", "r2")
        for port, outcome in ((server, "allowed"), (1, "refused"))
    ]
    assert all(line["event"]["received"] > 5 for line in lines() if line["event"]["outcome"] == "allowed")
