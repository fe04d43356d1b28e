"""Hangs, races, leaks and lost results of the published rollout server that no other test looks for here."""

import asyncio
import gc
from typing import Any
from weakref import WeakSet

import pytest
from test_runner import Bench as RunnerBench
from test_runner import job, passes
from test_service import Bench, ask, settled, until

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.client.wire_models import AcceptedRollout
from prorl_gym.environments.math.environment import MathEnvironment
from prorl_gym.environments.protocol import Episode, Leases
from prorl_gym.errors import CancelReason, ConflictError
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.records import RolloutRequest, Score
from prorl_gym.rollout.protocol import Finished, Job
from prorl_gym.rollout.scheduling.attempt import Attempt
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.settings import ResolvedSettings, RolloutSettings
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend, Script, ScriptedEnvironment

ONE = RunnerConfig(queue=4, init=1, run=1, eval=1, cleanup_seconds=1)


async def test_a_job_killed_at_any_moment_blocks_neither_the_next_one_nor_the_status() -> None:
    """There, a job killed while it held the shared status lock stopped the server."""
    for moment in range(40):
        async with Bench(runner=ONE) as service:
            await service.submit([ask("victim", sandboxes=True, turns=2), ask("next")])
            await passes(moment)
            await service.cancel(["victim"])
            async with asyncio.timeout(5):
                await service.status()
                assert (await settled(service, "next")).outcome.status == "completed"
                victim = await settled(service, "victim")
            assert victim.outcome.status in ("cancelled", "completed")
            assert (victim.reward is None) == (victim.outcome.status == "cancelled")


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

    bench = Bench(environments=[Gated()])
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


async def test_a_waiter_is_woken_by_the_result_and_by_no_tick() -> None:
    """There, futures were completed from a foreign thread, and the loop slept on."""
    async with Bench() as service:
        await service.submit([ask("a", run="hang")])
        await until(service, lambda status: status.capacity.run == 1)
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


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
async def test_the_wait_for_each_slot_is_outside_of_its_deadline(stage: str) -> None:
    short = RolloutSettings.model_validate({f"{stage}_seconds": 0.1})
    many = ["init", "run", "eval"].index(stage)
    bench = RunnerBench(RunnerConfig(queue=4, init=3 if many else 1, ready=3, run=3 if many > 1 else 1, eval=1))
    script: dict[str, Any] = {stage: "hang"}
    await bench.runner.accept(job("holder", **script))
    await bench.until(stage)
    await bench.runner.accept(job("waiting", limits=short))
    await asyncio.sleep(0.25)
    await bench.runner.cancel(["holder"], CancelReason.CLIENT)
    rollout = (await bench.finish())["waiting"]
    assert rollout.outcome.status == "completed"
    assert rollout.stages[stage].queued > 0.2  # type: ignore[index]


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
        left = bench.runner
        assert (service.pending, len(left.attempts), len(left.supervisors)) == (0, 0, 0)
        assert sum(pool.waiting for pool in left.pools.by_name.values()) == 0
        assert len(left.prewarmer.workloads) == 1
        gc.collect()
        assert not kept


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
