"""Rollouts whose sandboxes die at random moments: a reward is the right one, or there is none."""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from scripted_sessions import ScriptedPolicies
from test_service import QUICK

from prorl_gym.environments import registry
from prorl_gym.environments.playback import gold_steps
from prorl_gym.errors import Cause, SandboxError
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

ROOT = Path(__file__).parents[2] / "environments"


def gold_steps_of(request: RolloutRequest) -> Any:
    return gold_steps(request.environment, request.task)


def requests(count: int) -> list[RolloutRequest]:
    rows: list[dict[str, Any]] = []
    for environment in ("code", "swe", "math", "taskdir"):
        path = ROOT / f"prorl_{environment}" / "data" / "example.jsonl"
        rows += map(json.loads, path.read_text(encoding="utf-8").splitlines())
    Random(3).shuffle(rows)
    return [
        RolloutRequest(rollout_id=f"r{index}", environment=row["environment"], task=row["task"])
        for index, row in zip(range(count), rows * count, strict=False)
    ]


def children_of(pid: int) -> list[int]:
    """Return the first processes of the sandboxes of a spawner."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", ["spawner", pytest.param("init", marks=pytest.mark.release)])
async def test_no_kill_costs_a_right_answer_its_reward(victim: str) -> None:
    """Gold is played: each record has reward 1, or an infrastructure failure and no reward."""
    try:
        backend = await open_backend(SandboxConfig(backend="userns"))
    except SandboxError as error:
        pytest.skip(error.what)
    assert isinstance(backend, NamespaceBackend)
    chance, over = Random(7), asyncio.Event()

    async def kill() -> int:
        """Kill now and then until all is over; return how often."""
        kills = 0
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), chance.uniform(0.3, 1.5))
            spawner = await backend.spawner_pid()
            victims = [spawner] if victim == "spawner" else children_of(spawner)
            if victims and not over.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(victims), signal.SIGKILL)
                    kills += 1
        return kills

    runner = InProcessRunner(
        registry.get, ScriptedPolicies(gold_steps_of), backend, RunnerConfig(init=2, run=4, eval=4)
    )
    service = RolloutService(MemoryLedger(), runner, QUICK.model_copy(update={"attempts": 6}))
    await service.start()
    killing = asyncio.create_task(kill())
    try:
        asked = requests(24)
        await service.submit(asked)
        records = [await service.result(request.rollout_id, wait=120) for request in asked]
    finally:
        over.set()
        kills = await killing
        await service.stop(drain=False)
        await backend.close()
    assert kills >= 3
    for record in records:
        assert record is not None
        assert all(retry.kind.value.startswith(("sandbox_", "grader_")) for retry in record.retries), record.retries
        if record.outcome.status == "completed":
            assert record.reward == 1.0, (record.rollout_id, record.score)
        else:
            assert (record.outcome.cause, record.reward) == (Cause.INFRASTRUCTURE, None), record.outcome
    assert any(record is not None and record.retries for record in records), "a kill must have struck a rollout"
