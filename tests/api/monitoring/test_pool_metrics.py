"""Pools on the /metrics page."""

import asyncio

from prometheus_client import CollectorRegistry, generate_latest

from prorl_gym.api.monitoring.service_metrics import PoolCollector
from prorl_gym.api.policy_control import pool_status
from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.testing.inference.engine_conformance import request
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply


async def page_of(*pools: EnginePool) -> str:
    registry = CollectorRegistry()
    registry.register(PoolCollector(pools))
    return generate_latest(registry).decode()


async def test_the_page_shows_the_state_of_pools_and_engines():
    bad = FakeEngine("policy-0", lambda _: EngineError(FailureKind.ENGINE_CONTRACT, "odd"))
    async with EnginePool("policy", version=4) as pool, EnginePool("judge") as judge:
        pool.add_engine(bad)
        pool.add_engine(FakeEngine("policy-1", lambda _: Reply((10, 11, 2))))
        await pool.generate(request())
        lines = (await page_of(pool, judge)).splitlines()
    for line in (
        'prorl_engine_calls_total{engine="policy-1",pool="policy"} 1.0',
        'prorl_engine_sampled_tokens_total{engine="policy-1",pool="policy"} 3.0',
        'prorl_engine_failures_total{engine="policy-0",pool="policy"} 1.0',
        'prorl_engine_up{engine="policy-0",pool="policy"} 0.0',
        'prorl_engine_up{engine="policy-1",pool="policy"} 1.0',
        'prorl_engine_policy_version{engine="policy-1",pool="policy"} 4.0',
        'prorl_pool_failovers_total{pool="policy"} 1.0',
        'prorl_pool_failovers_total{pool="judge"} 0.0',
        'prorl_admission_live{pool="policy"} 1.0',
        'prorl_admission_budget{pool="policy"} +Inf',
    ):
        assert line in lines


async def test_an_engine_that_left_leaves_no_row():
    async with EnginePool("policy") as pool:
        pool.add_engine(FakeEngine("policy-0", lambda _: Reply((2,))))
        await pool.remove_engine("policy-0")
        assert "policy-0" not in await page_of(pool)


async def test_rollouts_that_no_engine_has_the_model_for_are_seen():
    async with EnginePool("policy") as pool:
        call = asyncio.create_task(pool.generate(request()))
        await asyncio.sleep(0)
        assert 'prorl_pool_unserved{pool="policy"} 1.0' in (await page_of(pool)).splitlines()
        state = pool_status(pool)
        assert (state.waiting_rollouts, state.unavailable_reason) == (
            1,
            "no engine of pool policy has the model: it has no engines.",
        )
        pool.add_engine(FakeEngine("policy-0", lambda _: Reply((2,))))
        await call
        assert (pool_status(pool).waiting_rollouts, pool_status(pool).unavailable_reason) == (0, "")
