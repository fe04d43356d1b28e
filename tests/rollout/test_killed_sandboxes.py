"""Rollouts whose sandboxes die at random moments: a reward is the right one, or there is none."""

import json
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
from sandbox_killer import killing
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


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", ["spawner", pytest.param("init", marks=pytest.mark.release)])
async def test_no_kill_costs_a_right_answer_its_reward(victim: Literal["spawner", "init"]) -> None:
    """Gold is played: each record has reward 1, or an infrastructure failure and no reward."""
    try:
        backend = await open_backend(SandboxConfig(backend="userns"))
    except SandboxError as error:
        pytest.skip(error.what)
    assert isinstance(backend, NamespaceBackend)
    runner = InProcessRunner(
        registry.get, ScriptedPolicies(gold_steps_of), backend, RunnerConfig(init=2, run=4, eval=4)
    )
    service = RolloutService(MemoryLedger(), runner, QUICK.model_copy(update={"attempts": 6}))
    await service.start()
    try:
        asked = requests(24)
        async with killing(backend, victim, Random(7)) as count:
            await service.submit(asked)
            records = [await service.result(request.rollout_id, wait=120) for request in asked]
    finally:
        await service.stop(drain=False)
        await backend.close()
    assert count() >= 3
    for record in records:
        assert record is not None
        assert all(retry.kind.value.startswith(("sandbox_", "grader_")) for retry in record.retries), record.retries
        if record.outcome.status == "completed":
            assert record.reward == 1.0, (record.rollout_id, record.score)
        else:
            assert (record.outcome.cause, record.reward) == (Cause.INFRASTRUCTURE, None), record.outcome
    assert any(record is not None and record.retries for record in records), "a kill must have struck a rollout"
