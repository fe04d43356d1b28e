"""From a posted row to its Gym result."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import gym_needed  # noqa: F401 - orjson comes with it
import pytest
from rollout_samples import MESSAGES, ROW, cancelled, failed, rollout, truncated
from row_service import FakeConnection
from virtual_time import virtually

from prorl_gym.client import UnacknowledgedRollout
from prorl_gym.errors import FailureKind
from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.row_handler import (
    AgentProfile,
    GroupRewards,
    RowClaim,
    RowDeduplicator,
    RowHandler,
)
from prorl_gym.records import Message, Outcome, Rollout, Score
from prorl_gym.trainers.nemo_rl import check_group, check_result, first_prompt

pytestmark = pytest.mark.gym


def handler_over(service: FakeConnection, **profile: Any) -> RowHandler:
    return RowHandler(AgentProfile(agent="a", **profile), "", connect=service.connect)


async def ask(record: Rollout, *rows: dict[str, Any], **profile: Any) -> tuple[list[tuple[int, Any]], FakeConnection]:
    """Return status and answer to each of these rows, posted one after the other."""
    service = FakeConnection(record)
    handler = handler_over(service, **profile)
    answers: list[tuple[int, Any]] = []
    for row in rows or (ROW,):
        answer = await handler.answer_row(dict(row))
        handler.mark_delivered(answer)
        found = json.loads(answer.body, parse_constant=lambda name: pytest.fail(f"{name} in the answer"))
        answers.append((answer.status, found))
    return answers, service


async def test_each_row_becomes_a_rollout_and_its_result_passes_the_trainer():
    """Also an equal row, once the first was answered."""
    answers, rollouts = await ask(rollout(), ROW, ROW)
    for status, result in answers:
        assert status == 200
        check_result(result)
    assert [request.task for request in rollouts.submitted] == [ROW["task"]] * 2
    assert len({request.rollout_id for request in rollouts.submitted}) == 2


async def test_response_is_what_gym_itself_accepts():
    from nemo_gym.openai_utils import NeMoGymResponse

    malformed = [*MESSAGES[:3], Message(role="user", content="That call was not valid JSON."), MESSAGES[4]]
    [(_, result)], _ = await ask(rollout(messages=malformed))
    first = NeMoGymResponse.model_validate(result["response"]).output[0].model_dump()
    assert first["generation_token_ids"] == [100, 9]


async def in_group(records: Sequence[Rollout], **profile: Any) -> list[dict[str, Any]]:
    """Return the answers to the rows of one group, whose rollouts end one after the other with these records."""
    service = FakeConnection(records[0])
    handler = handler_over(service, num_generations=len(records), **profile)
    answers: list[dict[str, Any]] = []
    for index, record in enumerate(records):
        service.record = record
        answers.append(json.loads((await handler.answer_row(ROW | {"_ng_rollout_index": index})).body))
    return answers


async def test_masked_row_does_not_move_the_baseline_of_its_group():
    solved, wrong = rollout(), rollout(score=Score(reward=0.0))
    answers = await in_group([solved, wrong, solved, failed(FailureKind.SANDBOX_LOST), cancelled()])
    assert [answer["reward"] for answer in answers] == [1.0, 0.0, 1.0, pytest.approx(2 / 3), pytest.approx(2 / 3)]
    assert [answer["mask_sample"] for answer in answers] == [False, False, False, True, True]
    uniform = await in_group([solved, solved, solved, failed()])
    assert {answer["reward"] for answer in uniform} == {1.0}, "a masked row alone makes no group informative"


async def test_masked_row_of_a_later_epoch_does_not_show_the_mean_of_an_earlier_one():
    """Gym's collector numbers the prompts of each step from 0: a prompt has the same group id again."""
    group_rewards, wrong = GroupRewards(), Score(reward=0.0)
    named = {"group_id": "g", "group_size": 2}
    for index in range(2):
        group_rewards.record_rollout(rollout(**named, rollout_id=f"first-{index}", replica=index))
    group_rewards.record_rollout(rollout(**named, rollout_id="second-0", replica=0, score=wrong))
    assert group_rewards.mean("g") == 0.0
    group_rewards.record_rollout(failed(**named, rollout_id="second-1", replica=1))
    group_rewards.record_rollout(rollout(**named, rollout_id="again-1", replica=1))  # the row was dispatched again
    assert group_rewards.mean("g") == 0.5


