"""The dispatcher and the attempt settler: a failure of one rollout ends that one alone, and no call waits for ever."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ledger_writer import change, opened
from test_service import QUICK, Bench, ask, settled, until

from prorl_gym.client.wire_models import AcceptedRollout, Capacity
from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, ConflictError, FailureKind, ShuttingDownError
from prorl_gym.records import Outcome, Rollout, RolloutRequest, Score
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig, LedgerError
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.protocol import Finished, Job, ParkingChanged, StageEntered
from prorl_gym.rollout.scheduling.attempt import terminal_record
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    ScriptedEnvironment,
    environment_lookup,
)
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger


async def test_an_attempt_that_cannot_begin_ends_that_rollout_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Confused(MemoryLedger):
        async def begin_attempt(self, rollout_id: str) -> Job:
            if rollout_id == "bad":
                raise ConflictError("rollout bad: attempt 0 was begun before.")
            return await super().begin_attempt(rollout_id)

    async with Bench(Confused()) as service:
        service.hold_dispatch()  # they are queued: nothing begins in the commit that accepts it
        await service.submit([ask("first"), ask("bad"), ask("last")])
        service.release_dispatch()
        bad = await settled(service, "bad")
        assert (bad.outcome.kind, bad.outcome.message) == (
            FailureKind.INTERNAL,
            "rollout bad: attempt 0 was begun before.",
        )
        for name in ("first", "last"):
            assert (await settled(service, name)).outcome.status == "completed"
        await service.submit([ask("later")])
        assert (await settled(service, "later")).outcome.status == "completed"
        assert (await service.status()).ready
    assert "the rollout cannot go on" in caplog.text


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("UPDATE bodies SET body = 'no json' WHERE seq = 2", "not JSON"),
        ("UPDATE bodies SET body = json_set(body, '$.later', 'gold') WHERE seq = 2", "later: Extra inputs"),
        ("INSERT INTO attempts VALUES (2, 0, 'a_later_kind', 'run', 'x', 0, 0, NULL)", "kind: Input should be"),
    ],
)
async def test_a_row_that_cannot_be_read_ends_that_rollout_alone(tmp_path: Path, damage: str, said: str) -> None:
    config = LedgerConfig(path=tmp_path / "l.db")
    async with opened(config) as ledger:
        await ledger.add_rollouts([ask("first"), ask("bad", run_id="run7", group_id="g"), ask("last")])
    change(config.path, damage)
    async with Bench(await SqliteLedger.open(config)) as service:
        for name in ("first", "last"):
            assert (await settled(service, name)).outcome.status == "completed"
        bad = await settled(service, "bad")
        assert (bad.outcome.kind, bad.run_id, bad.group_id, bad.environment) == (
            FailureKind.INTERNAL,
            "run7",
            "g",
            "scripted",
        )
        assert said in bad.outcome.message
        assert "gold" not in bad.outcome.message


async def test_the_record_that_stands_is_the_answer() -> None:
    class Twice(MemoryLedger):
        """Another writer wrote the record first."""

        async def begin_attempt(self, rollout_id: str) -> Job:
            (job,) = await self.next_jobs([rollout_id])
            await self.finish(terminal_record(job, Outcome(status="cancelled", reason=CancelReason.STALE)))
            return await super().begin_attempt(rollout_id)

    async with Bench(Twice()) as service:
        service.hold_dispatch()
        await service.submit([ask("a")])
        service.release_dispatch()
        assert (await settled(service, "a")).outcome.reason is CancelReason.STALE


async def test_a_record_that_cannot_be_written_does_not_leave_its_caller_waiting() -> None:
    class Picky(MemoryLedger):
        async def finish(self, rollout: Rollout) -> int | None:
            if rollout.rollout_id == "bad":
                raise TypeError("no such thing can be written")
            return await super().finish(rollout)

    ledger = Picky()
    async with Bench(ledger) as service:
        await service.submit([ask("bad"), ask("good")])
        with pytest.raises(TypeError, match="no such thing"):
            await settled(service, "bad")
        assert (await settled(service, "good")).outcome.status == "completed"
        assert [job.request.rollout_id for job in await ledger.pending_jobs()] == ["bad"]


async def test_when_a_loop_dies_every_waiter_gets_the_error() -> None:
    async def defect() -> Capacity:
        raise TypeError("a defect")

    bench = Bench(MemoryLedger())
    async with bench as service:
        service.hold_dispatch()
        await service.submit([ask("a")])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench.runner, "capacity", defect)
            service.release_dispatch()
            with pytest.raises(ShuttingDownError, match=r"The service is broken \(TypeError\)"):
                await service.result("a", wait=10)
        with pytest.raises(ShuttingDownError, match=r"The service is broken \(TypeError\)"):
            await service.result("a", wait=10)  # later callers get the error, too
        with pytest.raises(ShuttingDownError, match="broken"):
            await service.submit([ask("b")])
        status = await service.status()
        assert (status.ready, status.problem) == (False, "The service is broken (TypeError).")


@pytest.mark.parametrize("drain", [True, False])
async def test_stopping_loses_nothing(tmp_path: Path, drain: bool) -> None:
    config = LedgerConfig(path=tmp_path / "l.db")
    bench = Bench(await SqliteLedger.open(config), QUICK, RunnerConfig(queue=3, init=1, run=1, eval=1))
    await bench.service.start()
    await bench.service.submit([ask("worked", init="hang", flaky=1), *(ask(f"r{i}") for i in range(20))])

    at_work = (1, 0)
    await until(bench.service, lambda s: (s.capacity.init, s.capacity.free) == at_work and s.capacity.queued > 1)
    await asyncio.sleep(0)
    stop: Any = asyncio.create_task(bench.service.stop(drain=drain))
    await asyncio.sleep(0)
    await bench.service.cancel(["worked"] if drain else [])
    await asyncio.wait_for(stop, 10)
    again = await SqliteLedger.open(config)
    lost = {pending.rollout_id: pending.restarts for pending in await again.recover()}
    await again.close()
    assert not any(lost.values()), "only a death of the service counts against a rollout"
    assert len(lost) > 10


# --- cancels and late ends ------------------------------------------------------------------------------------------


class Slow(MemoryLedger):
    """Holds back every terminal record until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    async def finish(self, rollout: Rollout) -> int | None:
        self.asked.set()
        await self.go.wait()
        return await super().finish(rollout)


