"""A trainer's loop against the real routes over fakes: demands, groups, acknowledgement, weights, lists."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from loopback_service import TOKEN, served

from prorl_gym.client import Client, CompletedGroup, GroupsDroppedError, ServiceError
from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.errors import CancelReason, ConflictError, FailureKind, GoneError, NotFoundError, TaskError
from prorl_gym.records import RolloutRequest


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with served() as url, Client(url, token=TOKEN) as client:
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
    assert [one.rollout_id async for one in _records(client)] == []
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


async def _records(client: Client) -> AsyncIterator[Any]:
    async for one in client.stream("run", follow=False):
        yield one.rollout


async def test_reading_groups_acknowledges_those_that_are_over(client: Client) -> None:
    await client.submit([*group("a", 1.0, 0.0), *group("b", 0.0, 1.0)])
    for rollout_id in ("a0", "a1", "b0", "b1"):
        await client.result(rollout_id, timeout=20)
    assert len([one async for one in client.stream_groups("run", follow=False, acknowledge=True)]) == 2
    assert (await client.status()).ledger.released == 4


async def test_a_failed_member_is_replaced_before_its_group_comes(client: Client) -> None:
    await client.set_demand("run", Demand(groups=1, replace=1))
    requests = group("a", 1.0, 0.0)
    failing = requests[0].model_copy(update={"task": {"reward": 1.0, "run": "sandbox_lost", "flaky": 1, "id": "x"}})
    await client.submit([failing, requests[1]])
    (found,) = await next_groups(client, 1)
    assert [one.stands_in_for for one in found.rollouts] == ["a0", None]
    assert found.rewards == [1.0, 0.0]


async def test_demands_come_and_go(client: Client) -> None:
    assert await client.demand("run") is None
    wanted = Demand(groups=3, version=2, max_staleness=1)
    await client.set_demand("run", wanted)
    stated = await client.demand("run")
    assert stated is not None
    assert stated.model_dump() == wanted.model_dump()
    await client.clear_demand("run")
    assert await client.demand("run") is None


async def test_weights_change_under_a_pause(client: Client) -> None:
    policy = await client.policy()
    assert (policy.version, policy.paused, len(policy.engines)) == (0, False, 2)
    await client.pause("drain")
    assert (await client.policy()).paused
    updated = await client.update_policy(1)
    assert (updated.version, set(updated.serving), updated.quarantined) == (1, {"policy-0", "policy-1"}, {})
    await client.resume()
    assert [engine.version for engine in (await client.policy()).engines] == [1, 1]
    added = await client.add_engine("http://10.0.0.7:8000/v1")
    assert (await client.remove_engine(added.name)).draining
    with pytest.raises(NotFoundError):
        await client.remove_engine("no such/engine")


async def test_what_was_submitted_can_be_read_again(client: Client) -> None:
    (request,) = group("a", 1.0)
    await client.submit(request)
    assert await client.request("a0") == request
    await client.result("a0", timeout=20)
    assert await client.request("a0") == request
    assert "a0" in await client.page("a0")
    with pytest.raises(NotFoundError):
        await client.request("stranger")


async def test_many_are_submitted_in_batches_and_all_are_accepted(client: Client) -> None:
    requests = [RolloutRequest(rollout_id=f"r{n}", environment="scripted", task={}) for n in range(1100)]
    accepted = await client.submit(requests)
    assert [one.rollout_id for one in accepted] == [request.rollout_id for request in requests]
    assert all(one.duplicate for one in await client.submit(requests[:3]))
    with pytest.raises(ConflictError):
        await client.submit(requests[0].model_copy(update={"task": {"reward": 0.0}}))


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
