"""What the dispatcher hands out and when: holds, pauses, shares, and a hundred thousand that wait."""

import asyncio
import itertools
import time
from collections import Counter
from pathlib import Path

import pytest
from test_service import Bench, ask, settled, until

from prorl_gym.environments.protocol import Episode, RunContext
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.protocol import RecoveredRollout
from prorl_gym.rollout.scheduling.pending import PendingIndex, PendingRollout
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.settings import RolloutSettings
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    Script,
    ScriptedEnvironment,
    environment_lookup,
)
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

TINY = RunnerConfig(queue=1, init=1, run=1, eval=1)


def entry(name: str, environment: str = "math", *, evaluation: bool = False) -> PendingRollout:
    return PendingRollout.from_source(
        RecoveredRollout(rollout_id=name, run_id="r", group_id=None, environment=environment, evaluation=evaluation)
    )


def lined_up(*entries: PendingRollout, shares: dict[str, float] | None = None) -> PendingIndex:
    line = PendingIndex(shares)
    for one in entries:
        line.by_id[one.rollout_id] = one
        line.enqueue(one)
    return line


# --- the line -----------------------------------------------------------------------------------------------------


def test_a_held_one_stands_outside_until_it_is_allowed() -> None:
    a, b = entry("a"), entry("b")
    line = lined_up(a, b)
    line.hold(a)
    assert [one.rollout_id for one in line.dequeue(5)] == ["b"]
    assert not line.queue_not_empty.is_set()
    line.release(a)
    line.release(a)
    assert line.queue_not_empty.is_set()
    assert [one.rollout_id for one in line.dequeue(5)] == ["a"]
    assert line.dequeue(5) == []


def test_what_a_group_waits_for_alone_goes_before_what_has_not_begun() -> None:
    late = RecoveredRollout(rollout_id="a:r1", run_id="r", group_id="g", environment="math", evaluation=False)
    replacement = PendingRollout.from_source(late._replace(stands_in_for="a"))
    tried = PendingRollout.from_source(late._replace(rollout_id="b", failures=1))
    line = lined_up(entry("x"), entry("y"), replacement, tried)
    handed = [one.rollout_id for one in line.dequeue(5)]
    assert set(handed[:2]) == {"a:r1", "b"}
    assert handed[2:] == ["x", "y"]


def test_a_held_one_that_comes_back_for_another_attempt_waits_outside_too() -> None:
    a = entry("a")
    line = lined_up(a)
    line.dequeue(1)
    line.hold(a)
    line.settle_charge(a, 1.0)
    line.enqueue(a)  # the pause after a failure is over
    assert not line.queue_not_empty.is_set()
    line.release(a)
    assert line.dequeue(1) == [a]


def test_allowing_what_ended_or_works_lines_nothing_up() -> None:
    ended, working = entry("ended"), entry("working")
    line = lined_up(ended, working)
    line.hold(ended)
    line.remove(ended)
    line.dequeue(5)
    line.hold(working)
    for one in (ended, working):
        line.release(one)
    assert line.dequeue(5) == []


def test_evaluation_is_handed_out_first_and_is_fair_among_its_environments() -> None:
    entries = [entry(f"t{number}") for number in range(3)]
    entries += [entry(f"{name}{number}", name, evaluation=True) for name in ("aime", "swe") for number in range(6)]
    handed = [one.rollout_id for one in lined_up(*entries).dequeue(20)]
    assert handed[12:] == ["t0", "t1", "t2"]
    assert Counter(name.rstrip("012345") for name in handed[:6]) == {"aime": 3, "swe": 3}


# --- the dispatcher -----------------------------------------------------------------------------------------------


async def test_a_pause_begins_nothing_and_finishes_what_is_in_hand() -> None:
    bench = Bench(runner=TINY)
    async with bench as service:
        await service.submit([ask("before", run="hang")])
        await until(service, lambda status: status.capacity.run == 1)
        service.hold_dispatch()
        await service.submit([ask("meanwhile"), ask("unwanted")])
        await service.cancel(["before", "unwanted"])
        assert (await settled(service, "before")).outcome.status == "cancelled"
        assert (await settled(service, "unwanted")).outcome.stage == "queue"
        status = await service.status()
        assert (status.paused, status.ready, status.queued) == (True, True, 1)
        assert await service.result("meanwhile", wait=0.05) is None
        service.release_dispatch()
        assert (await settled(service, "meanwhile")).outcome.status == "completed"
        assert not (await service.status()).paused


