"""A service that accepts before it has read its queue and has a runner: order, ids and ends stay the same."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.demand import Demand
from prorl_gym.errors import ConflictError, FailureKind, TaskError
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.intake import LoadingRunner
from prorl_gym.rollout.ledger.encoding import decode_rollout
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    ScriptedEnvironment,
    environment_lookup,
)

ONE_BY_ONE = RunnerConfig(queue=1, init=1, ready=0, run=1, eval=1)


def ask(rollout_id: str, **task: Any) -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, environment="scripted", task={"id": rollout_id, **task})


def runner() -> InProcessRunner:
    return InProcessRunner(environment_lookup(ScriptedEnvironment()), FakePolicySource(), EmptyBackend(), ONE_BY_ONE)


def must_offer(environment: str) -> None:
    if environment != "scripted":
        raise TaskError(FailureKind.UNKNOWN_ENVIRONMENT, "There is none of that name.")


@asynccontextmanager
async def accepting(file: Path) -> AsyncGenerator[RolloutService]:
    """A service that accepts, over a queue of ``old0`` and ``old1``."""
    ledger = await SqliteLedger.open(LedgerConfig(path=file))
    await ledger.add_rollouts([ask("old0"), ask("old1")])
    await ledger.close()
    service = RolloutService(await SqliteLedger.open(LedgerConfig(path=file)), LoadingRunner(must_offer))
    await service.start_accepting()
    try:
        yield service
    finally:
        await asyncio.wait_for(service.stop(drain=False), 10)


async def ends(service: RolloutService, count: int) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    async for delivery in service.stream():
        rollout = decode_rollout(delivery.record)
        found.append((rollout.rollout_id, rollout.outcome.status))
        if len(found) == count:
            break
    return found


async def test_what_comes_early_is_counted_and_waits_behind_the_queue(tmp_path: Path) -> None:
    async with accepting(tmp_path / "l.db") as service:
        await service.submit([ask("new0"), ask("new1")])
        status = await service.status()
        assert (service.pending, status.queued, status.running, status.ready) == (4, 4, 0, False)
        await service.start_dispatching(runner())
        order = ["old0", "old1", "new0", "new1"]
        assert await ends(service, 4) == [(name, "completed") for name in order]
        assert (service.pending, service.problem) == (0, "")


async def test_an_id_of_the_queue_is_known_before_the_queue_is_read(tmp_path: Path) -> None:
    async with accepting(tmp_path / "l.db") as service:
        assert [answer.duplicate for answer in await service.submit([ask("old1"), ask("new")])] == [True, False]
        with pytest.raises(ConflictError):
            await service.submit([ask("old1", reward=0.5)])
        await service.start_dispatching(runner())
        assert [name for name, _ in await ends(service, 3)] == ["old0", "old1", "new"]


async def test_an_early_cancel_reaches_the_queue_and_what_came_early(tmp_path: Path) -> None:
    async with accepting(tmp_path / "l.db") as service:
        await service.submit([ask("new")])
        assert await service.cancel(["old1", "new"]) == ["old1", "new"]
        for name in ("old1", "new"):
            rollout = await service.result(name, wait=10)
            assert rollout is not None and rollout.outcome.status == "cancelled"
        await service.submit([ask("later")])
        await service.start_dispatching(runner())
        assert (await ends(service, 4))[2:] == [("old0", "completed"), ("later", "completed")]


async def test_an_early_demand_holds_for_what_came_early(tmp_path: Path) -> None:
    async with accepting(tmp_path / "l.db") as service:
        grouped = [ask("new").model_copy(update={"group_id": "g"})]
        await service.submit(grouped)
        status = await service.set_demand("default", Demand(groups=0))
        assert status.run_id == "default"
        rollout = await service.result("new", wait=10)
        assert rollout is not None and rollout.outcome.status == "cancelled"


async def test_a_stop_before_it_began_leaves_everything_to_the_next_start(tmp_path: Path) -> None:
    async with accepting(tmp_path / "l.db") as service:
        await service.submit([ask("new")])
    again = RolloutService(await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db")), runner())
    await again.start()
    try:
        assert await ends(again, 3) == [(name, "completed") for name in ("old0", "old1", "new")]
        rollout = await again.result("new")
        assert rollout is not None and (rollout.attempt, rollout.retries) == (0, [])
    finally:
        await asyncio.wait_for(again.stop(drain=False), 10)


async def test_an_environment_that_is_unknown_is_refused_early(tmp_path: Path) -> None:
    async with accepting(tmp_path / "l.db") as service:
        with pytest.raises(TaskError):
            await service.submit([ask("new").model_copy(update={"environment": "scriptd"})])
        assert service.pending == 2
