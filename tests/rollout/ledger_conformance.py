"""What every ledger must keep. Each check takes an empty, open ledger and is named by the promise it tests.

Usage in a test: ``@pytest.mark.parametrize("check", CHECKS)`` and ``await check(ledger)``.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from typing import Any

from sample_records import record

from prorl_gym.client.wire_models import AcceptedRollout
from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.errors import (
    CancelReason,
    Cause,
    ConflictError,
    Evidence,
    FailureKind,
    GoneError,
    Limit,
    NotFoundError,
    ShuttingDownError,
    TaskError,
)
from prorl_gym.inference.tokens.turn_log import LoggedTurn
from prorl_gym.records import NOT_SAMPLED, Generation, Outcome, Retry, Rollout, RolloutRequest, Score, Segment
from prorl_gym.rollout.ledger.ledger_config import CancelledRolloutError
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger as Ledger
from prorl_gym.rollout.protocol import PAGE_CHARS, TurnEnded
from prorl_gym.settings import RolloutSettings, resolve_settings

_decode = Rollout.model_validate_json

Check = Callable[[Ledger], Awaitable[None]]


async def accepted_is_pending_and_readable(ledger: Ledger) -> None:
    """What was accepted is pending, oldest first, and reads back as it was sent."""
    requests = [_request(f"r{i}", task={"i": i, "text": "naïve \ud800 \u2028"}) for i in range(3)]
    answers = await ledger.add_rollouts(requests)
    assert answers == [AcceptedRollout(rollout_id=r.rollout_id, duplicate=False) for r in requests]
    jobs = await ledger.pending_jobs()
    assert [job.request for job in jobs] == requests
    assert all(job.attempt == 0 and abs(job.accepted_at - time.time()) < 60 for job in jobs)
    assert await ledger.get("r1") == requests[1]


async def same_body_is_a_duplicate(ledger: Ledger) -> None:
    """The same id with the same body is harmless, also twice in one batch and after the end."""
    request = _request("r0", task={"b": 1, "a": 2})
    assert [a.duplicate for a in await ledger.add_rollouts([request, request])] == [False, True]
    again = _request("r0", task={"a": 2, "b": 1})
    assert [a.duplicate for a in await ledger.add_rollouts([again])] == [True]
    await ledger.finish(_record(request))
    assert [a.duplicate for a in await ledger.add_rollouts([request])] == [True]
    assert await ledger.pending_jobs() == []


async def other_body_refuses_the_whole_batch(ledger: Ledger) -> None:
    """An id that stands with another body is refused, and nothing of its batch is written."""
    await ledger.add_rollouts([_request("r0", task={"a": 1})])
    await _refused(ledger.add_rollouts([_request("new"), _request("r0", task={"a": 2})]), ConflictError)
    await _refused(ledger.add_rollouts([_request("twice"), _request("twice", task={"a": 2})]), ConflictError)
    await _refused(ledger.get("new"), NotFoundError)
    await _refused(ledger.get("twice"), NotFoundError)
    assert len(await ledger.pending_jobs()) == 1


async def a_task_that_is_not_json_is_refused(ledger: Ledger) -> None:
    """Numbers that JSON does not have are refused with a message about the row."""
    await _refused(ledger.add_rollouts([_request("r0", task={"x": float("nan")})]), TaskError)
    await _refused(ledger.add_rollouts([_request("r0", task={"x": object()})]), TaskError)


async def first_terminal_record_stands(ledger: Ledger) -> None:
    """Only one record is ever written for an id."""
    request = _request("r0")
    await ledger.add_rollouts([request])
    first, second = _record(request, reward=1.0), _record(request, reward=0.0)
    assert await asyncio.gather(ledger.finish(first), ledger.finish(second)) == [1, None]
    assert await ledger.get("r0") == first
    await _refused(ledger.finish(_record(_request("stranger"))), NotFoundError)


async def attempts_are_unique_and_counted(ledger: Ledger) -> None:
    """An attempt begins once; the next one has a fresh number and the reasons why the earlier ones failed."""
    await ledger.add_rollouts([_request("r0")])
    begun = await ledger.begin_attempt("r0")
    assert (begun.attempt, begun.request, begun.retries) == (0, _request("r0"), ())
    await _refused(ledger.begin_attempt("nobody"), NotFoundError)
    retry = Retry(
        attempt=0,
        kind=FailureKind.ENGINE_TIMEOUT,
        stage="run",
        message="no answer \ud800",
        sampled_tokens=7,
        seconds=1.5,
        evidence=Evidence.CALL_UNANSWERED,
    )
    await ledger.fail_attempt("r0", retry)
    await _refused(ledger.fail_attempt("r0", retry.model_copy(update={"attempt": 7})), NotFoundError)
    (job,) = await ledger.next_jobs(["r0"])
    assert job.attempt == 1
    assert [(r.attempt, r.kind, r.stage) for r in job.retries] == [(0, FailureKind.ENGINE_TIMEOUT, "run")]
    assert [(r.sampled_tokens, r.seconds, r.evidence) for r in job.retries] == [(7, 1.5, Evidence.CALL_UNANSWERED)]
    await ledger.finish(_record(job.request, attempt=1))
    await _refused(ledger.begin_attempt("r0"), ConflictError)


async def the_end_of_an_earlier_attempt_ends_nothing(ledger: Ledger) -> None:
    """What comes late of an attempt that failed, or that a later one has followed, is refused."""
    names = ("failed", "lost", "withdrawn", "restarted")
    await ledger.add_rollouts([_request(name) for name in names])
    for name in names:
        assert (await ledger.begin_attempt(name)).attempt == 0
    retry = Retry(attempt=0, kind=FailureKind.ENGINE_TIMEOUT, stage="run", message="no answer")
    await ledger.fail_attempt("failed", retry)
    await ledger.begin_attempt("lost")
    await ledger.withdraw_attempts(["withdrawn"])
    await _refused(ledger.finish(_record(_request("failed"))), ConflictError)
    await _refused(ledger.finish(_record(_request("lost"))), ConflictError)
    await _refused(ledger.finish(_record(_request("withdrawn"))), ConflictError)
    await ledger.recover()
    await _refused(ledger.finish(_record(_request("restarted"))), ConflictError)
    await _refused(ledger.fail_attempt("lost", retry), NotFoundError)
    assert {job.request.rollout_id for job in await ledger.pending_jobs()} == set(names)
    for name in names:
        job = await ledger.begin_attempt(name)
        assert await ledger.finish(_record(job.request, attempt=job.attempt))
    assert await ledger.pending_jobs() == []


async def what_was_cancelled_gets_no_other_record(ledger: Ledger) -> None:
    """From the moment in which a cancel is remembered; what has its record by then is not named."""
    requests = [_request(f"r{i}") for i in range(4)]
    await ledger.add_rollouts(requests)
    await ledger.finish(_record(requests[0]))
    assert await ledger.cancel(["r2", "r0", "nobody", "r1", "r2"], CancelReason.CLIENT) == ["r2", "r1"]
    assert await ledger.cancel(["r1"], CancelReason.STALE) == ["r1"]
    for outcome in (
        Outcome(status="completed"),
        Outcome(status="truncated", limit=Limit.TURNS),
        Outcome(status="failed", kind=FailureKind.SANDBOX_LIMIT),
        Outcome(status="failed", kind=FailureKind.INTERNAL),
    ):
        await _refused(ledger.finish(_record(requests[1], outcome=outcome)), CancelledRolloutError)
    stopped = Outcome(status="cancelled", reason=CancelReason.CLIENT)
    assert await ledger.finish(_record(requests[1], outcome=stopped)) == 2
    race = await asyncio.gather(
        ledger.finish(_record(requests[3])), ledger.cancel(["r3"], CancelReason.CLIENT), return_exceptions=True
    )
    record = await ledger.get("r3")
    if race[1] == ["r3"]:
        assert isinstance(race[0], CancelledRolloutError) and not isinstance(record, Rollout)
    else:
        assert isinstance(record, Rollout) and record.reward == 1.0
    assert {pending.rollout_id: pending.cancel_reason for pending in await ledger.recover()}[
        "r2"
    ] is CancelReason.CLIENT


async def an_attempt_that_is_open_is_lost_to_the_next(ledger: Ledger) -> None:
    """Two attempts never run at once: beginning one makes the earlier one lost. Each has a number of its own."""
    await ledger.add_rollouts([_request("r0")])
    jobs = await asyncio.gather(*(ledger.begin_attempt("r0") for _ in range(3)))
    assert [job.attempt for job in jobs] == [0, 1, 2]
    assert [[retry.kind for retry in job.retries] for job in jobs] == [
        [FailureKind.SERVICE_RESTARTED] * earlier for earlier in range(3)
    ]


async def what_is_accepted_may_begin_at_once(ledger: Ledger) -> None:
    """Its first attempt is as good as one that was begun afterwards; what is known already does not begin again."""
    await ledger.add_rollouts([_request("known")])
    requests = [
        _request("new", task={"text": "naïve \ud800"}),
        _request("known"),
        _request("new", task={"text": "naïve \ud800"}),
    ]
    accepted, jobs = await ledger.add_and_begin(requests)
    assert [(answer.rollout_id, answer.duplicate) for answer in accepted] == [
        ("new", False),
        ("known", True),
        ("new", True),
    ]
    assert [(job.request, job.attempt, job.retries, job.unreadable_reason) for job in jobs] == [
        (requests[0], 0, (), "")
    ]
    assert (
        jobs[0].accepted_at == {job.request.rollout_id: job.accepted_at for job in await ledger.pending_jobs()}["new"]
    )
    await _refused(ledger.add_and_begin([_request("other"), _request("new")]), ConflictError)
    await _refused(ledger.begin_attempt("other"), NotFoundError)
    found = {pending.rollout_id: pending.restarts for pending in await ledger.recover()}
    assert found == {"known": 0, "new": 1}
    assert (await ledger.begin_attempt("new")).attempt == 1


async def recover_closes_open_attempts(ledger: Ledger) -> None:
    """An attempt that was open when the service died becomes a retry; what never began does not."""
    await ledger.add_rollouts([_request("open", group_id="g"), _request("idle", evaluation=True), _request("done")])
    await ledger.begin_attempt("open")
    await ledger.begin_attempt("done")
    await ledger.finish(_record(_request("done")))
    await ledger.cancel(["idle", "done", "nobody"], CancelReason.STALE)
    await ledger.cancel(["idle"], CancelReason.CLIENT)
    found = {pending.rollout_id: pending for pending in await ledger.recover()}
    assert list(found) == ["open", "idle"]
    assert (found["open"].restarts, found["open"].failures, found["open"].group_id) == (1, 0, "g")
    assert (found["idle"].restarts, found["idle"].cancel_reason, found["idle"].evaluation) == (
        0,
        CancelReason.STALE,
        True,
    )
    (job,) = await ledger.next_jobs(["open"])
    assert job.attempt == 1
    assert [r.kind for r in job.retries] == [FailureKind.SERVICE_RESTARTED]


async def logged_turns_come_with_the_next_attempt(ledger: Ledger) -> None:
    """A turn is kept only after all before it; one in place of another takes the place of what followed."""
    await ledger.add_rollouts([_request("r0"), _request("other")])
    first, second, third = (LoggedTurn(prompt=name, calls=()) for name in ("first", "second", "third"))
    assert (await ledger.begin_attempt("r0")).turns == ()
    for name, attempt, number, turn in (
        *(("r0", 0, 0, first), ("r0", 0, 2, third), ("r0", 1, 1, third)),
        *(("other", 0, 0, third), ("nobody", 0, 0, third)),
    ):
        await ledger.log_turn(TurnEnded(rollout_id=name, attempt=attempt, number=number, turn=turn))
    assert (await ledger.begin_attempt("other")).turns == ()
    await ledger.recover()
    assert (await ledger.begin_attempt("r0")).turns == (first,)
    await ledger.log_turn(TurnEnded(rollout_id="r0", attempt=1, number=1, turn=second))
    assert (await ledger.begin_attempt("r0")).turns == (first, second)
    await ledger.log_turn(TurnEnded(rollout_id="r0", attempt=2, number=0, turn=third))
    await ledger.withdraw_attempts(["r0"])
    assert (await ledger.begin_attempt("r0")).turns == (third,)


async def turns_that_did_not_help_are_forgotten(ledger: Ledger) -> None:
    """An attempt that fails without a turn of its own may have failed by what it resumed."""
    await ledger.add_rollouts([_request("r0")])
    turn = LoggedTurn(prompt="first", calls=())
    for attempt, turns in enumerate([(), (turn,), ()]):
        assert (await ledger.begin_attempt("r0")).turns == turns
        if attempt == 0:
            await ledger.log_turn(TurnEnded(rollout_id="r0", attempt=0, number=0, turn=turn))
        retry = Retry(attempt=attempt, kind=FailureKind.SANDBOX_LOST, stage="run", message="gone")
        await ledger.fail_attempt("r0", retry)


async def withdrawn_attempts_are_forgotten(ledger: Ledger) -> None:
    """An attempt that began and is withdrawn counts neither as failed nor as lost; its number stays used."""
    await ledger.add_rollouts([_request("r0"), _request("r1")])
    for rollout_id in ("r0", "r1"):
        await ledger.begin_attempt(rollout_id)
    retry = Retry(attempt=0, kind=FailureKind.ENGINE_TIMEOUT, stage="run", message="no answer")
    await ledger.fail_attempt("r0", retry)
    await ledger.begin_attempt("r0")
    await ledger.withdraw_attempts(["r0", "nobody"])
    found = {pending.rollout_id: (pending.failures, pending.restarts) for pending in await ledger.recover()}
    assert found == {"r0": (1, 0), "r1": (0, 1)}
    (job,) = await ledger.next_jobs(["r0"])
    assert (job.attempt, [r.attempt for r in job.retries]) == (2, [0])


async def jobs_keep_the_order_asked_for(ledger: Ledger) -> None:
    """Jobs come in the order of the ids, without the unknown and the finished ones."""
    requests = [_request(f"r{i}") for i in range(4)]
    await ledger.add_rollouts(requests)
    await ledger.finish(_record(requests[2]))
    jobs = await ledger.next_jobs(["r3", "nobody", "r2", "r0"])
    assert [job.request.rollout_id for job in jobs] == ["r3", "r0"]


async def the_stream_resumes_after_its_cursor(ledger: Ledger) -> None:
    """Records come in the order in which they were written, each exactly once, also page by page."""
    requests = [_request(f"r{i}", run_id=f"run{i % 2}") for i in range(6)]
    await ledger.add_rollouts(requests)
    for request in reversed(requests):
        await ledger.finish(_record(request))
    everything = await ledger.read_records(None, 0, 100)
    assert [_decode(d.record).rollout_id for d in everything] == [f"r{i}" for i in reversed(range(6))]
    assert [d.cursor for d in everything] == sorted({d.cursor for d in everything})
    seen: list[str] = []
    cursor = 0
    while page := await ledger.read_records("run1", cursor, 2):
        seen += [_decode(delivery.record).rollout_id for delivery in page]
        cursor = page[-1].cursor
    assert seen == ["r5", "r3", "r1"]


async def records_survive_broken_text(ledger: Ledger) -> None:
    """Half a surrogate pair in a model's text costs that character, not the record."""
    request = _request("r0")
    await ledger.add_rollouts([request])
    broken = Outcome(status="failed", kind=FailureKind.INTERNAL, message="half \ud83d pair")
    assert await ledger.finish(_record(request, outcome=broken))
    record = await ledger.get("r0")
    assert isinstance(record, Rollout)
    assert record.outcome.message.startswith("half ")


