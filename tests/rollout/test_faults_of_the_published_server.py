"""The hangs, races, leaks and lost results that the published rollout server has: each is a test that we do not.

Named for what went wrong there.
"""

import asyncio
import gc
import random
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import pytest
from test_runner import Bench as RunnerBench
from test_runner import job
from test_service import Bench, ask, settled, until

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.client.wire_models import AcceptedRollout
from prorl_gym.environments.math.environment import MathEnvironment
from prorl_gym.environments.protocol import Episode, Leases
from prorl_gym.errors import CancelReason, ConflictError, FailureKind
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.records import Rollout, RolloutRequest, Score
from prorl_gym.rollout.protocol import Finished, Job
from prorl_gym.rollout.scheduling.attempt import Attempt
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.scheduling.stage_pools import PoolUsage
from prorl_gym.sandbox.protocol import Sandbox, SandboxSpec
from prorl_gym.settings import ResolvedSettings, RolloutSettings
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend, Script, ScriptedEnvironment
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

ONE = RunnerConfig(queue=4, init=1, run=1, eval=1, cleanup_seconds=1)


async def passes(count: int = 30) -> None:
    """Let everything that is ready on the loop run."""
    for _ in range(count):
        await asyncio.sleep(0)


def narrow(stage: str) -> RunnerConfig:
    """One slot of this stage, and several of those before it."""
    many = {"init": 0, "run": 1, "eval": 2}[stage]
    return RunnerConfig(queue=4, init=3 if many else 1, ready=3, run=3 if many > 1 else 1, eval=1)


def scripted(name: str, stage: str = "", action: str = "ok") -> Job:
    """Return a job that does this in one stage."""
    script: dict[str, Any] = {stage: action} if stage else {}
    return job(name, **script)


# --- permits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
async def test_a_job_killed_while_it_waits_for_a_permit_does_not_take_it_along(stage: str) -> None:
    bench = RunnerBench(narrow(stage))
    await bench.runner.accept(scripted("holder", stage, "hang"))
    await bench.until(stage)
    for name in ("waiting", "after"):
        await bench.runner.accept(job(name))
    await passes()
    assert bench.runner.snapshot().pools[stage].waiting == 2
    await bench.runner.cancel(["waiting"], CancelReason.CLIENT)
    await passes()
    assert bench.runner.snapshot().pools[stage] == PoolUsage(size=1, busy=1, waiting=1)
    await bench.runner.cancel(["holder"], CancelReason.CLIENT)
    rollouts = await bench.finish()
    assert rollouts["after"].outcome.status == "completed"


async def test_a_permit_is_released_by_one_party_only() -> None:
    """There, cancel and the worker's own cleanup both released it, and concurrency crept up."""
    bench = RunnerBench(RunnerConfig(queue=4, init=2, run=2, eval=1))
    for number in range(30):
        await bench.runner.accept(job(f"r{number}", run="hang", sandboxes=True))
        if number % 3 == 2:
            await bench.until("run")
            await bench.runner.cancel([f"r{n}" for n in range(number + 1)], CancelReason.CLIENT)
            await bench.runner.cancel([f"r{n}" for n in range(number + 1)], CancelReason.CLIENT)
        capacity = await bench.runner.capacity()
        assert (capacity.init <= 2, capacity.run <= 2, capacity.eval <= 1) == (True, True, True)
    await bench.runner.cancel([f"r{n}" for n in range(30)], CancelReason.CLIENT)
    await bench.finish()
    pools = bench.runner.snapshot().pools
    assert [(pools[stage].size, pools[stage].busy) for stage in ("init", "run", "eval")] == [(2, 0), (2, 0), (1, 0)]


async def test_a_job_killed_at_any_moment_blocks_neither_the_next_one_nor_the_status() -> None:
    """There, a job killed while it held the shared status lock stopped the server."""
    for moment in range(0, 40, 2):
        bench = Bench(runner=ONE)
        async with bench as service:
            await service.submit([ask("victim", sandboxes=True), ask("next")])
            await passes(moment)
            await service.cancel(["victim"])
            async with asyncio.timeout(5):
                await service.status()
                assert (await settled(service, "next")).outcome.status == "completed"
                assert (await settled(service, "victim")).outcome.status in ("cancelled", "completed")


# --- results ------------------------------------------------------------------------------------------------------


async def test_a_result_or_a_cancel_that_comes_before_the_wait_begins_is_not_dropped() -> None:
    """There, the process was started before it was registered."""
    async with Bench() as service:
        await service.submit([ask("quick"), ask("unwanted", run="hang")])
        await service.cancel(["unwanted"])
        await passes(200)  # both are over before anybody asks
        assert (await settled(service, "quick")).reward == 1.0
        assert (await settled(service, "unwanted")).outcome.reason is CancelReason.CLIENT


