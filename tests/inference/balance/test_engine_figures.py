"""Reading the engines' own figures: which engines are read, who is notified, and what a restart means."""

import asyncio

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.admission import AdmissionOptions
from prorl_gym.inference.balance.cost_policy import CostPolicy
from prorl_gym.inference.balance.engine_pool import EnginePool, PoolOptions
from prorl_gym.inference.protocol import GenerationRequest
from prorl_gym.records import EngineLoad
from prorl_gym.testing.inference.engine_conformance import request
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply


class Watched(FakeEngine):
    """Counts how often its figures are read."""

    looks = 0

    async def read_load(self) -> EngineLoad | None:
        self.looks += 1
        return await super().read_load()


class Broken(FakeEngine):
    """Its figures cannot even be asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name, fine)
        self.asked = asyncio.Event()
        self.times = 0

    async def read_load(self) -> EngineLoad | None:
        self.times += 1
        if self.times == 1:
            raise TypeError("a page that nobody foresaw")
        self.asked.set()
        return None


def fine(request: GenerationRequest) -> Reply:
    return Reply((10, 2))


def figures(*, queries: int = 0, capacity: int | None = 1000) -> EngineLoad:
    return EngineLoad(running=0, waiting=0, kv_usage=0.1, kv_capacity=capacity, prefix_queries=queries)


async def test_policies_and_admission_learn_the_capacity():
    policy = CostPolicy()
    pool = EnginePool("policy", balance_policy=policy)
    engine = FakeEngine("e", fine)
    engine.reported_load = figures(capacity=4000)
    pool.add_engine(engine)
    await pool.scrape()
    snapshot = pool.snapshot()
    assert snapshot.engines[0].load == engine.reported_load
    assert (snapshot.admission.budget, snapshot.admission.in_tokens) == (0.85 * 4000, True)
    assert policy.cache_capacity("e") == 4000
    await pool.close()


async def test_an_engine_without_figures_is_asked_rarely():
    pool = EnginePool("policy")
    silent, telling = Watched("silent", fine), Watched("telling", fine)
    telling.reported_load = figures()
    pool.add_engine(silent)
    pool.add_engine(telling)
    for _ in range(25):
        await pool.scrape()
    assert (silent.looks, telling.looks) == (3, 25)
    await pool.close()


async def test_an_engine_that_is_not_well_is_not_asked_and_counts_for_nothing():
    pool = EnginePool("policy")
    for name in ("a", "b"):
        engine = Watched(name, fine)
        engine.reported_load = figures(capacity=1000)
        pool.add_engine(engine)
    pool.members.all[0].unhealthy_reason = "down"
    await pool.scrape()
    assert pool.members.all[0].load is None
    assert pool.snapshot().admission.budget == 850
    await pool.close()


async def test_an_engine_whose_counters_began_anew_has_lost_its_cache():
    long = request(prompt_ids=range(1000))
    pool = EnginePool("policy")
    engine = FakeEngine("e", fine)
    engine.reported_load = figures(queries=50)
    pool.add_engine(engine)
    await pool.scrape()
    await pool.generate(long)
    engine.reported_load = figures(queries=3)
    await pool.scrape()
    await pool.generate(long)
    assert pool.snapshot().reusable_tokens == 0
    await pool.generate(long)
    assert pool.snapshot().reusable_tokens == 7 * 128
    await pool.close()


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


async def test_looks_go_on_after_one_that_broke():
    engine = Broken("e")
    async with EnginePool("policy", options=PoolOptions(scrape_interval_seconds=0.001)) as pool:
        pool.add_engine(engine)
        pool.start_scraping()
        await asyncio.wait_for(engine.asked.wait(), 10)


async def test_an_engine_that_falls_silent_is_checked_without_a_call():
    async with EnginePool("policy") as pool:
        gone, quiet = FakeEngine("gone", fine), FakeEngine("quiet", fine)
        for engine in (gone, quiet):
            engine.reported_load = figures()
            pool.add_engine(engine)
        await pool.scrape()
        gone.reported_load = quiet.reported_load = None
        gone.down_error = EngineError(FailureKind.ENGINE_UNREACHABLE, "engine gone: the connection was refused.")
        await pool.scrape()
        assert pool.healthy == ["quiet"], "one that only shows no figures any more is well"
        assert pool.problem == ""


async def test_an_engine_that_never_showed_figures_is_not_checked():
    async with EnginePool("policy") as pool:
        engine = FakeEngine("e", fine)
        engine.down_error = EngineError(FailureKind.ENGINE_UNREACHABLE, "engine e: the connection was refused.")
        pool.add_engine(engine)
        await pool.scrape()
        assert pool.healthy == ["e"]
