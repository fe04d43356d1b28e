"""The metrics: names and units by convention, bounded labels, and the state of pools."""

import asyncio
import re

from api_stack import ask, running, serving
from page_scripts import load_script
from prometheus_client.parser import text_string_to_metric_families

from prorl_gym.api.monitoring.history import RolloutCounters
from prorl_gym.api.monitoring.service_metrics import ServiceMetrics
from prorl_gym.api.policy_control import pool_status
from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.testing.inference.engine_conformance import request
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply


async def test_names_and_types_are_as_prometheus_wants_them() -> None:
    families = list(text_string_to_metric_families(await load_script("metrics_page").example()))
    assert len(families) == len({family.name for family in families}) > 30
    for family in families:
        assert re.fullmatch(r"prorl_[a-z][a-z0-9_]*", family.name)
        assert family.type in ("counter", "gauge", "histogram")
        assert family.documentation.endswith(".")
        assert not re.search(r"_(count|sum|bucket|total|info)$", family.name) or family.name == "prorl_build_info"
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent)$", family.name), "base units"
        labels = {name for sample in family.samples for name in sample.labels}
        assert labels.isdisjoint({"run", "run_id", "group", "group_id", "rollout", "rollout_id"}), "without a bound"


async def test_stages_are_counted_with_their_wait_apart() -> None:
    async with serving() as served:
        await served.ask("POST", "/v1/rollouts", [ask("a"), ask("b", run="hang"), ask("c", run="bad_row")])
        for rollout_id in "ac":
            await served.ask("GET", f"/v1/rollouts/{rollout_id}?wait=10")
        await served.ask("POST", "/v1/cancel", {"rollouts": ["b"]})
        await served.ask("GET", "/v1/rollouts/b?wait=10")
        async with served.http.get(served.url + "/metrics") as response:
            page = await response.text()
    assert 'prorl_rollouts_finished_total{cause="",environment="scripted",kind="",status="completed"} 1.0' in page
    assert 'cause="task",environment="scripted",kind="bad_row",status="failed"} 1.0' in page
    assert 'prorl_stage_seconds_count{environment="scripted",stage="eval"} 1.0' in page
    assert 'prorl_stage_seconds_count{environment="scripted",stage="run"}' in page
    assert 'prorl_stage_queue_seconds_count{stage="run"}' in page
    assert "prorl_cancel_seconds_count 1.0" in page
    assert 'kind="client",status="cancelled"} 1.0' in page
    assert 'prorl_ledger_rollouts{state="kept"} 3.0' in page


async def page_of(*pools: EnginePool) -> str:
    async with running() as service:
        return (await ServiceMetrics(service, RolloutCounters(), pools).render()).decode()


async def test_the_page_shows_the_state_of_pools_and_engines():
    bad = FakeEngine("policy-0", lambda _: EngineError(FailureKind.ENGINE_CONTRACT, "odd"))
    async with EnginePool("policy", version=4) as pool, EnginePool("judge") as judge:
        pool.add_engine(bad)
        pool.add_engine(FakeEngine("policy-1", lambda _: Reply((10, 11, 2))))
        await pool.generate(request())
        lines = (await page_of(pool, judge)).splitlines()
        await pool.remove_engine("policy-0")
        assert "policy-0" not in await page_of(pool), "an engine that left leaves no row"
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
