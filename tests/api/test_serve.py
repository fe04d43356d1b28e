"""The whole service as a process of its own: it answers, and it ends as it should on signals."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.client import SyncClient, read_token
from prorl_gym.records import RolloutRequest

pytestmark = pytest.mark.slow

# The wiring of `build_service` without sandboxes and engines, which other tests start.
SERVE = """
import asyncio, sys
from contextlib import AsyncExitStack
from pathlib import Path
from prorl_gym.api import service_process
from prorl_gym.api.build import LoadedService
from prorl_gym.api.config import ServiceConfig
from prorl_gym.config import load_config
from prorl_gym.logs import configure_logging
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend, FakePolicySource, ScriptedEnvironment
from prorl_gym.testing.rollout.fake_rollout import environment_lookup
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService

async def build_service(config):
    ledger = await SqliteLedger.open(config.ledger_config)
    environments = environment_lookup(ScriptedEnvironment())
    runner = InProcessRunner(environments, FakePolicySource(), EmptyBackend(), config.runner)
    service = RolloutService(ledger, runner)
    await service.start()
    return LoadedService(service, EmptyBackend(), None, None, AsyncExitStack())

service_process.build_service = build_service
configure_logging("info", "json")
asyncio.run(service_process.serve(load_config(ServiceConfig, Path(sys.argv[1]))))
print("ended in order")
"""


@dataclass
class Process:
    child: subprocess.Popen[str]
    client: SyncClient

    def end(self, *signals: int) -> str:
        """Send signals one by one and return what it printed after them."""
        for number in signals:
            self.child.send_signal(number)
        out, _ = self.child.communicate(timeout=20)
        return out


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "service.json"
    inference = {"engines": ["http://127.0.0.1:1"], "model": "m", "tokenizer": "small"}
    file.write_text(json.dumps({"inference": inference, "state": str(tmp_path), "http": {"port": 0}}))
    return file


@pytest.fixture
def start(config: Path) -> Iterator[Any]:
    started: list[Process] = []

    def begin() -> Process:
        child = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(config)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert child.stderr is not None
        address = None
        while address is None:
            line = child.stderr.readline()
            assert line, "it ended before it served"
            address = re.search(r"serving on (http://[\d.:]+)", line)
        process = Process(child, SyncClient(address[1], token=read_token(config.parent / "token"), retry_seconds=0))
        started.append(process)
        return process

    yield begin
    for process in started:
        process.client.close()
        process.child.kill()
        process.child.communicate()


def ask(rollout_id: str, **task: Any) -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, environment="scripted", task=task)


def test_sigterm_ends_streams_and_finishes_what_is_in_hand(start: Any, config: Path) -> None:
    process = start()
    process.client.submit([ask("a"), ask("b", run="hang")])
    assert process.client.result("a", timeout=10).reward == 1.0
    assert process.client.cancel(["b"]) == ["b"]
    stream = process.client.stream()
    assert {next(stream).rollout.rollout_id, next(stream).rollout.rollout_id} == {"a", "b"}
    process.child.send_signal(signal.SIGTERM)
    out, log = process.child.communicate(timeout=20)
    assert (out.strip(), process.child.returncode) == ("ended in order", 0)
    assert all({"time", "level", "logger", "message"} <= set(json.loads(line)) for line in log.splitlines())
    assert read_token(config.parent / "token") not in log


@pytest.mark.slow
def test_a_second_signal_cuts_off_and_the_next_start_makes_it_again(start: Any) -> None:
    first = start()
    first.client.submit([ask("a", run="hang")])
    while first.client.status().capacity.run == 0:
        pass
    first.child.send_signal(signal.SIGINT)
    assert first.child.stderr is not None
    while "stopping" not in (line := first.child.stderr.readline()):
        pass
    assert "waiting up to 600 s for 1 rollouts in hand; 0 wait for the next start" in line
    assert first.end(signal.SIGINT).strip() == "ended in order"
    second = start()
    assert second.client.poll_result("a") is None
    assert second.client.cancel(["a"]) == ["a"]
    rollout = second.client.result("a", timeout=10)
    assert (rollout.outcome.status, rollout.retries) == ("cancelled", [])
    assert rollout.attempt >= 1, "the numbers of attempts that were cut off stay used"
    second.end(signal.SIGTERM)


def test_sigkill_and_a_restart_lose_nothing(start: Any) -> None:
    first = start()
    first.client.submit([ask(f"r{i}", run="hang" if i == 3 else "ok") for i in range(20)])
    first.end(signal.SIGKILL)
    second = start()
    second.client.cancel(["r3"])
    ends = {second.client.result(f"r{i}", timeout=10).outcome.status for i in range(20) if i != 3}
    assert ends == {"completed"}
    assert second.client.result("r3", timeout=10).outcome.status == "cancelled"
    streamed = [one.rollout.rollout_id for one in second.client.stream(follow=False)]
    assert sorted(streamed) == sorted(f"r{i}" for i in range(20))
    second.end(signal.SIGTERM)