async def test_a_crashed_worker_is_noticed_at_once_and_not_at_the_next_submission() -> None:
    async with Bench() as service:
        await service.submit([ask("last", run="crash")])
        rollout = await asyncio.wait_for(service.result("last", wait=30), 5)
        assert rollout is not None
        assert (rollout.outcome.kind, len(rollout.retries)) == (FailureKind.INTERNAL, 2)


async def test_a_cancelled_id_that_is_used_again_is_answered() -> None:
    async with Bench() as service:
        await service.submit([ask("a", run="hang")])
        await service.cancel(["a"])
        assert (await settled(service, "a")).outcome.status == "cancelled"
        assert await service.submit([ask("a", run="hang")]) == [AcceptedRollout(rollout_id="a", duplicate=True)]
        assert (await settled(service, "a")).outcome.status == "cancelled"
        with pytest.raises(ConflictError):
            await service.submit([ask("a", run="ok")])


async def test_two_callers_with_one_live_id_both_get_the_result() -> None:
    gate = asyncio.Event()

    class Gated(ScriptedEnvironment):
        async def init(self, task: Script, leases: Leases, settings: ResolvedSettings) -> Episode:
            await gate.wait()
            return await super().init(task, leases, settings)

    bench = Bench(environment=Gated())
    async with bench as service:
        first = await service.submit([ask("a")])
        waits = [asyncio.create_task(service.result("a", wait=10)) for _ in range(2)]
        second = await service.submit([ask("a")])
        waits.append(asyncio.create_task(service.result("a", wait=10)))
        await passes()
        gate.set()
        results = await asyncio.gather(*waits)
        assert [answer.duplicate for answer in (*first, *second)] == [False, True]
        assert all(result is not None and result.outcome.status == "completed" for result in results)
        assert bench.policies.opened == 1  # made once


async def test_a_cancelled_one_has_a_state_of_its_own_and_keeps_its_tokens() -> None:
    async with Bench() as service:
        await service.submit([ask("a", run="hang", turns=2)])
        await until(lambda: at_work(service))
        await passes()
        assert await service.cancel(["a"]) == ["a"]
        rollout = await settled(service, "a")
        assert (rollout.outcome.status, rollout.outcome.kind, rollout.outcome.stage) == ("cancelled", None, "run")
        assert (rollout.reward, rollout.sampled_tokens) == (None, 6)
        assert rollout.cancel_seconds is not None
        assert rollout.cancel_seconds < 1


async def at_work(service: Any) -> bool:
    return (await service.status()).capacity.run == 1


@pytest.mark.parametrize("how", ["hang", "crash", "sandbox_lost", "cancel"])
async def test_a_failure_in_init_leaks_no_sandbox(how: str) -> None:
    """There, only RUN was cleaned up, and the sandbox was not known before INIT had succeeded."""
    bench = RunnerBench()
    limits = RolloutSettings(init_seconds=0.02 if how == "hang" else 60.0)
    await bench.runner.accept(job("a", limits=limits, sandboxes=True, init="hang" if how == "cancel" else how))
    await bench.until("init")
    await passes()
    assert bench.backend.started == 1
    if how == "cancel":
        await bench.runner.cancel(["a"], CancelReason.CLIENT)
    assert (await bench.finish())["a"].outcome.stage == "init"  # finish() counts the sandboxes


async def test_a_cancel_while_a_sandbox_is_starting_leaks_nothing() -> None:
    bench = RunnerBench(backend=EmptyBackend(start_ticks=20))
    await bench.runner.accept(job("a", sandboxes=True))
    await bench.until("init")
    await passes(5)
    assert bench.backend.started == 0
    await bench.runner.cancel(["a"], CancelReason.CLIENT)
    assert (await bench.finish())["a"].outcome.status == "cancelled"


async def test_each_control_call_gets_its_own_answer() -> None:
    """There, acknowledgements shared a queue and were off by one after a timeout."""
    async with Bench() as service:
        await service.submit([ask(f"r{n}", run="hang") for n in range(8)])
        looks = [asyncio.create_task(service.status()) for _ in range(3)]
        answers = await asyncio.gather(*(service.cancel([f"r{n}", "stranger"]) for n in range(8)))
        assert answers == [[f"r{n}"] for n in range(8)]
        assert all(status.ready for status in await asyncio.gather(*looks))
        impatient = asyncio.create_task(service.cancel(["r0"]))
        await asyncio.sleep(0)
        impatient.cancel()
        assert await service.cancel(["r1", "stranger"]) == []