async def test_masked_row_that_ends_before_its_group_does_not_wait_for_it():
    assert [answer["reward"] for answer in await in_group([failed(), rollout()])] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (failed(), "engine e0 is down"),
        (cancelled(), "It has no reward: redundant."),
        (truncated().model_copy(update={"segments": []}), "Nothing was sampled."),
    ],
)
async def test_on_failure_raise_answers_503_to_what_measures_nothing(record: Rollout, reason: str):
    """The trainer for which it is there ignores masks: a row would enter its batch. By default it is masked."""
    [(status, answer)], _ = await ask(record, on_failure="raise")
    assert (status, answer["detail"]) == (503, reason)
    [(status, answer)], _ = await ask(record)
    assert (status, answer["mask_sample"]) == (200, True)


async def test_on_failure_raise_keeps_failures_of_the_model():
    outcome = Outcome(status="failed", kind=FailureKind.SANDBOX_LIMIT)
    [(status, answer)], _ = await ask(rollout(outcome=outcome, score=Score(reward=0.25)), on_failure="raise")
    assert (status, answer["reward"]) == (200, 0.25)


async def test_rollouts_that_never_had_a_prompt_get_the_ids_of_the_row():
    rows = [ROW | {"_ng_rollout_index": index} for index in range(3)]
    answers, _ = await ask(failed(segments=[], messages=[]), *rows)
    check_group([result for _, result in answers])
    for _, result in answers:
        check_result(result)
        assert (first_prompt(result), result["prorl_placeholder"]) == ([7, 8], True)


async def test_prompt_that_cannot_be_rendered_has_a_placeholder_all_the_same():
    row = ROW | {"responses_create_params": {"input": "poison"}}
    [(status, result)], _ = await ask(failed(segments=[], messages=[]), row)
    check_result(result)
    assert (status, first_prompt(result)) == (200, [0])


@pytest.mark.parametrize("row", [ROW | {"prorl": {"grup_id": "x"}}, ROW | {"task": 5}, {"environment": 3}])
async def test_bad_row_is_a_masked_result_and_no_rollout(row: dict[str, Any]):
    [(status, result)], rollouts = await ask(rollout(), row)
    check_result(result)
    assert (status, result["failure_kind"], rollouts.submitted) == (200, "prorl:bad_row", [])


async def test_environment_of_the_instance_serves_rows_that_name_none():
    row = {key: value for key, value in ROW.items() if key != "environment"}
    _, rollouts = await ask(rollout(), row, environment="math")
    assert rollouts.submitted[0].environment == "math"


async def test_defect_is_answered_without_a_traceback(monkeypatch: pytest.MonkeyPatch):
    service = FakeConnection(rollout())
    monkeypatch.setattr(service, "submit", lambda request: 1 // 0)
    answer = await handler_over(service).answer_row(dict(ROW))
    assert answer.status == 500
    assert b"ZeroDivisionError" in answer.body and b"Traceback" not in answer.body


# --- which rollout a row means, where test_service_connection.py does not see it


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


async def test_orphans_of_a_row_are_met_once_each_oldest_first(claims: RowDeduplicator):
    two = [claims.claim_rollout("k"), claims.claim_rollout("k")]
    assert two[0].rollout_id != two[1].rollout_id, "an equal row while the first caller waits"
    for claim in two:
        claims.add_orphan(claim, 60.0)
    assert [claims.claim_rollout("k") for _ in two] == two
    assert claims.claim_rollout("k") not in two


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


@virtually
async def test_orphan_that_is_claimed_or_has_its_record_is_not_cancelled(
    claims: RowDeduplicator, callbacks: CallbackRecorder
):
    claimed, finished = claims.claim_rollout("claimed"), claims.claim_rollout("finished")
    for claim in (claimed, finished):
        claims.add_orphan(claim, 60.0)
    claims.mark_finished(finished.rollout_id)
    assert claims.claim_rollout("claimed") is claimed
    await asyncio.sleep(61)
    assert not callbacks.cancelled
    assert claims.claim_rollout("finished") is finished


async def test_record_that_is_never_requested_is_dropped(callbacks: CallbackRecorder):
    claims = RowDeduplicator("a", callbacks.on_abandoned, callbacks.on_expired, orphan_ttl_seconds=0.0)
    claims.add_orphan(RowClaim("k", "k-1", is_finished=True), 60.0)
    await asyncio.wait_for(callbacks.happened.wait(), 5)
    assert (callbacks.cancelled, callbacks.expired) == ([], ["k-1"])


async def test_row_waits_for_the_caller_of_an_equal_one_to_leave_and_no_longer_than_given(claims: RowDeduplicator):
    first = claims.claim_rollout("k")
    await claims.wait_for_orphan("k", 0.01)
    waiting = asyncio.ensure_future(claims.wait_for_orphan("k", 60.0))
    claims.add_orphan(claims.claim_rollout("other"), 60.0)
    await asyncio.sleep(0)
    assert not waiting.done()
    claims.add_orphan(first, 60.0)
    await asyncio.wait_for(waiting, 5)
