"""Figures over time, the event loop's lag, and what keeps rollouts from being made."""

import asyncio
import logging
import time

import aiohttp
import pytest
from api_stack import ask, running, serving

from prorl_gym.api.monitoring.history import History, LoopLagMonitor, ProblemLog, RolloutCounters, find_problem
from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.records import RolloutRequest
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply


async def test_columns_tell_rates_since_the_sample_before() -> None:
    async with running() as service, EnginePool("policy") as pool:
        pool.add_engine(FakeEngine("policy-0", lambda _: Reply((2,))))
        tally = RolloutCounters()
        service.record_observers.append(tally.count_rollout)
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
    measuring = asyncio.create_task(lag.measure())
    await asyncio.sleep(0)
    time.sleep(0.4)  # noqa: ASYNC251 - what is measured
    await heard.wait()
    measuring.cancel()
    assert lag.max_seconds is not None and lag.max_seconds > 0.1


async def test_nothing_is_sampled_before_it_is_asked_for() -> None:
    async with serving() as served:
        status, answer = await served.ask("GET", "/v1/history")
        assert (status, answer["times"], answer["columns"]) == (200, [], {})
        _, status_answer = await served.ask("GET", "/v1/status")
        assert status_answer["event_loop_lag_seconds"] is None


GONE = EngineError(FailureKind.ENGINE_UNREACHABLE, "engine policy-0: the connection was refused.")


def engine(number: int = 0) -> FakeEngine:
    return FakeEngine(f"policy-{number}", lambda _: Reply((2,)))


async def test_what_is_a_problem_and_which_comes_first() -> None:
    async with running() as service, EnginePool("policy") as pool:
        assert find_problem(service, [pool]).startswith("0 of 0 engines of pool policy serve: no engine of pool policy")
        gone = engine()
        gone.down_error = GONE
        pool.add_engine(gone)
        pool.add_engine(engine(1))
        await pool.check_health()
        assert find_problem(service, [pool]) == "", "one engine of two is enough"
        pool.gate.close()
        assert find_problem(service, [pool]).startswith("pool policy is paused: calls wait")
        service.begin_shutdown()
        assert find_problem(service, [pool]) == "The service is stopping."


async def test_the_status_has_the_cause_and_readiness_only_the_count() -> None:
    async with EnginePool("policy") as pool:
        gone = engine()
        gone.down_error = GONE
        pool.add_engine(gone)
        async with serving(pools=[pool]) as served, aiohttp.ClientSession() as stranger:
            await pool.check_health()
            _, status = await served.ask("GET", "/v1/status")
            async with stranger.get(served.url + "/readyz") as response:
                assert response.status == 200, "engines may come later: rollouts are accepted"
                assert await response.json() == {"ready": True, "problem": "0 of 1 engines of pool policy serve"}
    assert status["problem"] == (
        "0 of 1 engines of pool policy serve: engine policy-0: the connection was refused. Start them, or correct "
        "'engines' and 'model'; rollouts wait or are tried again."
    )
    assert status["ready"]


def test_each_problem_is_logged_once_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = ProblemLog()
    for problem in ("", "0 of 1 engines serve: refused", "0 of 1 engines serve: refused", "", ""):
        log.report(problem)
    assert caplog.messages == ["0 of 1 engines serve: refused", "over: 0 of 1 engines serve"]
