"""What every ledger must keep. Each check takes an empty, open ledger and is named by the promise it tests.

Usage in a test: ``@pytest.mark.parametrize("check", CHECKS)`` and ``await check(ledger)``.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from prorl_gym.demand import Demand, EarlyStop
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
from prorl_gym.records import NOT_SAMPLED, Generation, Outcome, Retry, Rollout, RolloutRequest, Score, Segment
from prorl_gym.rollout.encoding import decode_rollout
from prorl_gym.rollout.ledger_file import CancelledRolloutError
from prorl_gym.rollout.protocol import PAGE_SIZE, Accepted, Ledger
from prorl_gym.settings import RolloutSettings, resolve

Check = Callable[[Ledger], Awaitable[None]]


async def accepted_is_pending_and_readable(ledger: Ledger) -> None:
    """What was accepted is pending, oldest first, and reads back as it was sent."""
    requests = [_request(f"r{i}", task={"i": i, "text": "naïve \ud800 \u2028"}) for i in range(3)]
    answers = await ledger.accept(requests)
    assert answers == [Accepted(rollout_id=r.rollout_id, duplicate=False) for r in requests]
    jobs = await ledger.pending()
    assert [job.request for job in jobs] == requests
    assert all(job.attempt == 0 and abs(job.accepted_at - time.time()) < 60 for job in jobs)
    assert await ledger.get("r1") == requests[1]


async def same_body_is_a_duplicate(ledger: Ledger) -> None:
    """The same id with the same body is harmless, also twice in one batch and after the end."""
    request = _request("r0", task={"b": 1, "a": 2})
    assert [a.duplicate for a in await ledger.accept([request, request])] == [False, True]
    again = _request("r0", task={"a": 2, "b": 1})
    assert [a.duplicate for a in await ledger.accept([again])] == [True]
    await ledger.finish(_record(request))
    assert [a.duplicate for a in await ledger.accept([request])] == [True]
    assert await ledger.pending() == []


async def other_body_refuses_the_whole_batch(ledger: Ledger) -> None:
    """An id that stands with another body is refused, and nothing of its batch is written."""
    await ledger.accept([_request("r0", task={"a": 1})])
    await _refused(ledger.accept([_request("new"), _request("r0", task={"a": 2})]), ConflictError)
    await _refused(ledger.accept([_request("twice"), _request("twice", task={"a": 2})]), ConflictError)
    await _refused(ledger.get("new"), NotFoundError)
    await _refused(ledger.get("twice"), NotFoundError)
    assert len(await ledger.pending()) == 1


async def a_task_that_is_not_json_is_refused(ledger: Ledger) -> None:
    """Numbers that JSON does not know are refused with a message about the row."""
    await _refused(ledger.accept([_request("r0", task={"x": float("nan")})]), TaskError)
    await _refused(ledger.accept([_request("r0", task={"x": object()})]), TaskError)


async def first_terminal_record_stands(ledger: Ledger) -> None:
    """Only one record is ever written for an id."""
    request = _request("r0")
    await ledger.accept([request])
    first, second = _record(request, reward=1.0), _record(request, reward=0.0)
    assert await asyncio.gather(ledger.finish(first), ledger.finish(second)) == [1, None]
    assert await ledger.get("r0") == first
    await _refused(ledger.finish(_record(_request("stranger"))), NotFoundError)


async def attempts_are_unique_and_counted(ledger: Ledger) -> None:
    """An attempt begins once; the next one has a fresh number and knows why the earlier ones failed."""
    await ledger.accept([_request("r0")])
    begun = await ledger.begin("r0")
    assert (begun.attempt, begun.request, begun.retries) == (0, _request("r0"), ())
    await _refused(ledger.begin("nobody"), NotFoundError)
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
    (job,) = await ledger.jobs(["r0"])
    assert job.attempt == 1
    assert [(r.attempt, r.kind, r.stage) for r in job.retries] == [(0, FailureKind.ENGINE_TIMEOUT, "run")]
    assert [(r.sampled_tokens, r.seconds, r.evidence) for r in job.retries] == [(7, 1.5, Evidence.CALL_UNANSWERED)]
    await ledger.finish(_record(job.request, attempt=1))
    await _refused(ledger.begin("r0"), ConflictError)


async def the_end_of_an_earlier_attempt_ends_nothing(ledger: Ledger) -> None:
    """What comes late of an attempt that failed, or that a later one has followed, is refused."""
    names = ("failed", "lost", "withdrawn", "restarted")
    await ledger.accept([_request(name) for name in names])
    for name in names:
        assert (await ledger.begin(name)).attempt == 0
    retry = Retry(attempt=0, kind=FailureKind.ENGINE_TIMEOUT, stage="run", message="no answer")
    await ledger.fail_attempt("failed", retry)
    await ledger.begin("lost")
    await ledger.withdraw(["withdrawn"])
    await _refused(ledger.finish(_record(_request("failed"))), ConflictError)
    await _refused(ledger.finish(_record(_request("lost"))), ConflictError)
    await _refused(ledger.finish(_record(_request("withdrawn"))), ConflictError)
    await ledger.recover()
    await _refused(ledger.finish(_record(_request("restarted"))), ConflictError)
    await _refused(ledger.fail_attempt("lost", retry), NotFoundError)
    assert {job.request.rollout_id for job in await ledger.pending()} == set(names)
    for name in names:
        job = await ledger.begin(name)
        assert await ledger.finish(_record(job.request, attempt=job.attempt))
    assert await ledger.pending() == []


async def what_was_cancelled_gets_no_other_record(ledger: Ledger) -> None:
    """From the moment in which a cancel is remembered; what has its record by then is not named."""
    requests = [_request(f"r{i}") for i in range(4)]
    await ledger.accept(requests)
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
    assert {pending.rollout_id: pending.cancel for pending in await ledger.recover()}["r2"] is CancelReason.CLIENT


async def an_attempt_that_is_open_is_lost_to_the_next(ledger: Ledger) -> None:
    """Two attempts never run at once: whoever had the earlier one is gone. Each has a number of its own."""
    await ledger.accept([_request("r0")])
    jobs = await asyncio.gather(*(ledger.begin("r0") for _ in range(3)))
    assert [job.attempt for job in jobs] == [0, 1, 2]
    assert [[retry.kind for retry in job.retries] for job in jobs] == [
        [FailureKind.SERVICE_RESTARTED] * earlier for earlier in range(3)
    ]


async def what_is_accepted_may_begin_at_once(ledger: Ledger) -> None:
    """Its first attempt is as good as one that was begun afterwards; what is known already does not begin again."""
    await ledger.accept([_request("known")])
    requests = [
        _request("new", task={"text": "naïve \ud800"}),
        _request("known"),
        _request("new", task={"text": "naïve \ud800"}),
    ]
    accepted, jobs = await ledger.accept_and_begin(requests)
    assert [(answer.rollout_id, answer.duplicate) for answer in accepted] == [
        ("new", False),
        ("known", True),
        ("new", True),
    ]
    assert [(job.request, job.attempt, job.retries, job.unreadable) for job in jobs] == [(requests[0], 0, (), "")]
    assert jobs[0].accepted_at == {job.request.rollout_id: job.accepted_at for job in await ledger.pending()}["new"]
    await _refused(ledger.accept_and_begin([_request("other"), _request("new")]), ConflictError)
    await _refused(ledger.begin("other"), NotFoundError)
    found = {pending.rollout_id: pending.restarts for pending in await ledger.recover()}
    assert found == {"known": 0, "new": 1}
    assert (await ledger.begin("new")).attempt == 1


async def recover_closes_open_attempts(ledger: Ledger) -> None:
    """An attempt that was open when the service died becomes a retry; what never began does not."""
    await ledger.accept([_request("open", group_id="g"), _request("idle", evaluation=True), _request("done")])
    await ledger.begin("open")
    await ledger.begin("done")
    await ledger.finish(_record(_request("done")))
    await ledger.cancel(["idle", "done", "nobody"], CancelReason.STALE)
    await ledger.cancel(["idle"], CancelReason.CLIENT)
    found = {pending.rollout_id: pending for pending in await ledger.recover()}
    assert list(found) == ["open", "idle"]
    assert (found["open"].restarts, found["open"].failures, found["open"].group_id) == (1, 0, "g")
    assert (found["idle"].restarts, found["idle"].cancel, found["idle"].evaluation) == (0, CancelReason.STALE, True)
    (job,) = await ledger.jobs(["open"])
    assert job.attempt == 1
    assert [r.kind for r in job.retries] == [FailureKind.SERVICE_RESTARTED]


async def withdrawn_attempts_are_forgotten(ledger: Ledger) -> None:
    """An attempt that began and is withdrawn counts neither as failed nor as lost; its number stays used."""
    await ledger.accept([_request("r0"), _request("r1")])
    for rollout_id in ("r0", "r1"):
        await ledger.begin(rollout_id)
    retry = Retry(attempt=0, kind=FailureKind.ENGINE_TIMEOUT, stage="run", message="no answer")
    await ledger.fail_attempt("r0", retry)
    await ledger.begin("r0")
    await ledger.withdraw(["r0", "nobody"])
    found = {pending.rollout_id: (pending.failures, pending.restarts) for pending in await ledger.recover()}
    assert found == {"r0": (1, 0), "r1": (0, 1)}
    (job,) = await ledger.jobs(["r0"])
    assert (job.attempt, [r.attempt for r in job.retries]) == (2, [0])


async def jobs_keep_the_order_asked_for(ledger: Ledger) -> None:
    """Jobs come in the order of the ids, without the unknown and the finished ones."""
    requests = [_request(f"r{i}") for i in range(4)]
    await ledger.accept(requests)
    await ledger.finish(_record(requests[2]))
    jobs = await ledger.jobs(["r3", "nobody", "r2", "r0"])
    assert [job.request.rollout_id for job in jobs] == ["r3", "r0"]


async def the_stream_resumes_after_its_cursor(ledger: Ledger) -> None:
    """Records come in the order in which they were written, each exactly once, also page by page."""
    requests = [_request(f"r{i}", run_id=f"run{i % 2}") for i in range(6)]
    await ledger.accept(requests)
    for request in reversed(requests):
        await ledger.finish(_record(request))
    everything = await ledger.finished(None, 0, 100)
    assert [decode_rollout(d.record).rollout_id for d in everything] == [f"r{i}" for i in reversed(range(6))]
    assert [d.cursor for d in everything] == sorted({d.cursor for d in everything})
    seen: list[str] = []
    cursor = 0
    while page := await ledger.finished("run1", cursor, 2):
        seen += [decode_rollout(delivery.record).rollout_id for delivery in page]
        cursor = page[-1].cursor
    assert seen == ["r5", "r3", "r1"]


async def records_survive_broken_text(ledger: Ledger) -> None:
    """Half a surrogate pair in a model's text costs that character, not the record."""
    request = _request("r0")
    await ledger.accept([request])
    broken = Outcome(status="failed", kind=FailureKind.INTERNAL, message="half \ud83d pair")
    assert await ledger.finish(_record(request, outcome=broken))
    record = await ledger.get("r0")
    assert isinstance(record, Rollout)
    assert record.outcome.message.startswith("half ")


