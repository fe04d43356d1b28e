"""An agent's rows over a real embedded service: what a broken connection, a restart or a full disk does to them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import gym_needed  # noqa: F401 - orjson comes with it
import pytest
from row_service import EmbeddedRollouts, agent

import prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.service_connection as module
from prorl_gym.api.http import error_responses
from prorl_gym.client.wire_models import AcceptedRollout
from prorl_gym.errors import CancelReason
from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.step_early_stop import EarlyStopConfig
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.ledger.ledger_config import DamagedLedgerError, LedgerError
from prorl_gym.rollout.protocol import Job
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

FULL = LedgerError("/l.db: the disk is full.", "Free space there.")


class FailingLedger(MemoryLedger):
    """Fails as told; counts calls. Its content outlives the service."""

    def __init__(self) -> None:
        super().__init__()
        self.error: LedgerError | None = None
        self.accepts = 0
        self.acknowledgements = 0
        self.refused = asyncio.Event()

    async def add_and_begin(self, requests: Sequence[RolloutRequest]) -> tuple[list[AcceptedRollout], list[Job]]:
        self.accepts += 1
        if self.error is not None:
            self.refused.set()
            raise self.error
        return await super().add_and_begin(requests)

    async def acknowledge_rollouts(self, rollout_ids: Sequence[str]) -> int:
        self.acknowledgements += 1
        return await super().acknowledge_rollouts(rollout_ids)

    async def close(self) -> None:
        """Stay usable."""


def row(name: str, **task: Any) -> dict[str, Any]:
    prompt = {"input": [{"role": "user", "content": "Do it."}]}
    return {"responses_create_params": prompt, "environment": "scripted", "task": {"id": name, **task}}


@pytest.fixture
def ledger() -> FailingLedger:
    return FailingLedger()


@pytest.fixture
async def rollouts(ledger: FailingLedger, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EmbeddedRollouts]:
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(module, "MAX_BACKOFF_SECONDS", 0.05)
    monkeypatch.setattr(error_responses, "DISK_RETRY_SECONDS", 0)
    made = EmbeddedRollouts(lambda: ledger)
    await made.start()
    yield made
    await made.stop()


async def leave(call: "asyncio.Task[Any]") -> None:
    call.cancel()
    await asyncio.wait({call})


async def until_pending(rollouts: EmbeddedRollouts, count: int) -> None:
    async with asyncio.timeout(20):
        while rollouts.service.pending != count:  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0.005)


async def until_released(ledger: FailingLedger, count: int) -> None:
    async with asyncio.timeout(20):
        while (await ledger.usage()).released != count:  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0.005)


async def accepted(ledger: FailingLedger) -> int:
    usage = await ledger.usage()
    return usage.pending + usage.kept + usage.released


async def test_shards_share_a_service_and_never_each_other_s_rollouts(
    rollouts: EmbeddedRollouts, ledger: FailingLedger
):
    """Agents of one name post equal rows; one goes while its rollout runs, and another comes."""
    async with agent(rollouts, agent="a:h:1") as one, agent(rollouts, agent="a:h:2", num_generations=2) as two:
        hanging = asyncio.create_task(one.post(row("same", run="hang")))
        await until_pending(rollouts, 1)
        async with agent(rollouts, agent="a:h:3") as late:
            assert (await late.post(row("same")))["reward"] is not None
        group = [row("same") | {"_ng_task_index": 0, "_ng_rollout_index": index} for index in range(2)]
        results = await asyncio.gather(*map(two.post, group))
        assert len({result["prorl_rollout_id"] for result in results}) == 2
        requests = await ledger.requests([result["prorl_rollout_id"] for result in results])
        assert {request.run_id for request in requests} == {"a:h:2"}
        assert len({request.group_id for request in requests}) == 1
        assert rollouts.service.pending == 1  # that of the first shard: nobody took it or cancelled it
        await leave(hanging)


async def test_thousand_rows_at_once_need_few_connections_and_commits(
    rollouts: EmbeddedRollouts, ledger: FailingLedger
):
    async with agent(rollouts) as caller:
        results = await asyncio.gather(*(caller.post(row(f"r{index}")) for index in range(1000)))
        assert [one["task"]["id"] for one in results] == [f"r{index}" for index in range(1000)]
        assert ledger.accepts < 100
        assert len(rollouts.server.server_state.connections) <= 5
        await until_released(ledger, 1000)


async def test_answers_that_arrive_one_by_one_are_acknowledged_together(
    rollouts: EmbeddedRollouts, ledger: FailingLedger
):
    async with agent(rollouts) as caller:
        for index in range(20):
            await caller.post(row(f"r{index}"))
        await until_released(ledger, 20)
        assert ledger.acknowledgements < 10


async def test_closing_acknowledges_what_was_delivered(
    rollouts: EmbeddedRollouts, ledger: FailingLedger, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "ACKNOWLEDGE_SECONDS", 3600.0)
    async with agent(rollouts) as caller:
        await caller.post(row("r"))
    assert (await ledger.usage()).released == 1


async def test_closing_does_not_wait_for_a_service_that_is_gone(
    rollouts: EmbeddedRollouts, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "ACKNOWLEDGE_SECONDS", 3600.0)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.1)
    async with asyncio.timeout(20), agent(rollouts) as caller:
        await caller.post(row("r"))
        await rollouts.stop()


async def test_rows_are_answered_over_a_restart_of_the_service(rollouts: EmbeddedRollouts, ledger: FailingLedger):
    async with agent(rollouts) as caller:
        slow = asyncio.create_task(caller.post(row("slow", run="hang")))
        await until_pending(rollouts, 1)
        await rollouts.stop()
        await rollouts.start()
        assert (await caller.post(row("quick")))["reward"] == 1.0
        listed = (await ledger.unacknowledged(None)).rollouts[0]
        await rollouts.service.cancel([listed.rollout_id])
        assert (await slow)["prorl_rollout_id"] == listed.rollout_id


async def test_rows_are_made_again_after_a_restart_without_the_ledger(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FIRST_BACKOFF_SECONDS", 0.01)
    ledgers = [MemoryLedger(), MemoryLedger()]
    rollouts = EmbeddedRollouts(lambda: ledgers.pop())
    await rollouts.start()
    async with agent(rollouts) as caller:
        for index in range(3):  # the new ledger's cursors begin at the first again
            await caller.post(row(f"r{index}"))
        slow = asyncio.create_task(caller.post(row("slow", run="hang")))
        await until_pending(rollouts, 1)
        await rollouts.stop()
        await rollouts.start()
        await until_pending(rollouts, 1)
        await rollouts.service.cancel(runs=["a"])
        assert (await slow)["failure_kind"] == "cancelled"
    await rollouts.stop()


async def test_row_of_a_caller_that_left_is_met_by_its_twin(rollouts: EmbeddedRollouts, ledger: FailingLedger):
    async with agent(rollouts) as caller:
        first = asyncio.create_task(caller.post(row("a", run="hang")))
        await until_pending(rollouts, 1)
        await leave(first)
        twin = asyncio.create_task(caller.post(row("a", run="hang")))
        await asyncio.sleep(0.05)
        await rollouts.service.cancel(runs=["a"])
        await twin
        assert await accepted(ledger) == 1


async def test_answer_that_did_not_arrive_is_given_again(rollouts: EmbeddedRollouts, ledger: FailingLedger):
    async with agent(rollouts) as caller:
        lost = await caller.handler.answer_row(row("a"))
        caller.handler.mark_disconnected(lost)
        await caller.post(row("a"))
        await until_released(ledger, 1)
        assert await accepted(ledger) == 1
        await caller.post(row("a"))  # it was delivered: another sample
        assert await accepted(ledger) == 2


async def test_row_whose_caller_stays_away_is_cancelled_and_its_record_released(
    rollouts: EmbeddedRollouts, ledger: FailingLedger
):
    async with agent(rollouts, repost_seconds=0.01) as caller:
        first = asyncio.create_task(caller.post(row("a", run="hang")))
        await until_pending(rollouts, 1)
        first.cancel()
        await until_released(ledger, 1)
        (summary,) = await ledger.summaries()
        assert summary.detail == CancelReason.DISCONNECTED


async def test_agent_that_was_killed_leaves_its_rollouts_to_the_next(rollouts: EmbeddedRollouts, ledger: FailingLedger):
    async with agent(rollouts) as killed:
        done = await killed.handler.answer_row(row("done"))
        waiting = asyncio.create_task(killed.handler.answer_row(row("slow", run="hang")))
        await until_pending(rollouts, 1)
    assert done.status == 200
    async with agent(rollouts, agent="another") as other:
        await other.post(row("done"))
    async with agent(rollouts) as caller:
        again = await caller.post(row("done"))
        slow = asyncio.create_task(caller.post(row("slow", run="hang")))
        await asyncio.sleep(0.05)
        await rollouts.service.cancel(runs=["a"])
        await slow
        assert done.claim is not None and again["prorl_rollout_id"] == done.claim.rollout_id
        assert await accepted(ledger) == 3
    await leave(waiting)


async def test_row_that_an_earlier_process_abandoned_is_made_again(rollouts: EmbeddedRollouts, ledger: FailingLedger):
    async with agent(rollouts) as killed:
        waiting = asyncio.create_task(killed.handler.answer_row(row("a", run="hang")))
        await until_pending(rollouts, 1)
    (listed,) = (await ledger.unacknowledged(None)).rollouts
    abandoned = listed.rollout_id
    await rollouts.service.cancel([abandoned], reason=CancelReason.DISCONNECTED)
    await until_pending(rollouts, 0)
    async with agent(rollouts) as caller:
        again = asyncio.create_task(caller.post(row("a", run="hang")))
        await until_pending(rollouts, 1)
        await rollouts.service.cancel(runs=["a"])
        assert (await again)["prorl_rollout_id"] != abandoned
    await leave(waiting)


async def test_bad_row_keeps_no_other_from_being_made(rollouts: EmbeddedRollouts):
    async with agent(rollouts) as caller:
        refused = row("bad") | {"prorl": {"group_id": "g", "group_size": 10**6}}
        strange = row("strange") | {"environment": "strange"}
        deep = row("deep", nested=_nested(230))
        answers = await asyncio.gather(*map(caller.post, [row("a"), refused, strange, deep, row("b")]))
        assert [one["failure_kind"] for one in answers] == [
            None,
            "prorl:bad_row",
            "prorl:unknown_environment",
            "prorl:bad_row",
            None,
        ]


def _nested(depth: int) -> Any:
    found: Any = 0
    for _ in range(depth):
        found = [found]
    return found


async def test_rows_wait_for_room_on_the_disk_which_is_emptied_of_what_gym_has(
    rollouts: EmbeddedRollouts, ledger: FailingLedger
):
    async with agent(rollouts) as caller:
        delivered = await caller.handler.answer_row(row("a"))
        ledger.error = FULL
        waiting = asyncio.create_task(caller.post(row("b")))
        await ledger.refused.wait()
        caller.handler.mark_delivered(delivered)
        await until_released(ledger, 1)
        assert not waiting.done()
        ledger.error = None
        assert (await waiting)["reward"] == 1.0


async def test_row_that_is_dropped_while_it_waits_for_room_is_cancelled(
    rollouts: EmbeddedRollouts, ledger: FailingLedger
):
    ledger.error = FULL
    async with agent(rollouts, repost_seconds=0.01) as caller:
        dropped = asyncio.create_task(caller.post(row("a", run="hang")))
        await ledger.refused.wait()
        await leave(dropped)
        await asyncio.sleep(0.05)
        ledger.error = None
        await until_released(ledger, 1)
        (summary,) = await ledger.summaries()
        assert summary.detail == CancelReason.DISCONNECTED


async def test_damaged_ledger_is_an_error_at_once(rollouts: EmbeddedRollouts, ledger: FailingLedger):
    ledger.error = DamagedLedgerError("/l.db: not a ledger, or damaged.")
    async with agent(rollouts) as caller:
        answer = await asyncio.wait_for(caller.handler.answer_row(row("a")), 10)
        assert (answer.status, answer.claim) == (503, None)
        assert b"damaged" in answer.body


async def test_early_stop_answers_a_group_as_one(rollouts: EmbeddedRollouts):
    def member(group: str, replica: int, reward: float, **task: Any) -> dict[str, Any]:
        name = {"prorl": {"group_id": group, "group_size": 2, "replica": replica}}
        return row(f"{group}{replica}", reward=reward, **task) | name

    async with agent(rollouts, num_generations=2, early_stop=EarlyStopConfig(informative_groups=1)) as caller:
        late = [member("h", 0, 1.0, run="hang"), member("h", 1, 1.0)]
        first = [asyncio.create_task(caller.post(one)) for one in late]
        await until_pending(rollouts, 1)
        rest = await asyncio.gather(*(caller.post(member("g", index, float(index))) for index in range(2)))
        seen = [
            (one["reward"], one["mask_sample"], one["prorl_cancelled"])
            for one in [*await asyncio.gather(*first), *rest]
        ]
        assert seen == [(0.0, True, 1), (0.0, True, 1), (0.0, False, 0), (1.0, False, 0)]