async def test_nothing_that_waits_freezes_the_loop() -> None:
    """There, blocking reads of up to ten seconds stood inside of the endpoints."""
    async with Bench() as service:
        await service.submit([ask(f"r{n}", run="hang", sandboxes=True) for n in range(20)])
        waits = [asyncio.create_task(service.result(f"r{n}", wait=30)) for n in range(20)]
        slowest = 0.0
        for _ in range(50):
            began = time.perf_counter()
            await asyncio.sleep(0)
            slowest = max(slowest, time.perf_counter() - began)
        assert slowest < 0.5
        await service.cancel(runs=["default"])
        assert all(rollout is not None for rollout in await asyncio.gather(*waits))


async def test_a_waiter_is_woken_by_the_result_and_by_no_tick() -> None:
    """There, futures were completed from a foreign thread, and the loop slept on."""
    async with Bench() as service:
        await service.submit([ask("a", run="hang")])
        await until(lambda: at_work(service))
        wait = asyncio.create_task(service.result("a", wait=60))
        await asyncio.sleep(0)
        loop, due = asyncio.get_running_loop(), list[float]()
        real = loop.call_at

        def noted(when: float, *rest: Any, **more: Any) -> asyncio.TimerHandle:
            due.append(when - loop.time())
            return real(when, *rest, **more)

        loop.call_at = noted  # type: ignore[method-assign]
        try:
            await service.cancel(["a"])
            assert await wait is not None
        finally:
            loop.call_at = real  # type: ignore[method-assign]
        assert all(seconds > 0.5 for seconds in due), "something polls"


async def test_a_cancel_reaches_the_engine() -> None:
    """There, the call ran on to its end, and its result was dropped."""
    engine = FakeEngine("e", lambda _: Reply((10, 11), hold=asyncio.Event()))
    async with EnginePool("policy") as pool:
        pool.add_engine(engine)
        source = ModelPolicySource(pool, load_codec("small"))
        runner = InProcessRunner(lambda name: MathEnvironment(), source, EmptyBackend())
        request = RolloutRequest(rollout_id="a", environment="math", task={"question": "2+2?", "answer": "4"})
        await runner.accept(Job(request=request, accepted_at=0.0))
        await engine.call_held.wait()
        await runner.cancel(["a"], CancelReason.CLIENT)
        rollout = await anext(event.rollout async for event in runner.events() if isinstance(event, Finished))
        assert engine.in_flight == 0
    assert (rollout.outcome.status, rollout.sampled_tokens) == ("cancelled", 1)  # half of what it would have said


async def test_an_error_keeps_its_kind() -> None:
    """There, names left unset by a swallowed exception turned it into an unrelated one."""

    class Failing(EmptyBackend):
        async def start_sandbox(self, spec: SandboxSpec) -> Sandbox:
            raise OSError(28, "No space left on device")

    bench = RunnerBench(backend=Failing())
    await bench.runner.accept(job("a", sandboxes=True))
    outcome = (await bench.finish())["a"].outcome
    assert (outcome.kind, outcome.stage) == (FailureKind.INTERNAL, "init")
    assert outcome.message == "OSError in init; the service's log has the traceback."


# --- load ---------------------------------------------------------------------------------------------------------


async def test_queues_are_bounded_and_waiting_costs_no_result() -> None:
    """There, every queue was unbounded and time in it ate the deadline, so that overload lost results."""
    bench = Bench(runner=ONE)
    async with bench as service:
        limits = RolloutSettings(init_seconds=0.5, run_seconds=0.5, eval_seconds=0.5)
        requests = [ask(f"r{n}").model_copy(update={"settings": limits}) for n in range(300)]
        await service.submit(requests)
        most = 0
        while (await service.status()).finished < 300:
            most = max(most, bench.runner.snapshot().attempts)
            await asyncio.sleep(0)
        assert most <= bench.runner.snapshot().pools["jobs"].size
        ends = [await settled(service, request.rollout_id) for request in requests]
        assert {rollout.outcome.status for rollout in ends} == {"completed"}


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
async def test_the_wait_for_each_slot_is_outside_of_its_deadline(stage: str) -> None:
    short = RolloutSettings.model_validate({f"{stage}_seconds": 0.1})
    bench = RunnerBench(narrow(stage))
    await bench.runner.accept(scripted("holder", stage, "hang"))
    await bench.until(stage)
    await bench.runner.accept(job("waiting", limits=short))
    await asyncio.sleep(0.25)
    await bench.runner.cancel(["holder"], CancelReason.CLIENT)
    rollout = (await bench.finish())["waiting"]
    assert rollout.outcome.status == "completed"
    assert rollout.stages[stage].queued > 0.2  # type: ignore[index]