async def defaults_written_out_are_the_same_body(ledger: Ledger) -> None:
    """A field that says what it is by default anyway makes no other body: releases add fields."""
    await ledger.accept([_request("r0", task={"a": 1})])
    spelt_out = _request("r0", task={"a": 1}, group_size=1, settings={"seed": None}, metadata={}, evaluation=False)
    assert [a.duplicate for a in await ledger.accept([spelt_out])] == [True]
    await _refused(ledger.accept([_request("r0", task={"a": 1}, settings={"seed": 0})]), ConflictError)


async def members_tell_what_a_group_is_judged_by(ledger: Ledger) -> None:
    """What is kept beside a record says how it ended, what it is worth and how old its tokens are."""
    group = {"run_id": "run", "group_id": "g", "group_size": 4}
    asked = [_request(f"r{i}", replica=i, **group) for i in range(4)]
    await ledger.accept([*asked, _request("stand-in", replica=3, stands_in_for="r3", **group), _request("other")])
    await ledger.finish(_record(asked[0], reward=0.5, segments=[_segment([3, 7])]))
    await ledger.finish(_record(asked[1], outcome=Outcome(status="truncated", limit=Limit.TURNS), masking=Limit.TURNS))
    await ledger.finish(_record(asked[2], outcome=Outcome(status="failed", kind=FailureKind.SANDBOX_LIMIT)))
    await ledger.finish(_record(asked[3], outcome=Outcome(status="cancelled", reason=CancelReason.REDUNDANT)))
    await ledger.finish(_record(_request("other")))
    found = await ledger.members("run")
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
    await ledger.finish(_record(_request("stand-in", replica=3, stands_in_for="r3", **group)))
    assert [m.stands_in_for for m in await ledger.members("run", after=found[-1].cursor)] == ["r3"]


