"""What the dispatcher hands out, when, and what it tells: holds, pauses, shares, parking, the cost of retries."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from test_service import QUICK, Bench, ask, settled, until

from prorl_gym.environments.protocol import Episode, RunContext
from prorl_gym.errors import CancelReason
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.protocol import ParkingChanged, RecoveredRollout, StageEntered
from prorl_gym.rollout.scheduling.dispatcher import Dispatcher
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
        line.add(one)
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


def test_environments_are_handed_out_by_what_their_work_takes() -> None:
    line = lined_up(*(entry(f"{name}{number}", name) for name in ("math", "swe") for number in range(400)))
    seconds = {"math": 0.0, "swe": 0.0}
    for _ in range(40):
        for one in line.dequeue(8):
            length = 1.0 if one.environment == "math" else 20.0
            seconds[one.environment] += length
            line.settle_charge(one, length)
    assert seconds["math"] == pytest.approx(seconds["swe"], rel=0.1)


def test_a_cancelled_one_leaves_the_line() -> None:
    a = entry("a")
    line = lined_up(a)
    line.remove_from_queue(a)
    assert not line.queue_not_empty.is_set()
    assert line.dequeue(1) == []


# --- the dispatcher -----------------------------------------------------------------------------------------------


async def test_it_reports_cursor_and_record_and_every_stage() -> None:
    ledger = MemoryLedger()
    runner = InProcessRunner(environment_lookup(ScriptedEnvironment()), FakePolicySource(), EmptyBackend())
    reported: list[tuple[int, Rollout]] = []
    seen: list[StageEntered | ParkingChanged] = []
    dispatcher = Dispatcher(ledger, runner, QUICK, lambda cursor, rollout: reported.append((cursor, rollout)))
    dispatcher.add_stage_observer(seen.append)
    dispatcher.start()
    requests = [ask("a"), ask("b")]
    await ledger.add_rollouts(requests)
    for request in requests:
        entry = PendingRollout.from_source(request)
        dispatcher.pending.add(entry)
        dispatcher.pending.enqueue(entry)

    async def both() -> bool:
        return len(reported) == 2

    await until(both)
    await dispatcher.stop(drain=True)
    assert [(d.cursor, d.record) for d in await ledger.read_records(None, 0, 10)] == [
        (cursor, rollout.model_dump_json()) for cursor, rollout in reported
    ]
    stages = [event.stage for event in seen if isinstance(event, StageEntered) and event.rollout_id == "a"]
    assert stages == ["queue", "init", "run", "eval"]


async def test_a_pause_begins_nothing_and_finishes_what_is_in_hand() -> None:
    bench = Bench(runner=TINY)
    async with bench as service:
        await service.submit([ask("before", run="hang")])
        await until(lambda: working(service, 1))
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


async def working(service: RolloutService, count: int) -> bool:
    return (await service.status()).capacity.run == count


async def test_what_failed_attempts_cost_is_in_the_record() -> None:
    async with Bench() as service:
        await service.submit([ask("a", turns=2, eval="grader_failed", flaky=2)])
        rollout = await settled(service, "a")
    assert (rollout.outcome.status, rollout.attempt, rollout.sampled_tokens) == ("completed", 2, 6)
    assert [(retry.attempt, retry.sampled_tokens) for retry in rollout.retries] == [(0, 6), (1, 6)]
    assert all(retry.seconds > 0 for retry in rollout.retries)


async def test_a_failure_that_persists_keeps_the_tokens_of_its_last_attempt() -> None:
    async with Bench() as service:
        await service.submit([ask("a", turns=3, run="engine_unreachable")])
        rollout = await settled(service, "a")
    assert (rollout.outcome.status, rollout.reward, rollout.sampled_tokens) == ("failed", None, 9)
    assert [retry.sampled_tokens for retry in rollout.retries] == [9, 9]


async def test_no_environment_starves_the_other_through_the_whole_service() -> None:
    """Many long rollouts of one environment were submitted first; the short ones of another pass them."""
    running = asyncio.Event()

    class Slow(ScriptedEnvironment):
        async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
            running.set()
            await super().run(task, episode, context)

    slow, quick = Slow("slow"), ScriptedEnvironment("quick")
    policies, backend = FakePolicySource(), EmptyBackend()
    runner = InProcessRunner(
        environment_lookup(slow, quick), policies, backend, RunnerConfig(queue=2, init=2, run=2, eval=2)
    )
    service = RolloutService(MemoryLedger(), runner, QUICK)
    await service.start()

    def many(environment: str, limits: RolloutSettings | None = None, **task: Any) -> list[RolloutRequest]:
        return [
            RolloutRequest(
                rollout_id=f"{environment}{number}",
                environment=environment,
                task=task,
                settings=limits or RolloutSettings(),
            )
            for number in range(60)
        ]

    await service.submit(many("slow", RolloutSettings(run_seconds=0.05), run="hang"))
    await running.wait()
    await service.submit(many("quick"))
    await asyncio.gather(*(settled(service, f"quick{n}") for n in range(60)))
    left = sum([await service.result(f"slow{n}") is None for n in range(60)])
    assert left > 20
    await service.cancel([f"slow{n}" for n in range(60)], reason=CancelReason.CLIENT)
    await asyncio.gather(*(settled(service, f"slow{n}") for n in range(60)))
    await service.stop()
    assert (backend.sandbox_count, policies.open_sessions) == (0, 0)


async def test_park_and_unpark_reach_the_runner() -> None:
    class Gentle(ScriptedEnvironment):
        """Lets the loop run before its first call."""

        async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
            for _ in range(20):
                await asyncio.sleep(0)
            await super().run(task, episode, context)

    bench = Bench(environment=Gentle())
    records: asyncio.Queue[Rollout] = asyncio.Queue()
    dispatcher = Dispatcher(bench.ledger, bench.runner, QUICK, lambda cursor, rollout: records.put_nowait(rollout))
    seen: list[StageEntered | ParkingChanged] = []
    one = PendingRollout.from_source(ask("a", turns=2))

    def park_at_once(event: StageEntered | ParkingChanged) -> None:
        if isinstance(event, StageEntered) and event.stage == "run":
            dispatcher.spawn(dispatcher.park([one]))

    dispatcher.add_stage_observer(seen.append)
    dispatcher.add_stage_observer(park_at_once)
    await bench.ledger.add_rollouts([ask("a", turns=2)])
    dispatcher.pending.add(one)
    dispatcher.pending.enqueue(one)
    dispatcher.start()

    async def parked() -> bool:
        return (await bench.runner.capacity()).parked == 1

    await until(parked)
    await dispatcher.unpark([one])
    assert (await asyncio.wait_for(records.get(), 10)).turns == 2
    await dispatcher.stop(drain=True)
    assert [event.is_parked for event in seen if isinstance(event, ParkingChanged)] == [True, False]