async def test_an_evaluation_ends_when_it_ends() -> None:
    """There, it was asked about every 30 seconds."""
    bench = RunnerBench()
    began = time.monotonic()
    await bench.runner.accept(job("a", sandboxes=True))
    await bench.finish()
    assert time.monotonic() - began < 5


async def test_many_rounds_of_cancels_need_no_restart() -> None:
    """There, stopping and starting the whole service every step was the advice."""
    bench = Bench(runner=RunnerConfig(queue=3, init=2, run=2, eval=2, cleanup_seconds=1))
    dice = random.Random(5)
    async with bench as service:
        for step in range(12):
            names = [f"s{step}-{n}" for n in range(10)]
            await service.submit([ask(name, run=dice.choice(["ok", "hang"]), sandboxes=True) for name in names])
            await passes(dice.randrange(60))
            await service.cancel(names)
            ends: list[Rollout] = [await settled(service, name) for name in names]
            assert {rollout.outcome.status for rollout in ends} <= {"completed", "cancelled"}
            capacity = (await service.status()).capacity
            assert (capacity.init, capacity.run, capacity.eval, capacity.queued) == (0, 0, 0, 0)
        await service.submit([ask("after", sandboxes=True)])
        assert (await settled(service, "after")).outcome.status == "completed"


async def test_nothing_is_kept_of_what_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, handles per job and the set of discarded ids only ever grew."""
    kept = WeakSet[Attempt]()
    begin = Attempt.__init__

    def note(self: Attempt, *arguments: Any, **named: Any) -> None:
        kept.add(self)
        begin(self, *arguments, **named)

    monkeypatch.setattr(Attempt, "__init__", note)
    bench = Bench()
    async with bench as service:
        await service.submit([ask(f"r{n}", run="hang" if n % 2 else "ok") for n in range(40)])
        await passes(50)
        assert kept
        await service.cancel(runs=["default"])
        for n in range(40):
            await settled(service, f"r{n}")
        await passes(50)
        left = bench.runner.snapshot()
        assert (service.pending, left.attempts, left.tasks) == (0, 0, 0)
        assert sum(pool.waiting for pool in left.pools.values()) == 0
        assert len(left.prewarm_waiting) == 1
        gc.collect()
        assert not kept


# --- races --------------------------------------------------------------------------------------------------------


async def test_cancel_and_finish_at_the_same_moment_give_one_record() -> None:
    for moment in range(40):
        bench = RunnerBench()
        await bench.runner.accept(job("a", sandboxes=True, turns=2))
        await passes(moment)
        await bench.runner.cancel(["a"], CancelReason.CLIENT)
        rollout = (await bench.finish())["a"]
        assert rollout.outcome.status in ("completed", "cancelled")
        assert (rollout.reward is None) == (rollout.outcome.status == "cancelled")


async def test_a_reward_measured_after_the_cancel_is_none() -> None:
    """Its sandboxes are gone by then: what a grader that swallows the cancel says is no measure of the policy."""

    class Swallowing(ScriptedEnvironment):
        async def evaluate(
            self, task: Script, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings
        ) -> Score:
            try:
                return await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                return Score(reward=1.0)

    bench = RunnerBench(environment=Swallowing())
    await bench.runner.accept(job("a"))
    await bench.until("eval")
    await passes()
    await bench.runner.cancel(["a"], CancelReason.STALE)
    rollout = (await bench.finish())["a"]
    assert (rollout.outcome.status, rollout.reward) == ("cancelled", None)


async def test_every_attempt_has_a_number_of_its_own() -> None:
    class Noting(MemoryLedger):
        def __init__(self) -> None:
            super().__init__()
            self.begun: list[tuple[str, int]] = []

        async def begin_attempt(self, rollout_id: str) -> Job:
            job = await super().begin_attempt(rollout_id)
            self.begun.append((rollout_id, job.attempt))
            return job

        async def add_and_begin(self, requests: Sequence[RolloutRequest]) -> tuple[list[AcceptedRollout], list[Job]]:
            accepted, jobs = await super().add_and_begin(requests)
            self.begun += [(job.request.rollout_id, job.attempt) for job in jobs]
            return accepted, jobs

    ledger = Noting()
    names: Sequence[str] = [f"r{n}" for n in range(5)]
    async with Bench(ledger) as service:
        await service.submit([ask(name, run="engine_timeout", flaky=2) for name in names])
        for name in names:
            rollout = await settled(service, name)
            assert (rollout.outcome.status, rollout.attempt) == ("completed", 2)
    assert len(set(ledger.begun)) == len(ledger.begun) == 15
