"""Weights, pauses and engines as a trainer steers them: what is repeated, what is refused, what survives a hang-up."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from prorl_gym.api.config import AllowedUrls
from prorl_gym.api.http.error_responses import ApiError
from prorl_gym.api.policy_control import EngineRegistry, PolicyController
from prorl_gym.client.wire_models import PolicyUpdateBody
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.weights.weight_updater import WeightUpdateError, WeightUpdater
from prorl_gym.testing.inference.engine_conformance import request
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

URL = "http://10.0.0.{}:8000/v1"


@dataclass
class Stage:
    controller: PolicyController
    pool: EnginePool
    engines: dict[str, FakeEngine]
    announced: list[int]
    answer: asyncio.Event


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    engines: dict[str, FakeEngine] = {}
    answer = asyncio.Event()
    answer.set()

    def make(name: str, url: str) -> FakeEngine:
        engines[name] = FakeEngine(name, lambda _: Reply((2,), hold=None if answer.is_set() else answer))
        return engines[name]

    async with EnginePool("policy") as pool:
        urls = {f"policy-{index}": URL.format(index) for index in range(2)}
        for name, url in urls.items():
            pool.add_engine(make(name, url))
        updater = WeightUpdater(pool, 1000)
        announced: list[int] = []
        fleet = EngineRegistry(pool, urls, make, AllowedUrls(list(urls.values()), ["http://10.0.0.*:8000/v1"]))

        async def announce(version: int, name: str) -> None:
            assert name == "policy"
            announced.append(version)

        controller = PolicyController(pool, updater, fleet, announce)
        yield Stage(controller, pool, engines, announced, answer)
        await controller.close()
        await updater.close()


async def test_an_update_is_announced_once_and_repeats_its_answer(stage: Stage) -> None:
    paused = await stage.controller.pause("drain", expire_seconds=60)
    assert paused.paused and paused.expires_at == stage.controller.pool_status().pause_expires_at is not None
    body = PolicyUpdateBody(version=3, require_pause=True)
    first = await stage.controller.update(body)
    assert (first.version, first.serving) == (3, ("policy-0", "policy-1"))
    assert await stage.controller.update(body) == first
    assert stage.announced == [3]
    with pytest.raises(WeightUpdateError, match="does not follow 3"):
        await stage.controller.update(PolicyUpdateBody(version=3, caches_dropped=True))
    assert (await stage.controller.resume()).paused is False


async def test_an_update_outlives_the_trainer_that_hung_up(stage: Stage) -> None:
    await stage.controller.pause("drain")
    asked = asyncio.create_task(stage.controller.update(PolicyUpdateBody(version=3)))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(ApiError, match="the update to version 3 is under way"):
        await stage.controller.update(PolicyUpdateBody(version=4))
    assert (await stage.controller.update(PolicyUpdateBody(version=3))).version == 3
    assert stage.announced == [3]


async def test_the_list_of_an_update_is_the_fleet_from_then_on(stage: Stage) -> None:
    await stage.controller.pause("drain")
    updated = await stage.controller.update(PolicyUpdateBody(version=1, engines=[URL.format(1), URL.format(9)]))
    assert updated.serving == ("policy-1", "policy-2")
    assert [engine.url for engine in stage.controller.pool_status().engines] == [URL.format(1), URL.format(9)]
    assert stage.engines["policy-0"].closed


async def test_an_engine_leaves_when_its_calls_are_over(stage: Stage) -> None:
    stage.answer.clear()
    call = asyncio.create_task(stage.pool.generate(request()))
    waits = {name: asyncio.create_task(engine.call_held.wait()) for name, engine in stage.engines.items()}
    await asyncio.wait(waits.values(), return_when=asyncio.FIRST_COMPLETED)
    [name] = [name for name, wait in waits.items() if wait.done()]
    assert stage.controller.registry.deregister(name).draining
    assert stage.controller.registry.deregister(name).draining, "again is harmless"
    assert name in stage.pool.engines
    stage.answer.set()
    await call
    await stage.pool.members.changes.wait_for(lambda: name not in stage.pool.engines)
    assert stage.engines[name].closed
    with pytest.raises(ApiError, match=f"has no engine '{name}'"):
        stage.controller.registry.deregister(name)
    added = stage.controller.registry.register("http://10.0.0.5:8000")
    assert (added.name, added.url) == ("policy-2", URL.format(5)), "a name is never used again"
    assert stage.controller.registry.register(URL.format(5)) == added


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest", "http://10.0.0.1.evil.com:8000/v1"])
async def test_nothing_outside_of_the_list_joins(stage: Stage, url: str) -> None:
    with pytest.raises(ApiError, match="not on the allow-list"):
        stage.controller.registry.register(url)
    with pytest.raises(ApiError, match="not on the allow-list"):
        await stage.controller.update(PolicyUpdateBody(version=1, engines=[URL.format(1), url]))
    assert stage.pool.engines == ["policy-0", "policy-1"], "all or nothing"
    assert stage.pool.version == 0


async def test_a_password_in_an_address_is_refused_and_not_repeated(stage: Stage) -> None:
    with pytest.raises(ApiError) as caught:
        stage.controller.registry.register("http://user:pw@10.0.0.5:8000/v1")
    assert caught.value.status == 422
    assert "pw" not in str(caught.value)


async def test_a_pool_of_one_router_takes_another_address_only_in_its_place() -> None:
    async with EnginePool("policy") as pool:
        pool.add_engine(FakeEngine("policy-0", lambda _: Reply((2,))))
        fleet = EngineRegistry(
            pool,
            {"policy-0": URL.format(0)},
            lambda name, _: FakeEngine(name, lambda _: Reply((2,))),
            AllowedUrls((), ["http://10.0.0.*:8000/v1"]),
            max_engines=1,
        )
        with pytest.raises(ApiError, match="room for 1 engines"):
            fleet.register(URL.format(1))
        fleet.set_engines([URL.format(1)])
        assert "policy-1" in pool.engines
        await fleet.close()