async def defaults_written_out_are_the_same_body(ledger: Ledger) -> None:
    """Spelling out a default does not change a request's identity: releases add fields."""
    await ledger.add_rollouts([_request("r0", task={"a": 1})])
    spelt_out = _request("r0", task={"a": 1}, group_size=1, settings={"seed": None}, metadata={}, evaluation=False)
    assert [a.duplicate for a in await ledger.add_rollouts([spelt_out])] == [True]
    await _refused(ledger.add_rollouts([_request("r0", task={"a": 1}, settings={"seed": 0})]), ConflictError)


async def summaries_have_what_group_verdicts_need(ledger: Ledger) -> None:
    """A summary has the record's outcome, reward and oldest version."""
    group = {"run_id": "run", "group_id": "g", "group_size": 4}
    asked = [_request(f"r{i}", replica=i, **group) for i in range(4)]
    await ledger.add_rollouts(
        [*asked, _request("replacement", replica=3, stands_in_for="r3", **group), _request("other")]
    )
    await ledger.finish(_record(asked[0], reward=0.5, segments=[_segment([3, 7])]))
    await ledger.finish(_record(asked[1], outcome=Outcome(status="truncated", limit=Limit.TURNS), masking=Limit.TURNS))
    await ledger.finish(_record(asked[2], outcome=Outcome(status="failed", kind=FailureKind.SANDBOX_LIMIT)))
    await ledger.finish(_record(asked[3], outcome=Outcome(status="cancelled", reason=CancelReason.REDUNDANT)))
    await ledger.finish(_record(_request("other")))
    found = await ledger.summaries("run")
    assert [m.rollout_id for m in found] == ["r0", "r1", "r2", "r3"]
    assert [(m.replica, m.group_id, m.group_size) for m in found] == [(i, "g", 4) for i in range(4)]
    assert [(m.status, m.detail) for m in found] == [
        ("completed", ""),
        ("truncated", "turns"),
        ("failed", "sandbox_limit"),
        ("cancelled", "redundant"),
    ]
    assert [(m.reward, m.masked, m.cause) for m in found] == [
        (0.5, False, None),
        (1.0, True, None),
        (None, True, Cause.POLICY),
        (None, True, None),
    ]
    assert [(m.oldest_version, m.turns, m.sampled_tokens) for m in found] == [(3, 1, 2), *[(None, 0, 0)] * 3]
    await ledger.finish(_record(_request("replacement", replica=3, stands_in_for="r3", **group)))
    assert [m.stands_in_for for m in await ledger.summaries("run", after=found[-1].cursor)] == ["r3"]


