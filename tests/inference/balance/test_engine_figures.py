"""Reading the engines' own figures: which engines are read, who is notified, and what a restart means."""

import asyncio

import pytest
from virtual_time import virtually

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.admission import AdmissionOptions
from prorl_gym.inference.balance.cost_policy import CostPolicy
from prorl_gym.inference.balance.engine_pool import EnginePool, PoolOptions
from prorl_gym.inference.protocol import BalancePolicy, GenerationRequest
from prorl_gym.records import EngineLoad
from prorl_gym.testing.inference.engine_conformance import request
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

LONG = request(prompt_ids=range(1000))


class Watched(FakeEngine):
    """Counts how often its figures are read; the first read breaks if ``is_broken``."""

    def __init__(self, name: str, reported_load: EngineLoad | None = None, *, is_broken: bool = False) -> None:
        super().__init__(name, fine)
        self.reported_load = reported_load
        self.looks = 0
        self._is_broken = is_broken

    async def read_load(self) -> EngineLoad | None:
        self.looks += 1
        if self._is_broken and self.looks == 1:
            raise TypeError("a page that nobody foresaw")
        return await super().read_load()


def fine(request: GenerationRequest) -> Reply:
    return Reply((10, 2))


def figures(*, queries: int = 0, capacity: int | None = 1000) -> EngineLoad:
    return EngineLoad(running=0, waiting=0, kv_usage=0.1, kv_capacity=capacity, prefix_queries=queries)


def pool_of(*engines: FakeEngine, balance_policy: BalancePolicy | None = None) -> EnginePool:
    pool = EnginePool("policy", balance_policy=balance_policy)
    for engine in engines:
        pool.add_engine(engine)
    return pool


@virtually
async def test_policies_and_admission_learn_the_capacity(monkeypatch: pytest.MonkeyPatch):
    policy, seen = CostPolicy(), dict[str, EngineLoad]()
    monkeypatch.setattr(policy, "observe_load", seen.__setitem__)
    engine = Watched("e", figures(capacity=4000))
    async with pool_of(engine, balance_policy=policy) as pool:
        await asyncio.sleep(6)
        snapshot = pool.snapshot()
    assert snapshot.engines[0].load == seen["e"] == engine.reported_load
    assert (snapshot.admission.budget, snapshot.admission.in_tokens) == (0.85 * 4000, True)


@virtually
async def test_an_engine_without_figures_is_asked_rarely():
    silent, telling = Watched("silent"), Watched("telling", figures())
    async with pool_of(silent, telling):
        await asyncio.sleep(150)
    assert telling.looks > 24
    assert silent.looks == (telling.looks + 11) // 12


@virtually
async def test_an_engine_that_is_not_well_is_not_asked_and_counts_for_nothing():
    async with pool_of(Watched("a", figures()), Watched("b", figures())) as pool:
        pool.members.all[0].unhealthy_reason = "down"
        await asyncio.sleep(6)
        assert pool.members.all[0].load is None
        assert pool.snapshot().admission.budget == 850


@virtually
async def test_an_engine_whose_counters_began_anew_has_lost_its_cache():
    engine = Watched("e", figures(queries=50))
    async with pool_of(engine) as pool:
        await asyncio.sleep(0.1)
        await pool.generate(LONG)
        engine.reported_load = figures(queries=3)
        await asyncio.sleep(6)
        await pool.generate(LONG)
        assert pool.snapshot().reusable_tokens == 0
        await pool.generate(LONG)
        assert pool.snapshot().reusable_tokens == 7 * 128


async def test_what_a_rollout_lost_while_it_waited_for_its_turn_is_not_reusable():
    pool = EnginePool("policy", options=PoolOptions(admission=AdmissionOptions(max_live_rollouts=1)))
    pool.add_engine(FakeEngine("e", fine))
    for _ in range(2):
        await pool.generate(request(session_id="young", prompt_ids=range(1000)))
    before = pool.snapshot().reusable_tokens
    assert before > 0
    pool.release_slot("young")
    await pool.generate(request(session_id="old", prompt_ids=range(1000)))
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(pool.generate(request(session_id="young", prompt_ids=range(1000))))
        for _ in range(5):
            await asyncio.sleep(0)
        assert pool.snapshot().admission.waiting == 1
        pool.forget_session("old")
        await waiting
    assert pool.snapshot().reusable_tokens == before
    await pool.close()


@virtually
async def test_looks_go_on_after_one_that_broke():
    engine = Watched("e", figures(), is_broken=True)
    async with pool_of(engine) as pool:
        await asyncio.sleep(6)
        assert pool.members.all[0].load == engine.reported_load


@virtually
async def test_an_engine_that_falls_silent_is_checked_without_a_call():
    gone, quiet, never = Watched("gone", figures()), Watched("quiet", figures()), Watched("never")
    async with pool_of(gone, quiet, never) as pool:
        await asyncio.sleep(0.1)
        gone.reported_load = quiet.reported_load = None
        for engine in (gone, never):
            engine.down_error = EngineError(FailureKind.ENGINE_UNREACHABLE, "the connection was refused.")
        await asyncio.sleep(6)
        assert pool.healthy == ["quiet", "never"], "one that only shows no figures any more, or never did, is well"
        assert pool.problem == ""
