"""A trainer's loop against the real routes over fakes: demands, groups, acknowledgement, weights, lists."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from loopback_service import ENGINES, TOKEN, in_a_thread, served

from prorl_gym.client import Client, CompletedGroup, GroupsDroppedError, ServiceError, SyncClient, WeightUpdate
from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.errors import CancelReason, ConflictError, FailureKind, GoneError, NotFoundError, TaskError
from prorl_gym.records import RolloutRequest


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with served() as url, Client(url, token=TOKEN, retry_seconds=2.0) as client:
        yield client


def group(name: str, *rewards: float, **task: Any) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            rollout_id=f"{name}{replica}",
            run_id="run",
            group_id=name,
            group_size=len(rewards),
            replica=replica,
            environment="scripted",
            task={"reward": reward, **task},
        )
        for replica, reward in enumerate(rewards)
    ]


async def next_groups(client: Client, count: int, **options: Any) -> list[CompletedGroup]:
    stream = client.stream_groups("run", **options)
    found = [await anext(stream) for _ in range(count)]
    await stream.aclose()
    return found


async def test_groups_are_read_used_and_acknowledged(client: Client) -> None:
    await client.set_demand("run", Demand(groups=2))
    await client.submit([*group("a", 1.0, 0.0), *group("b", 0.0, 1.0)])
    first, second = await next_groups(client, 2)
    assert {first.group_id, second.group_id} == {"a", "b"}
    assert sorted(first.rewards) == [0.0, 1.0]
    status = await client.groups("run")
    assert (status.satisfied, status.ready) == (True, 2)
    assert {one.group_id for one in status.ready_groups} == {"a", "b"}
    later = await client.set_demand("run", Demand(groups=1, after=second.cursor))
    assert (later.satisfied, later.ready) == (False, 0)
    await client.submit(group("c", 0.5, 0.0))
    (third,) = await next_groups(client, 1, cursor=second.resume_cursor, used_cursor=second.cursor)
    assert [one.rollout_id for one in third.rollouts] == ["c0", "c1"]
    assert await client.acknowledge("run", third.resume_cursor) == 6
    with pytest.raises(GoneError):
        await client.poll_result("a0")
    assert [one async for one in client.stream("run", follow=False)] == []
    newest = await client.rollouts("run", limit=4)
    assert newest.before is not None
    listed = newest.rollouts
    assert len(listed) == 4
    assert {one.group_id for one in listed[:2]} == {"c"}
    assert all(one.released for one in listed)
    older = await client.rollouts("run", before=newest.before)
    assert (len(older.rollouts), older.before) == (2, None)


async def test_records_are_acknowledged_by_id_in_any_order(client: Client) -> None:
    await client.submit([*group("a", 1.0, 0.0), *group("hung", 1.0, run="hang")])
    for name in ("a0", "a1"):
        await client.result(name)
    assert await client.acknowledge_rollouts(["a1", "hung0"]) == 1
    with pytest.raises(GoneError):
        await client.poll_result("a1")
    listed = await client.unacknowledged("run")
    assert {(one.rollout_id, one.run_id, one.finished) for one in listed.rollouts} == {
        ("a0", "run", True),
        ("hung0", "run", False),
    }
    assert (await client.unacknowledged("other")).rollouts == ()
    stream = client.stream("run", listed.cursor)
    assert await client.cancel(["hung0"], reason=CancelReason.DISCONNECTED) == ["hung0"]
    assert (await anext(stream)).rollout.outcome.reason is CancelReason.DISCONNECTED
    await stream.aclose()


async def test_reading_groups_acknowledges_those_that_are_over(client: Client) -> None:
    await client.submit([*group("a", 1.0, 0.0), *group("b", 0.0, 1.0)])
    for rollout_id in ("a0", "a1", "b0", "b1"):
        await client.result(rollout_id, timeout=20)
    assert len([one async for one in client.stream_groups("run", follow=False, acknowledge=True)]) == 2
    assert (await client.status()).ledger.released == 4


async def test_what_was_submitted_can_be_read_again(client: Client) -> None:
    (request,) = group("a", 1.0)
    await client.submit(request)
    assert await client.request("a0") == request
    await client.result("a0", timeout=20)
    assert await client.request("a0") == request
    assert "a0" in await client.page("a0")
    with pytest.raises(NotFoundError):
        await client.request("stranger")


async def test_groups_that_the_demand_cancelled_are_reported_instead_of_waited_for(client: Client) -> None:
    """A trainer that submits two steps ahead of its demand."""
    await client.hold()
    await client.submit([*group("a", 1.0, 0.0), *group("b", 0.0, 1.0, run="hang"), *group("c", 0.0, 1.0, run="hang")])
    await client.set_demand("run", Demand(groups=1, redundant=RedundantHandling(run="kill")))
    await client.release()
    stream = client.stream_groups("run")
    first = await asyncio.wait_for(anext(stream), 20)
    found = {first.group_id}
    with pytest.raises(GroupsDroppedError) as caught:
        while True:
            found.add((await asyncio.wait_for(anext(stream), 20)).group_id)
    assert {*caught.value.group_ids, *found} == {"a", "b", "c"}
    assert not set(caught.value.group_ids) & found
    waiting = asyncio.create_task(anext(stream))  # each is reported once: now it waits for what comes
    await client.set_demand("run", Demand(groups=9))
    await client.submit(group("d", 1.0, 0.0))
    assert (await asyncio.wait_for(waiting, 20)).group_id == "d"
    await stream.aclose()


async def test_groups_that_were_parked_before_the_demand_cancelled_them_are_reported(client: Client) -> None:
    await client.hold()
    half_done = [group("b", 0.0, 1.0)[0], group("b", 0.0, 1.0, run="hang")[1]]
    await client.submit([*group("a", 1.0, 0.0), *half_done, *group("c", 0.0, 1.0, run="hang")])
    await client.set_demand("run", Demand(groups=1, redundant=RedundantHandling(run="park", park_seconds=0.3)))
    await client.release()
    stream = client.stream_groups("run")
    assert (await asyncio.wait_for(anext(stream), 20)).group_id == "a"
    with pytest.raises(GroupsDroppedError) as caught:
        await asyncio.wait_for(anext(stream), 20)
    assert set(caught.value.group_ids) == {"b", "c"}
    await stream.aclose()


async def test_refusal_of_a_request_names_its_kind(client: Client) -> None:
    with pytest.raises(TaskError, match="strange") as caught:
        await client.submit(RolloutRequest(rollout_id="a", environment="strange", task={}))
    assert caught.value.kind is FailureKind.UNKNOWN_ENVIRONMENT
    with pytest.raises(ServiceError) as refused:
        await client.submit(RolloutRequest(rollout_id="a", group_size=10**6, environment="scripted", task={}))
    assert refused.value.status == 422


# --- new weights: one block that pauses, reports and resumes, and what happens when it does not end -------------------


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
        assert (update.result.version, set(update.result.serving)) == (version, set(ENGINES))
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
    assert await serving(client) == set(ENGINES), "they have shown that they still have the weights"


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
