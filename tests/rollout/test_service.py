"""The service: nothing accepted is lost, every id gets one record, infrastructure failures are made again."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.client.wire_models import DispatchStatus
from prorl_gym.errors import CancelReason, ConflictError, FailureKind, NotFoundError, ShuttingDownError, TaskError
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig, LedgerError
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.protocol import Job
from prorl_gym.rollout.scheduling.attempt_settler import RetryConfig
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.rollout.fake_rollout import (
    EmptyBackend,
    FakePolicySource,
    ScriptedEnvironment,
    environment_lookup,
)
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

QUICK = RetryConfig(pause_seconds=0.001, ledger_pause_seconds=0.01)
SMALL = RunnerConfig(queue=2, init=2, run=2, eval=2, cleanup_seconds=1)


def ask(rollout_id: str, run_id: str = "default", group_id: str | None = None, **task: Any) -> RolloutRequest:
    return RolloutRequest(
        rollout_id=rollout_id,
        run_id=run_id,
        group_id=group_id,
        environment="scripted",
        task={"id": rollout_id, **task},
    )


class Bench:
    """A service on counting fakes."""

    def __init__(
        self,
        ledger: SqliteLedger | None = None,
        config: RetryConfig = QUICK,
        runner: RunnerConfig = SMALL,
        environments: Sequence[ScriptedEnvironment] = (),
    ) -> None:
        self.ledger = ledger or MemoryLedger()
        self.backend = EmptyBackend()
        self.policies = FakePolicySource()
        lookup = environment_lookup(*(environments or [ScriptedEnvironment()]))
        self.runner = InProcessRunner(lookup, self.policies, self.backend, runner)
        self.service = RolloutService(self.ledger, self.runner, config)

    async def __aenter__(self) -> RolloutService:
        await self.service.start()
        return self.service

    async def __aexit__(self, *_: object) -> None:
        await asyncio.wait_for(self.service.stop(drain=False), 10)
        assert (self.backend.sandbox_count, self.policies.open_sessions) == (0, 0)
        assert len(self.service.tasks) == 0


async def settled(service: RolloutService, rollout_id: str) -> Rollout:
    rollout = await service.result(rollout_id, wait=10)
    assert rollout is not None
    return rollout


async def until(service: RolloutService, fact: Callable[[DispatchStatus], bool]) -> None:
    """Wait until this is true of the service's status."""
    async with asyncio.timeout(20):  # the ledger works in a thread, which may get no core for a while
        while not fact(await service.status()):  # noqa: ASYNC110 - a status raises no event
            await asyncio.sleep(0.001)


async def test_submit_and_result() -> None:
    async with Bench() as service:
        answers = await service.submit([ask("a", reward=0.25), ask("b")])
        assert [answer.duplicate for answer in answers] == [False, False]
        assert (await settled(service, "a")).reward == 0.25
        assert (await settled(service, "b")).outcome.status == "completed"
        assert [answer.duplicate for answer in await service.submit([ask("a", reward=0.25)])] == [True]
        assert (await service.status()).finished == 2