async def test_a_cancel_reaches_a_record_that_is_being_written() -> None:
    ledger = Slow()
    async with Bench(ledger) as service:
        await service.submit([ask("a")])
        await ledger.asked.wait()
        assert await service.cancel(["a"]) == ["a"]
        ledger.go.set()
        rollout = await settled(service, "a")
        assert (rollout.outcome.status, rollout.reward, rollout.sampled_tokens) == ("cancelled", None, 3)
        assert await service.cancel(["a"]) == []


async def test_a_cancel_that_cannot_be_remembered_stops_nothing() -> None:
    class Broken(MemoryLedger):
        broken = True

        async def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> list[str]:
            if self.broken:
                raise LedgerError("the disk is full.")
            return await super().cancel(rollout_ids, reason)

    ledger = Broken()
    async with Bench(ledger) as service:
        await service.submit([ask("a", run="hang"), ask("b")])
        with pytest.raises(LedgerError):
            await service.cancel(["a", "b"])
        assert (await settled(service, "b")).reward == 1.0
        assert service.pending == 1
        ledger.broken = False
        assert await service.cancel(["a", "b"]) == ["a"]
        assert (await settled(service, "a")).outcome.status == "cancelled"


async def test_the_late_end_of_an_earlier_attempt_ends_nothing() -> None:
    class Late(InProcessRunner):
        """Tells the first attempt's end a second time, as a success, when the second one works."""

        async def events(self) -> AsyncIterator[StageEntered | ParkingChanged | Finished]:
            first: Rollout | None = None
            async for event in super().events():
                if isinstance(event, StageEntered) and event.attempt == 1 and event.stage == "run":
                    assert first is not None
                    yield Finished(rollout=first)
                if isinstance(event, Finished) and event.rollout.attempt == 0:
                    paid = {"outcome": Outcome(status="completed"), "score": Score(reward=0.25)}
                    first = event.rollout.model_copy(update=paid)
                yield event

    ledger = MemoryLedger()
    runner = Late(environment_lookup(ScriptedEnvironment()), FakePolicySource(), EmptyBackend())
    service = RolloutService(ledger, runner, QUICK)
    await service.start()
    await service.submit([ask("a", run="sandbox_lost", flaky=1)])
    rollout = await settled(service, "a")
    assert (rollout.attempt, rollout.reward) == (1, 1.0)
    await service.stop(drain=False)


@pytest.mark.parametrize("seed", range(6))
async def test_what_a_cancel_named_has_a_cancelled_record(tmp_path: Path, seed: int) -> None:
    """At random moments, over restarts and a disk that refuses: what was named is cancelled, without a reward."""
    dice = random.Random(seed)
    config = LedgerConfig(path=tmp_path / "l.db")
    named: set[str] = set()
    for life in range(3):
        bench = Bench(await SqliteLedger.open(config), runner=RunnerConfig(queue=4, init=2, run=3, eval=2))
        await bench.service.start()
        for turn in range(40):
            ids = [f"{life}-{turn}-{number}" for number in range(3)]
            await bench.service.submit(
                [ask(name, run=dice.choice(["ok", "ok", "hang", "sandbox_lost"])) for name in ids]
            )
            for _ in range(dice.randrange(12)):
                await asyncio.sleep(0)
            chosen = dice.sample(ids, 2)
            stopped = await bench.service.cancel(chosen)
            assert set(stopped) <= set(chosen)
            named.update(stopped)
        await asyncio.wait_for(bench.service.stop(drain=False), 20)
    async with Bench(await SqliteLedger.open(config)) as service:
        named.update(await service.cancel(runs=["default"]))
        for name in named:
            rollout = await settled(service, name)
            assert (rollout.outcome.status, rollout.reward) == ("cancelled", None)
    assert len(named) > 60


# --- first attempts that begin in the commit that accepts their rollout ----------------------------------------------


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
    free = (await bench.runner.capacity()).free
    async with bench.service.reserve_slots(free - 1) as first, bench.service.reserve_slots(2) as second:
        async with bench.service.reserve_slots(1) as third:
            assert (first, second, third) == (True, False, True)
    async with bench.service.reserve_slots(free) as again:
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
        assert len(bench.runner.attempts) == 0
    ledger = await SqliteLedger.open(config)
    (found,) = await ledger.recover()
    assert (found.rollout_id, found.restarts) == ("a", 0)
    assert (await ledger.begin_attempt("a")).attempt == 1, "its number stays used"
    await ledger.close()
