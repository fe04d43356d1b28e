"""New weights through the client: one block that pauses, reports and resumes, and what happens when it does not end."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from loopback_service import TOKEN, in_a_thread, served

from prorl_gym.client import Client, ServiceError, SyncClient, WeightUpdate
from prorl_gym.demand import Demand
from prorl_gym.errors import ConflictError, NotFoundError

ENGINES = {"policy-0", "policy-1"}


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with served() as url, Client(url, token=TOKEN, retry_seconds=2.0) as client:
        yield client


async def serving(client: Client) -> set[str]:
    return {engine.name for engine in (await client.policy()).engines if engine.serves}


async def until_resumed(client: Client) -> None:
    async with asyncio.timeout(10):
        while (await client.policy()).paused:  # noqa: ASYNC110 - the end of a pause raises no event here
            await asyncio.sleep(0.01)


async def test_one_block_pauses_reports_and_resumes(client: Client) -> None:
    for version in (1, 2):
        async with client.weight_update(expire_seconds=60) as update:
            policy = await client.policy()
            assert (policy.paused, policy.version, update.version) == (True, version - 1, version)
            assert policy.pool.pause_expires_at is not None
        assert update.result is not None
        assert (update.result.version, set(update.result.serving)) == (version, ENGINES)
        policy = await client.policy()
        assert (policy.paused, policy.version, policy.pool.pause_expires_at) == (False, version, None)


async def test_a_first_version_and_engines_that_load_in_flight_need_no_pause(client: Client) -> None:
    assert (await client.update_policy(0)).version == 0
    async with client.weight_update(mode=None) as update:
        assert not (await client.policy()).paused
    assert update.result is not None and update.result.version == (await client.policy()).version == 1


async def test_after_an_error_nothing_is_reported_and_the_engines_go_on(client: Client) -> None:
    with pytest.raises(RuntimeError, match="no space left"):
        async with client.weight_update():
            raise RuntimeError("no space left")
    assert (await client.policy()).version == 0
    assert not (await client.policy()).paused
    assert await serving(client) == ENGINES, "they have shown that they still have the weights"


async def test_a_block_that_is_cancelled_resumes(client: Client) -> None:
    entered = asyncio.Event()

    async def load() -> None:
        async with client.weight_update():
            entered.set()
            await asyncio.Event().wait()

    loading = asyncio.create_task(load())
    await entered.wait()
    loading.cancel()
    await asyncio.wait({loading})
    assert not (await client.policy()).paused


async def test_a_block_that_outlasts_its_pause_reports_nothing(client: Client) -> None:
    with pytest.raises(ConflictError, match="its pause is over") as caught:
        async with client.weight_update(expire_seconds=0.05):
            await until_resumed(client)
    assert "expire_seconds" in caught.value.fix
    assert (await client.policy()).version == 0
    async with client.weight_update() as update:
        pass
    assert update.version == 1


async def test_a_version_that_goes_back_is_refused_with_the_next_one_named(client: Client) -> None:
    async with client.weight_update(7):
        pass
    with pytest.raises(ConflictError, match="version 3 does not follow 7") as caught:
        async with client.weight_update(3):
            pass
    assert "the next one is 8" in caught.value.fix
    assert not (await client.policy()).paused


async def test_a_demand_of_an_older_version_is_refused(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    await client.set_demand("first", Demand(groups=1, version=0))
    async with client.weight_update(7):
        pass
    wanted = Demand(groups=1, version=7)
    await client.set_demand("first", wanted)
    async with client.weight_update():
        pass
    await client.set_demand("first", wanted)  # sent again, as after a lost answer
    for run in ("first", "second"):
        with pytest.raises(ConflictError, match=f"run {run}: .*version 5 .* version 8") as caught:
            await client.set_demand(run, Demand(groups=1, version=5))
        assert "GET /v1/policy" in caught.value.fix
    assert await client.demand("second") is None
    await client.set_demand("second", Demand(groups=1))  # without one it is the pool's
    assert (await client.groups("second")).version == 8
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], "a refusal is no defect"


async def test_each_pool_has_a_version_of_its_own(client: Client) -> None:
    assert (await client.policy("policy")).pool.name == "policy"
    assert [pool.version for pool in (await client.status()).pools] == [0]
    with pytest.raises(NotFoundError, match="no pool 'judge'"):
        await client.policy("judge")
    with pytest.raises(NotFoundError, match="no pool 'judge'"):
        async with client.weight_update(1, pool="judge"):
            pass


async def test_a_trainer_that_died_in_its_pause_stops_nothing_for_good() -> None:
    async with served() as url:
        async with Client(url, token=TOKEN) as dead:
            await dead.pause(expire_seconds=0.05)
        async with Client(url, token=TOKEN) as client:
            await until_resumed(client)
            assert await serving(client) == ENGINES


async def test_a_stream_says_once_that_the_policy_is_paused(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("prorl_gym.api.routes.rollouts.HEARTBEAT_SECONDS", 0.01)
    warned = asyncio.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.set()

    watch = Watch(logging.WARNING)
    logging.getLogger("prorl_gym.client.record_stream").addHandler(watch)
    try:
        stream = client.stream("run")
        reading = asyncio.create_task(anext(stream))
        for mode in ("abort", "drain"):
            await client.pause(mode, expire_seconds=None)
            await asyncio.wait_for(warned.wait(), 10)
            await asyncio.sleep(0.1)  # ten further lines
            await client.resume()
            warned.clear()
        reading.cancel()
        await asyncio.wait({reading})
        await stream.aclose()
    finally:
        logging.getLogger("prorl_gym.client.record_stream").removeHandler(watch)
    found = [one.getMessage() for one in caplog.records if "is paused since" in one.getMessage()]
    assert len(found) == 2, "once for each pause"
    assert all("pool policy" in one and "Client.resume()" in one for one in found)


def test_without_an_event_loop_it_is_the_same_block() -> None:
    with in_a_thread() as url, SyncClient(url, token=TOKEN) as client:
        with client.weight_update() as update:
            assert isinstance(update, WeightUpdate)
            assert client.policy().paused
        assert update.result is not None and update.result.version == 1
        with pytest.raises(KeyboardInterrupt):
            with client.weight_update():
                raise KeyboardInterrupt
        with pytest.raises(ServiceError, match="expire_seconds"):
            with client.weight_update(expire_seconds=-1):
                pass
        assert (client.policy().paused, client.policy().version) == (False, 1)