async def test_refusals(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with pytest.raises(ShuttingDownError):
        await bench.service.submit([ask("early")])
    async with bench as service:
        await service.submit([ask("a", run="hang")])
        with pytest.raises(ConflictError) as caught:
            await service.submit([ask("new"), ask("a", run="ok")])
        assert str(caught.value) == (
            "rollout a was submitted before with another body.\nSend the same body again, or use a fresh rollout_id."
        )
        with pytest.raises(NotFoundError, match="rollout new was never accepted"):
            await service.result("new")
        with pytest.raises(TaskError, match="its task is not JSON"):
            await service.submit([ask("nan", reward=float("nan"))])
    assert caplog.records == []  # the caller's mistakes


async def test_infrastructure_failures_are_retried_and_reported() -> None:
    async with Bench() as service:
        await service.submit([ask("a", run="engine_timeout", flaky=2, turns=2)])
        rollout = await settled(service, "a")
        assert (rollout.outcome.status, rollout.attempt, rollout.sampled_tokens) == ("completed", 2, 6)
        assert [(r.attempt, r.kind, r.stage, r.sampled_tokens) for r in rollout.retries] == [
            (0, FailureKind.ENGINE_TIMEOUT, "run", 6),
            (1, FailureKind.ENGINE_TIMEOUT, "run", 6),
        ]
        assert all(retry.seconds > 0 for retry in rollout.retries)


@pytest.mark.parametrize(
    ("script", "kind"),
    [({"eval": "grader_failed"}, FailureKind.GRADER_FAILED), ({"run": "crash"}, FailureKind.INTERNAL)],
)
async def test_retries_are_bounded_and_end_without_a_reward(script: dict[str, str], kind: FailureKind) -> None:
    async with Bench() as service:
        await service.submit([ask("a", turns=3, **script)])
        rollout = await settled(service, "a")
        assert (rollout.outcome.kind, rollout.attempt, rollout.reward) == (kind, 2, None)
        assert rollout.sampled_tokens == 9
        assert [(retry.attempt, retry.sampled_tokens) for retry in rollout.retries] == [(0, 9), (1, 9)]


@pytest.mark.parametrize("script", [{"run": "sandbox_limit"}, {"init": "image_missing"}, {"run": "limit:turns"}])
async def test_other_ends_are_not_made_again(script: dict[str, str]) -> None:
    async with Bench() as service:
        await service.submit([ask("a", **script)])
        assert (await settled(service, "a")).attempt == 0


async def test_a_pause_between_attempts_holds_no_slot() -> None:
    config = QUICK.model_copy(update={"pause_seconds": 60.0})
    async with Bench(config=config, runner=RunnerConfig(queue=1, init=1, run=1, eval=1)) as service:
        await service.submit([ask(f"bad{i}", init="sandbox_unavailable") for i in range(10)])
        await service.submit([ask("good")])
        assert (await settled(service, "good")).outcome.status == "completed"

        await until(service, lambda status: (status.queued, status.running) == (10, 0))
        assert (await service.status()).places == {"retry": 10}
        assert len(await service.cancel([f"bad{i}" for i in range(10)])) == 10
        assert (await settled(service, "bad3")).outcome.reason is CancelReason.CLIENT


async def test_cancel_by_id_group_and_run() -> None:
    async with Bench() as service:
        await service.submit([ask(f"r{i}", run_id=f"run{i % 2}", group_id=f"g{i // 4}", run="hang") for i in range(12)])
        assert set(await service.cancel(["r0", "stranger"])) == {"r0"}
        assert set(await service.cancel(groups=["g0"])) == {"r1", "r2", "r3"}
        assert set(await service.cancel(runs=["run1"], reason=CancelReason.STALE)) == {"r5", "r7", "r9", "r11"}
        assert await service.cancel(["r0"]) == []
        reasons = {i: (await settled(service, f"r{i}")).outcome.reason for i in (0, 1, 2, 3, 5, 7, 9, 11)}
        assert {i for i, reason in reasons.items() if reason is CancelReason.STALE} == {5, 7, 9, 11}
        assert service.pending == 4


async def test_stream_resumes_and_ends() -> None:
    async with Bench() as service:
        await service.submit([ask(f"r{i}", run_id=f"run{i % 2}") for i in range(80)])
        seen: list[str] = []
        cursor = 0
        async for delivery in service.stream("run1"):
            seen.append(Rollout.model_validate_json(delivery.record).rollout_id)
            cursor = delivery.cursor
            if len(seen) == 35:
                break
        async for delivery in service.stream("run1", cursor):
            seen.append(Rollout.model_validate_json(delivery.record).rollout_id)
            if len(seen) == 40:
                break
        assert sorted(seen) == sorted(f"r{i}" for i in range(80) if i % 2)
        assert [d.cursor async for d in service.stream(follow=False)] == list(range(1, 81))


async def test_stop_ends_streams_and_waiters() -> None:
    async with Bench() as service:
        await service.submit([ask("a", run="hang")])

        async def read() -> list[Any]:
            return [delivery async for delivery in service.stream()]

        stream, waiter = asyncio.create_task(read()), asyncio.create_task(service.result("a", wait=60))
        await asyncio.sleep(0.01)
        service.begin_shutdown()
        assert await asyncio.wait_for(stream, 1) == []
        assert await asyncio.wait_for(waiter, 1) is None


async def test_submit_whose_caller_goes_away_is_still_run() -> None:
    async with Bench() as service:
        gone = asyncio.create_task(service.submit([ask("a")]))
        await asyncio.sleep(0)
        gone.cancel()

        await until(service, lambda status: status.finished == 1)
        assert await service.result("a") is not None


async def test_stop_without_drain_leaves_attempts_to_the_next_start(tmp_path: Path) -> None:
    config = LedgerConfig(path=tmp_path / "l.db")
    bench = Bench(await SqliteLedger.open(config))
    await bench.service.start()
    await bench.service.submit([ask("a", run="hang"), ask("b")])
    await settled(bench.service, "b")
    await bench.service.cancel(["a"])
    await settled(bench.service, "a")
    await bench.service.submit([ask("c", init="hang", flaky=1), ask("d", run="hang")])

    await until(bench.service, lambda status: status.capacity.init == 1)
    await bench.service.stop(drain=False)
    async with Bench(await SqliteLedger.open(config)) as service:
        assert service.pending == 2
        assert (await settled(service, "a")).outcome.status == "cancelled"
        await service.cancel(["c", "d"])
        rollout = await settled(service, "c")
        assert rollout.retries == [], "a stop is no failure of what it cuts off"
        assert rollout.attempt >= 1


async def test_restart_ends_what_was_cancelled_or_lost_too_often(tmp_path: Path) -> None:
    ledger = MemoryLedger()
    await ledger.add_rollouts([ask("cancelled"), ask("cursed"), ask("fine")])
    await ledger.cancel(["cancelled"], CancelReason.STALE)
    for _ in range(3):
        await ledger.begin_attempt("cursed")
        await ledger.recover()
    async with Bench(ledger, QUICK.model_copy(update={"restarts": 2})) as service:
        assert (await settled(service, "cancelled")).outcome.reason is CancelReason.STALE
        cursed = await settled(service, "cursed")
        assert (cursed.outcome.kind, len(cursed.retries)) == (FailureKind.SERVICE_RESTARTED, 3)
        assert (await settled(service, "fine")).outcome.status == "completed"


class FullDisk(MemoryLedger):
    """Refuses to write while it is full."""

    full = False

    async def finish(self, rollout: Rollout) -> int | None:
        self._check()
        return await super().finish(rollout)

    async def begin_attempt(self, rollout_id: str) -> Job:
        self._check()
        return await super().begin_attempt(rollout_id)

    async def add_rollouts(self, requests: Any) -> Any:
        self._check()  # also of what begins in the same commit: this ledger accepts it here
        return await super().add_rollouts(requests)

    def _check(self) -> None:
        if self.full:
            raise LedgerError("/l.db: the disk is full.", "Free space there.")


async def test_a_full_disk_stops_the_service_until_there_is_room() -> None:
    ledger = FullDisk()
    async with Bench(ledger) as service:
        await service.submit([ask("a", run="ok")])
        ledger.full = True

        await until(service, lambda status: not status.ready)
        assert (await service.status()).problem == "/l.db: the disk is full.\nFree space there."
        with pytest.raises(LedgerError):
            await service.submit([ask("b")])
        ledger.full = False
        assert (await settled(service, "a")).outcome.status == "completed"
        assert (await service.status()).ready


async def test_stop_with_a_full_disk_ends_and_loses_nothing() -> None:
    ledger = FullDisk()
    bench = Bench(ledger)
    await bench.service.start()
    await bench.service.submit([ask("a"), ask("b", run="hang")])
    ledger.full = True
    await asyncio.sleep(0.02)
    await asyncio.wait_for(bench.service.stop(drain=False), 5)
    ledger.full = False
    ledger.reopen()
    assert [job.request.rollout_id for job in await ledger.pending_jobs()] == ["a", "b"]


async def test_an_environment_that_is_not_known_is_refused_at_submit() -> None:
    ledger = MemoryLedger()
    async with Bench(ledger) as service:
        strange = ask("b").model_copy(update={"environment": "made-up"})
        with pytest.raises(TaskError) as caught:
            await service.submit([ask("a"), strange])
        assert caught.value.kind is FailureKind.UNKNOWN_ENVIRONMENT
        assert str(caught.value) == "rollout b: There is no environment 'made-up'.\nKnown: scripted."
        with pytest.raises(NotFoundError):
            await service.result("a")  # all or nothing


async def test_what_was_accepted_before_its_environment_went_is_still_a_duplicate() -> None:
    ledger = MemoryLedger()
    strange = ask("b").model_copy(update={"environment": "made-up"})
    await ledger.add_rollouts([strange])
    async with Bench(ledger) as service:
        (answer,) = await service.submit([strange])
        assert answer.duplicate
        ended = await service.result("b", wait=10.0)
        assert ended is not None
        assert ended.outcome.kind is FailureKind.UNKNOWN_ENVIRONMENT
        assert ended.outcome.message == "There is no environment 'made-up'.\nKnown: scripted."
