"""Figures over time, and the event loop's lag."""

import asyncio
import time

from api_stack import ask, running, serving

from prorl_gym.api.monitoring.history import History, LoopLagMonitor, RolloutCounters
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.records import RolloutRequest
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply


async def test_columns_tell_rates_since_the_sample_before() -> None:
    async with running() as service, EnginePool("policy") as pool:
        pool.add_engine(FakeEngine("policy-0", lambda _: Reply((2,))))
        tally = RolloutCounters()
        service.add_record_observer(tally.count_rollout)
        history = History(service, tally, [pool], max_samples=2)
        await history.record_sample()
        rows = [ask("a"), ask("b", reward=0.5), ask("c", run="sandbox_lost")]
        await service.submit([RolloutRequest.model_validate(row) for row in rows])
        for rollout_id in "abc":
            await service.result(rollout_id, wait=10)
        await history.record_sample()
        columns = history.snapshot().columns
        await history.record_sample()
    assert columns["mean_reward"] == [None, 0.75]
    assert columns["finished_per_second"][0] == 0.0 < (columns["finished_per_second"][1] or 0.0)
    assert columns["engine.policy-0.in_flight"] == [0, 0]
    assert all(len(column) == 2 for column in columns.values())
    later = history.snapshot()
    assert len(later.times) == 2, "a ring"
    assert later.columns["finished_per_second"][1] == 0.0
    assert [(one.status, one.detail) for one in tally.outcome_counts()] == [
        ("completed", ""),
        ("failed", "sandbox_lost"),
    ]
    assert tally.wasted_tokens > 0


async def test_a_column_that_appears_late_is_null_before() -> None:
    async with running() as service, EnginePool("policy") as pool:
        history = History(service, RolloutCounters(), [pool])
        await history.record_sample()
        pool.add_engine(FakeEngine("policy-0", lambda _: Reply((2,))))
        await history.record_sample()
        assert history.snapshot().columns["engine.policy-0.version"] == [None, 0]


async def test_the_lag_of_a_loop_that_was_held_up() -> None:
    lag, heard = LoopLagMonitor(), asyncio.Event()
    lag.observers.append(lambda _: heard.set())
    assert lag.max_seconds is None
    lag.start_measuring()
    await asyncio.sleep(0)
    time.sleep(0.4)  # noqa: ASYNC251 - what is measured
    await heard.wait()
    lag.stop_measuring()
    assert lag.max_seconds is not None and lag.max_seconds > 0.1


async def test_nothing_is_sampled_before_it_is_asked_for() -> None:
    async with serving() as served:
        status, answer = await served.ask("GET", "/v1/history")
        assert (status, answer["times"], answer["columns"]) == (200, [], {})
        _, status_answer = await served.ask("GET", "/v1/status")
        assert status_answer["event_loop_lag_seconds"] is None