async def members_come_page_by_page_in_both_directions(ledger: Ledger) -> None:
    """Each page goes on where the one before ended, by run, by group, from the oldest or from the newest."""
    requests = [_request(f"r{i}", run_id=f"run{i % 2}", group_id=f"g{i % 3}") for i in range(12)]
    await ledger.accept(requests)
    for request in requests:
        await ledger.finish(_record(request))
    everything = [m.rollout_id for m in await ledger.members()]
    assert everything == [f"r{i}" for i in range(12)]
    for newest_first in (False, True):
        seen: list[str] = []
        after = 0
        while page := await ledger.members("run1", after=after, limit=2, newest_first=newest_first):
            seen += [m.rollout_id for m in page]
            after = page[-1].cursor
        wanted = [f"r{i}" for i in range(1, 12, 2)]
        assert seen == (wanted[::-1] if newest_first else wanted)
    assert [m.rollout_id for m in await ledger.members("run0", groups=["g1", "g2"])] == ["r2", "r4", "r8", "r10"]
    assert await ledger.members("run0", groups=[]) == []


async def a_page_of_large_records_is_short(ledger: Ledger) -> None:
    """However many are asked for, and each is read all the same."""
    requests = [_request(f"r{i}") for i in range(4)]
    await ledger.accept(requests)
    for request in requests:
        large = _record(request).model_copy(update={"metadata": {"text": "x" * (PAGE_SIZE // 2)}})
        await ledger.finish(large)
    first = await ledger.finished(None, 0, 100)
    rest = await ledger.finished(None, first[-1].cursor, 100)
    assert [decode_rollout(d.record).rollout_id for d in first + rest] == [f"r{i}" for i in range(4)]
    assert len(first) == 2


async def acknowledged_records_are_let_go(ledger: Ledger) -> None:
    """They leave the stream, and their ids stay idempotent; pending rollouts and other runs are not touched."""
    requests = [_request(f"r{i}", run_id=f"run{i % 2}", group_id="g") for i in range(6)]
    await ledger.accept(requests)
    cursors = [await ledger.finish(_record(request)) for request in requests[:5]]
    assert await ledger.acknowledge("run0", cursors[2] or 0) == 2
    assert await ledger.acknowledge("run0", cursors[2] or 0) == 0
    assert [decode_rollout(d.record).rollout_id for d in await ledger.finished(None, 0, 10)] == ["r1", "r3", "r4"]
    await _refused(ledger.get("r0"), GoneError)
    assert [a.duplicate for a in await ledger.accept([requests[0]])] == [True]
    await _refused(ledger.accept([_request("r0", task={"other": 1})]), ConflictError)
    assert await ledger.finish(_record(requests[0])) is None
    await _refused(ledger.begin("r0"), ConflictError)
    assert await ledger.requests(["r0", "r1"]) == [requests[1]]
    assert [m.released for m in await ledger.members("run0")] == [True, True, False]
    usage = await ledger.usage()
    assert (usage.pending, usage.kept, usage.released, usage.full) == (1, 3, 2, False)
    assert await ledger.acknowledge(None, 10**30) == 3
    assert [job.request.rollout_id for job in await ledger.pending()] == ["r5"]


async def an_acknowledgement_covers_nothing_that_ends_later(ledger: Ledger) -> None:
    """A cursor ahead of the stream is no promise about records that nobody has seen."""
    await ledger.accept([_request("r0"), _request("r1")])
    await ledger.finish(_record(_request("r0")))
    assert await ledger.acknowledge("default", 10**6) == 1
    await ledger.finish(_record(_request("r1")))
    assert [decode_rollout(d.record).rollout_id for d in await ledger.finished("default", 0, 10)] == ["r1"]
    assert isinstance(await ledger.get("r1"), Rollout)


async def stamps_of_the_wall_clock_release_nothing(ledger: Ledger) -> None:
    """How old a record is does not depend on the times that stand in it: clocks jump."""
    requests = [_request("old"), _request("future"), _request("pending")]
    await ledger.accept(requests)
    await ledger.finish(_record(requests[0], finished_at=time.time() - 400 * 86400))
    await ledger.finish(_record(requests[1], finished_at=time.time() + 400 * 86400))
    assert await ledger.collect() == 0
    assert isinstance(await ledger.get("old"), Rollout)
    assert isinstance(await ledger.get("future"), Rollout)


async def versions_are_remembered(ledger: Ledger) -> None:
    """The last version of each pool stands."""
    assert await ledger.versions() == {}
    for pool, version in (("policy", 3), ("other", 2**62), ("policy", 4)):
        await ledger.set_version(pool, version)
    assert await ledger.versions() == {"policy": 4, "other": 2**62}


async def demands_are_remembered(ledger: Ledger) -> None:
    """The last demand of a run stands; without one its rollouts are all wanted again."""
    first = Demand(groups=8, max_staleness=2, early_stop=EarlyStop(audit=0.1))
    await ledger.set_demand("a", first)
    await ledger.set_demand("b", Demand(groups=0))
    assert await ledger.demands() == {"a": first, "b": Demand(groups=0)}
    await ledger.set_demand("a", Demand(groups=4, after=17))
    await ledger.set_demand("b", None)
    await ledger.set_demand("nobody", None)
    assert await ledger.demands() == {"a": Demand(groups=4, after=17)}


async def numbers_without_end_are_no_trouble(ledger: Ledger) -> None:
    """JSON's integers have no end, those of a database do."""
    await ledger.accept([_request("r0", group_size=10**30, replica=10**29, group_id="g")])
    await ledger.finish(_record(_request("r0", group_id="g"), segments=[_segment([10**30])]))
    (member,) = await ledger.members()
    assert (member.oldest_version or 0) >= 2**62
    assert await ledger.finished(None, 10**30, 10) == []


async def closed_is_closed(ledger: Ledger) -> None:
    """After ``close`` every call says so; closing again is harmless."""
    await ledger.accept([_request("r0")])
    await ledger.close()
    await ledger.close()
    await _refused(ledger.accept([_request("r1")]), ShuttingDownError)
    await _refused(ledger.get("r0"), ShuttingDownError)


CHECKS: list[Check] = [
    accepted_is_pending_and_readable,
    same_body_is_a_duplicate,
    other_body_refuses_the_whole_batch,
    a_task_that_is_not_json_is_refused,
    first_terminal_record_stands,
    attempts_are_unique_and_counted,
    the_end_of_an_earlier_attempt_ends_nothing,
    what_was_cancelled_gets_no_other_record,
    an_attempt_that_is_open_is_lost_to_the_next,
    what_is_accepted_may_begin_at_once,
    recover_closes_open_attempts,
    withdrawn_attempts_are_forgotten,
    jobs_keep_the_order_asked_for,
    the_stream_resumes_after_its_cursor,
    records_survive_broken_text,
    defaults_written_out_are_the_same_body,
    members_tell_what_a_group_is_judged_by,
    members_come_page_by_page_in_both_directions,
    a_page_of_large_records_is_short,
    acknowledged_records_are_let_go,
    an_acknowledgement_covers_nothing_that_ends_later,
    stamps_of_the_wall_clock_release_nothing,
    demands_are_remembered,
    versions_are_remembered,
    numbers_without_end_are_no_trouble,
    closed_is_closed,
]


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
    segments: Sequence[Segment] = (),
    finished_at: float | None = None,
    attempt: int = 0,
) -> Rollout:
    outcome = outcome or Outcome(status="completed")
    return Rollout(
        rollout_id=request.rollout_id,
        attempt=attempt,
        run_id=request.run_id,
        group_id=request.group_id,
        group_size=request.group_size,
        replica=request.replica,
        environment=request.environment,
        outcome=outcome,
        score=Score(reward=reward) if outcome.status in ("completed", "truncated") else None,
        segments=list(segments),
        settings=resolve(RolloutSettings(mask_overlong=(masking,))) if masking else None,
        accepted_at=time.time(),
        finished_at=time.time() if finished_at is None else finished_at,
    )


async def _refused(call: Awaitable[object], kind: type[Exception]) -> None:
    try:
        await call
    except kind:
        return
    raise AssertionError(f"expected {kind.__name__}")