async def members_come_page_by_page_in_both_directions(ledger: Ledger) -> None:
    """Each page goes on where the one before ended, by run, by group, from the oldest or from the newest."""
    requests = [_request(f"r{i}", run_id=f"run{i % 2}", group_id=f"g{i % 3}") for i in range(12)]
    await ledger.add_rollouts(requests)
    for request in requests:
        await ledger.finish(_record(request))
    everything = [m.rollout_id for m in await ledger.summaries()]
    assert everything == [f"r{i}" for i in range(12)]
    for newest_first in (False, True):
        seen: list[str] = []
        after = 0
        while page := await ledger.summaries("run1", after=after, limit=2, newest_first=newest_first):
            seen += [m.rollout_id for m in page]
            after = page[-1].cursor
        wanted = [f"r{i}" for i in range(1, 12, 2)]
        assert seen == (wanted[::-1] if newest_first else wanted)
    assert [m.rollout_id for m in await ledger.summaries("run0", groups=["g1", "g2"])] == ["r2", "r4", "r8", "r10"]
    assert await ledger.summaries("run0", groups=[]) == []
    assert [m.rollout_id for m in await ledger.summaries(prefix="r1")] == ["r1", "r10", "r11"]
    assert [m.rollout_id for m in await ledger.summaries("run0", prefix="r1")] == ["r10"]


