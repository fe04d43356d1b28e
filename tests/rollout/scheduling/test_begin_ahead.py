"""The first attempt begins in the commit that accepts a rollout, when the runner has room for it at once."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_service import QUICK, Bench, ask, settled

from prorl_gym.client.wire_models import AcceptedRollout, Capacity
from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.intake import Intake
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.protocol import Job
from prorl_gym.rollout.scheduling.dispatcher import Dispatcher
from prorl_gym.rollout.scheduling.runner import RunnerConfig
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger


class Noting(MemoryLedger):
    """Notes which attempts began, and how."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead: list[str] = []
        self.later: list[str] = []

    async def add_and_begin(self, requests: Sequence[RolloutRequest]) -> tuple[list[AcceptedRollout], list[Job]]:
        accepted, jobs = await super().add_and_begin(requests)
        self.ahead += [job.request.rollout_id for job in jobs]
        return accepted, jobs

    async def begin_attempt(self, rollout_id: str) -> Job:
        self.later.append(rollout_id)
        return await super().begin_attempt(rollout_id)


ROOM = RunnerConfig(queue=3, init=1, run=1, eval=1)


async def test_with_room_nothing_is_begun_in_a_commit_of_its_own() -> None:
    ledger = Noting()
    async with Bench(ledger, QUICK, ROOM) as service:
        await service.submit([ask("a"), ask("b")])
        assert [(await settled(service, name)).attempt for name in "ab"] == [0, 0]
    assert (ledger.ahead, ledger.later) == (["a", "b"], [])


async def test_another_attempt_begins_by_itself() -> None:
    ledger = Noting()
    async with Bench(ledger) as service:
        await service.submit([ask("a", run="engine_timeout", flaky=1)])
        assert (await settled(service, "a")).attempt == 1
    assert (ledger.ahead, ledger.later) == (["a"], ["a"])


@pytest.mark.parametrize("why", ["too many", "paused", "another one is queued", "its run has a demand"])
async def test_otherwise_it_is_queued_first(why: str) -> None:
    ledger = Noting()
    bench = Bench(ledger, QUICK, ROOM)
    async with bench as service:
        if why == "its run has a demand":
            await service.set_demand("default", Demand(groups=5))
        if why in ("paused", "another one is queued"):
            service.hold_dispatch()
        first = [ask(f"first-{n}", run="hang") for n in range(9 if why == "too many" else 0)]
        first += [ask("waits", run="hang")] if why == "another one is queued" else []
        if first:
            await service.submit(first)
        await service.submit([ask("late")])
        assert ledger.ahead == []


async def test_what_is_under_way_counts_as_taken() -> None:
    """Submissions in the same moment do not all believe that the same room is theirs."""
    bench = Bench(runner=ROOM)
    dispatcher = Dispatcher(bench.ledger, bench.runner, QUICK, lambda cursor, rollout: None)
    intake = Intake(bench.ledger, dispatcher, max_restarts=3)
    free = (await bench.runner.capacity()).free
    async with intake.reserve_slots(free - 1) as first, intake.reserve_slots(2) as second:
        async with intake.reserve_slots(1) as third:
            assert (first, second, third) == (True, False, True)
    async with intake.reserve_slots(free) as again:
        assert again


async def test_nothing_is_owed_to_what_was_refused_or_cancelled() -> None:
    ledger = Noting()
    bench = Bench(ledger, QUICK, ROOM)
    async with bench as service:
        service.hold_dispatch()
        await service.submit([ask("a")])
        service.release_dispatch()
        await settled(service, "a")
        await service.submit([ask("a")])  # known: nothing of it begins
        await service.submit([ask("b", run="hang")])
        await service.cancel(["b"])
        assert (await settled(service, "b")).outcome.reason is CancelReason.CLIENT
        names = [f"c{n}" for n in range((await bench.runner.capacity()).free)]
        await service.submit([ask(name) for name in names])
    assert ledger.ahead == ["b", *names], "all slots were free again"


async def test_a_stop_withdraws_what_began_and_was_not_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LedgerConfig(path=tmp_path / "l.db")
    bench = Bench(await SqliteLedger.open(config), QUICK, ROOM)
    async with bench as service:
        capacity, asked = bench.runner.capacity, 0

        async def answer_once() -> Capacity:
            nonlocal asked
            asked += 1
            return await (capacity() if asked == 1 else asyncio.get_running_loop().create_future())

        monkeypatch.setattr(bench.runner, "capacity", answer_once)  # the dispatcher waits for its second answer
        await service.submit([ask("a")])
        while asked < 2:  # noqa: ASYNC110 - the dispatcher announces nothing
            await asyncio.sleep(0)
        assert bench.runner.snapshot().attempts == 0
    ledger = await SqliteLedger.open(config)
    (found,) = await ledger.recover()
    assert (found.rollout_id, found.restarts) == ("a", 0)
    assert (await ledger.begin_attempt("a")).attempt == 1, "its number stays used"
    await ledger.close()