async def test_a_pause_does_not_keep_the_service_from_stopping() -> None:
    ledger = MemoryLedger()
    async with Bench(ledger) as service:
        service.hold_dispatch()
        await service.submit([ask("a")])
    ledger.reopen()
    assert [job.request.rollout_id for job in await ledger.pending_jobs()] == ["a"]


async def test_no_environment_starves_the_other_through_the_whole_service() -> None:
    """Many long rollouts of one environment were submitted first; the short ones of another pass them."""
    running = asyncio.Event()

    class Slow(ScriptedEnvironment):
        async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
            running.set()
            await super().run(task, episode, context)

    limits = RolloutSettings(run_seconds=0.05)
    slow = [
        ask(f"slow{n}", run="hang").model_copy(update={"environment": "slow", "settings": limits}) for n in range(60)
    ]
    quick = [ask(f"quick{n}").model_copy(update={"environment": "quick"}) for n in range(60)]
    async with Bench(environments=[Slow("slow"), ScriptedEnvironment("quick")]) as service:
        await service.submit(slow)
        await running.wait()
        await service.submit(quick)
        await asyncio.gather(*(settled(service, request.rollout_id) for request in quick))
        assert sum([await service.result(request.rollout_id) is None for request in slow]) > 20


# --- many that wait ------------------------------------------------------------------------------------------------

COUNT = 90_000
RECOVER = 1.5
"""Seconds of processor time; 0.6 on an idle machine."""
WRITTEN = 8000
"""Records that are written while the event loop is watched."""
CANCEL = 2.0
"""Seconds of processor time until the answer; 0.6 on an idle machine."""


def waiting(number: int) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=f"r{number}",
        group_id=f"g{number // 8}",
        group_size=8,
        replica=number % 8,
        environment="scripted",
        task={"run": "hang"},
    )


async def lives(turns: list[float], alive: asyncio.Event) -> None:
    """Note at which processor time of its thread the event loop had a turn: only what the service does can delay it."""
    while True:
        turns.append(time.thread_time())
        alive.set()
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_many_that_wait_are_taken_up_and_cancelled(tmp_path: Path) -> None:
    config = LedgerConfig(path=tmp_path / "l.db")
    ledger = await SqliteLedger.open(config)
    for start in range(0, COUNT, 1000):
        await ledger.add_rollouts([waiting(number) for number in range(start, start + 1000)])
    await ledger.close()
    runner = InProcessRunner(environment_lookup(ScriptedEnvironment()), FakePolicySource(), EmptyBackend())
    began = time.process_time()
    service = RolloutService(await SqliteLedger.open(config), runner)
    await service.start()
    recovered = time.process_time() - began
    assert service.pending == COUNT
    service.hold_dispatch()
    records: list[str] = []
    written = asyncio.Event()

    def on_record(record: Rollout) -> None:
        records.append(record.rollout_id)
        if len(records) == WRITTEN:
            written.set()

    service.record_observers.append(on_record)
    turns: list[float] = []
    alive = asyncio.Event()
    living = asyncio.create_task(lives(turns, alive))
    await alive.wait()
    began, since = time.process_time(), time.monotonic()
    stopped = await service.cancel(runs=["default"])
    cancelled, answered = time.process_time() - began, time.monotonic() - since
    await asyncio.wait_for(written.wait(), 30)
    living.cancel()
    longest = max(later - earlier for earlier, later in itertools.pairwise(turns))
    print(f"recovered {recovered:.2f} s, cancelled {cancelled:.2f} s ({answered:.2f} s), longest {longest:.2f} s")
    assert len(stopped) == COUNT
    assert service.pending <= COUNT - WRITTEN
    await asyncio.wait_for(service.stop(drain=False), 30)
    assert recovered < 2 * RECOVER
    assert cancelled < 2 * CANCEL
    assert longest < 2.0
    ledger = await SqliteLedger.open(config)
    assert all(one.cancel_reason is not None for one in await ledger.recover()), "the next start ends the rest"
    await ledger.close()