async def a_page_of_large_records_is_short(ledger: Ledger) -> None:
    """Whatever the limit, and every record is still read."""
    requests = [_request(f"r{i}") for i in range(4)]
    await ledger.add_rollouts(requests)
    for request in requests:
        large = _record(request).model_copy(update={"metadata": {"text": "x" * (PAGE_CHARS // 2)}})
        await ledger.finish(large)
    first = await ledger.read_records(None, 0, 100)
    rest = await ledger.read_records(None, first[-1].cursor, 100)
    assert [_decode(d.record).rollout_id for d in first + rest] == [f"r{i}" for i in range(4)]
    assert len(first) == 2


async def acknowledged_records_are_let_go(ledger: Ledger) -> None:
    """They leave the stream, and their ids stay idempotent; pending rollouts and other runs are not touched."""
    requests = [_request(f"r{i}", run_id=f"run{i % 2}", group_id="g") for i in range(6)]
    await ledger.add_rollouts(requests)
    cursors = [await ledger.finish(_record(request)) for request in requests[:5]]
    assert await ledger.acknowledge("run0", cursors[2] or 0) == 2
    assert await ledger.acknowledge("run0", cursors[2] or 0) == 0
    assert [_decode(d.record).rollout_id for d in await ledger.read_records(None, 0, 10)] == ["r1", "r3", "r4"]
    await _refused(ledger.get("r0"), GoneError)
    assert [a.duplicate for a in await ledger.add_rollouts([requests[0]])] == [True]
    await _refused(ledger.add_rollouts([_request("r0", task={"other": 1})]), ConflictError)
    assert await ledger.finish(_record(requests[0])) is None
    await _refused(ledger.begin_attempt("r0"), ConflictError)
    assert await ledger.requests(["r0", "r1"]) == [requests[1]]
    assert [m.released for m in await ledger.summaries("run0")] == [True, True, False]
    usage = await ledger.usage()
    assert (usage.pending, usage.kept, usage.released, usage.full) == (1, 3, 2, False)
    assert await ledger.acknowledge(None, 10**30) == 3
    assert [job.request.rollout_id for job in await ledger.pending_jobs()] == ["r5"]


async def an_acknowledgement_covers_nothing_that_ends_later(ledger: Ledger) -> None:
    """A cursor ahead of the stream does not acknowledge later records."""
    await ledger.add_rollouts([_request("r0"), _request("r1")])
    await ledger.finish(_record(_request("r0")))
    assert await ledger.acknowledge("default", 10**6) == 1
    await ledger.finish(_record(_request("r1")))
    assert [_decode(d.record).rollout_id for d in await ledger.read_records("default", 0, 10)] == ["r1"]
    assert isinstance(await ledger.get("r1"), Rollout)


async def records_are_acknowledged_one_by_one(ledger: Ledger) -> None:
    """In any order, whatever ended before them; what was not acknowledged is listed, oldest first."""
    requests = [_request(f"r{i}", run_id=f"run{i % 2}") for i in range(4)]
    await ledger.add_rollouts(requests)
    for request in reversed(requests[:3]):
        await ledger.finish(_record(request))
    assert await ledger.acknowledge_rollouts(["r1", "r3", "stranger"]) == 1
    assert await ledger.acknowledge_rollouts(["r1"]) == 0
    await _refused(ledger.get("r1"), GoneError)
    listed = await ledger.unacknowledged(None)
    assert [(one.rollout_id, one.run_id, one.finished) for one in listed.rollouts] == [
        ("r0", "run0", True),
        ("r2", "run0", True),
        ("r3", "run1", False),
    ]
    assert listed.cursor == (await ledger.read_records(None, 0, 10))[-1].cursor
    assert [one.rollout_id for one in (await ledger.unacknowledged("run1")).rollouts] == ["r3"]
    assert [_decode(d.record).rollout_id for d in await ledger.read_records(None, 0, 10)] == ["r2", "r0"]


async def versions_are_remembered(ledger: Ledger) -> None:
    """The last version of each pool stands."""
    assert await ledger.policy_versions() == {}
    for pool, version in (("policy", 3), ("other", 2**62), ("policy", 4)):
        await ledger.set_policy_version(pool, version)
    assert await ledger.policy_versions() == {"policy": 4, "other": 2**62}


async def demands_are_remembered(ledger: Ledger) -> None:
    """The last demand of a run stands; without one its rollouts are all wanted again."""
    first = Demand(groups=8, max_staleness=2, redundant=RedundantHandling(park_seconds=5.0))
    await ledger.set_demand("a", first)
    await ledger.set_demand("b", Demand(groups=0))
    assert await ledger.demands() == {"a": first, "b": Demand(groups=0)}
    await ledger.set_demand("a", Demand(groups=4, after=17))
    await ledger.set_demand("b", None)
    await ledger.set_demand("nobody", None)
    assert await ledger.demands() == {"a": Demand(groups=4, after=17)}


async def numbers_without_end_are_no_trouble(ledger: Ledger) -> None:
    """JSON's integers have no end, those of a database do."""
    await ledger.add_rollouts([_request("r0", group_size=10**30, replica=10**29, group_id="g")])
    await ledger.finish(_record(_request("r0", group_id="g"), segments=[_segment([10**30])]))
    (member,) = await ledger.summaries()
    assert (member.oldest_version or 0) >= 2**62
    assert await ledger.read_records(None, 10**30, 10) == []


async def closed_is_closed(ledger: Ledger) -> None:
    """After ``close`` every call raises; closing again is harmless."""
    await ledger.add_rollouts([_request("r0")])
    await ledger.close()
    await ledger.close()
    await _refused(ledger.add_rollouts([_request("r1")]), ShuttingDownError)
    await _refused(ledger.get("r0"), ShuttingDownError)


CHECKS: list[Check] = [check for name, check in globals().items() if iscoroutinefunction(check) and name[0] != "_"]


def _request(rollout_id: str, **fields: object) -> RolloutRequest:
    return RolloutRequest.model_validate({"rollout_id": rollout_id, "environment": "noop", "task": {}, **fields})


def _segment(versions: list[int]) -> Segment:
    """A model call that sampled a token with each of these versions."""
    count = len(versions)
    call = Generation(start=1, end=count + 1, turn=0, finish_reason="stop", engine="fake", seconds=0.0)
    return Segment(
        token_ids=[1, *[2] * count],
        mask=[0, *(1 for _ in versions)],
        logprobs=[0.0, *[-0.5] * count],
        policy_versions=[NOT_SAMPLED, *versions],
        generations=[call],
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        logprob_kind="raw",
    )


def _record(
    request: RolloutRequest,
    *,
    reward: float = 1.0,
    outcome: Outcome | None = None,
    masking: Limit | None = None,
    **fields: Any,
) -> Rollout:
    outcome = outcome or Outcome(status="completed")
    identity = ("run_id", "group_id", "group_size", "replica", "environment")
    return record(
        request.rollout_id,
        outcome,
        score=Score(reward=reward) if outcome.status in ("completed", "truncated") else None,
        settings=resolve_settings(RolloutSettings(mask_overlong=(masking,))) if masking else None,
        accepted_at=time.time(),
        finished_at=time.time(),
        **{name: getattr(request, name) for name in identity},
        **fields,
    )


async def _refused(call: Awaitable[object], kind: type[Exception]) -> None:
    try:
        await call
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}")
