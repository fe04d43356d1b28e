"""Which rollout a posted row means."""

import asyncio

import pytest

from prorl_gym.client import UnacknowledgedRollout
from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.row_dedup import RowClaim, RowDeduplicator


class CallbackRecorder:
    """Collects the ids of the callbacks."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.expired: list[str] = []
        self.happened = asyncio.Event()

    def on_abandoned(self, rollout_id: str) -> None:
        self.cancelled.append(rollout_id)
        self.happened.set()

    def on_expired(self, rollout_id: str) -> None:
        self.expired.append(rollout_id)
        self.happened.set()


@pytest.fixture
async def callbacks() -> CallbackRecorder:
    return CallbackRecorder()


@pytest.fixture
async def claims(callbacks: CallbackRecorder):
    made = RowDeduplicator("a", callbacks.on_abandoned, callbacks.on_expired)
    yield made
    made.close()


async def test_row_posted_again_after_a_drop_meets_its_rollout(claims: RowDeduplicator):
    first = claims.claim_rollout("k")
    claims.add_orphan(first, 60.0)
    again = claims.claim_rollout("k")
    assert (again.rollout_id, again.is_orphan) == (first.rollout_id, True)


async def test_dropped_rollout_is_met_once(claims: RowDeduplicator):
    first = claims.claim_rollout("k")
    claims.add_orphan(first, 60.0)
    claims.claim_rollout("k")
    assert claims.claim_rollout("k").rollout_id != first.rollout_id


async def test_equal_row_while_the_first_caller_waits_is_a_new_rollout(claims: RowDeduplicator):
    assert claims.claim_rollout("k").rollout_id != claims.claim_rollout("k").rollout_id


async def test_orphans_of_a_row_are_met_oldest_first(claims: RowDeduplicator):
    two = [claims.claim_rollout("k"), claims.claim_rollout("k")]
    for claim in two:
        claims.add_orphan(claim, 60.0)
    assert [claims.claim_rollout("k") for _ in two] == two


async def test_another_process_makes_other_ids(callbacks: CallbackRecorder):
    one, other = (
        RowDeduplicator("a", callbacks.on_abandoned, callbacks.on_expired),
        RowDeduplicator("a", callbacks.on_abandoned, callbacks.on_expired),
    )
    assert one.claim_rollout("k").rollout_id != other.claim_rollout("k").rollout_id


async def test_what_an_earlier_process_left_is_met_and_not_cancelled(
    claims: RowDeduplicator, callbacks: CallbackRecorder
):
    earlier = RowDeduplicator("a", callbacks.on_abandoned, callbacks.on_expired)
    other_agent = RowDeduplicator("b", callbacks.on_abandoned, callbacks.on_expired)
    ids = [earlier.claim_rollout("k").rollout_id, earlier.claim_rollout("k").rollout_id]
    listed = [*ids, other_agent.claim_rollout("k").rollout_id, "stranger", "one-with-three-dashes"]
    found = [UnacknowledgedRollout(rollout_id=name, run_id="a", finished=False) for name in listed]
    assert claims.restore_orphans(found) == 2
    assert claims.claim_rollout("k").rollout_id == ids[0]
    await asyncio.sleep(0)
    assert not callbacks.cancelled


async def test_unclaimed_rollout_is_cancelled(claims: RowDeduplicator, callbacks: CallbackRecorder):
    first = claims.claim_rollout("k")
    claims.add_orphan(first, 0.0)
    await asyncio.wait_for(callbacks.happened.wait(), 5)
    assert (callbacks.cancelled, callbacks.expired) == ([first.rollout_id], [])
    assert claims.claim_rollout("k").rollout_id != first.rollout_id


async def test_record_of_an_orphan_is_kept_for_its_row(claims: RowDeduplicator, callbacks: CallbackRecorder):
    first = claims.claim_rollout("k")
    claims.add_orphan(first, 0.0)
    claims.mark_finished(first.rollout_id)
    await asyncio.sleep(0.01)  # the timer that must not fire would be due by now
    assert not callbacks.cancelled
    assert claims.claim_rollout("k") is first


async def test_record_that_is_never_requested_is_dropped(callbacks: CallbackRecorder):
    claims = RowDeduplicator("a", callbacks.on_abandoned, callbacks.on_expired, orphan_ttl_seconds=0.0)
    claims.add_orphan(RowClaim("k", "k-1", is_finished=True), 60.0)
    await asyncio.wait_for(callbacks.happened.wait(), 5)
    assert (callbacks.cancelled, callbacks.expired) == ([], ["k-1"])


async def test_claimed_rollout_is_not_cancelled(claims: RowDeduplicator, callbacks: CallbackRecorder):
    claims.add_orphan(claims.claim_rollout("k"), 0.0)
    claims.claim_rollout("k")
    await asyncio.sleep(0.01)  # the timer that must not fire would be due by now
    assert not callbacks.cancelled
