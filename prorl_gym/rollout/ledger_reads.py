"""What the ledger's tables tell, as the service reads it. In the writer thread, inside a transaction."""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from pydantic_core import from_json

from prorl_gym.demand import Demand
from prorl_gym.errors import Cause, Evidence, FailureKind
from prorl_gym.records import Identifier, Outcome, Retry, Rollout, RolloutRequest
from prorl_gym.rollout.encoding import (
    checksum,
    clipped,
    decode_request,
    decode_rollout,
    encode_rollout,
    unreadable,
)
from prorl_gym.rollout.ledger_complaints import gone, not_found, not_readable
from prorl_gym.rollout.protocol import PAGE_SIZE, Delivery, Job, Member

AMONG = "IN (SELECT value FROM json_each(?))"
"""A list as one parameter: the statement is the same however long it is, and stays compiled."""


class _Ended(NamedTuple):
    """An attempt that ended, as it is stored."""

    attempt: int
    kind: str
    stage: str
    message: str
    sampled_tokens: int
    seconds: float
    evidence: str | None


def job_of(
    known: RolloutRequest, body: str, attempt: int = 0, accepted_at: float = 0.0, ended: Sequence[_Ended] = ()
) -> Job:
    """Return an attempt at what is stored; one that cannot be read says so, with what is known of it otherwise."""
    try:
        return Job(request=decode_request(body), attempt=attempt, accepted_at=accepted_at, retries=_retries(ended))
    except (ValueError, RecursionError) as error:
        complaint = f"The ledger's entry cannot be read ({unreadable(error)})."
        stand_in = known.model_copy(update={"task": {}})
        return Job(request=stand_in, attempt=attempt, accepted_at=accepted_at, unreadable=complaint)


class LedgerReads:
    """Reads. Raises ``sqlite3.Error`` where the file fails; a row that makes no sense is no failure of the file."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def pending(self) -> list[Job]:
        """Return the jobs of everything without a record, oldest first."""
        return self.jobs([row[0] for row in self._db.execute(_PENDING_IDS)])

    def jobs(self, rollout_ids: Sequence[str]) -> list[Job]:
        """Return the next attempt of each id that is pending, in the order asked for."""
        rows = self._db.execute(
            "SELECT r.seq, rollout_id, run_id, group_id, environment, evaluation, attempt, accepted_at, body"
            f" FROM rollouts r LEFT JOIN bodies USING (seq) WHERE cursor IS NULL AND rollout_id {AMONG}",
            [json.dumps(rollout_ids)],
        ).fetchall()
        ended = self._ended_attempts([row[0] for row in rows])
        found: dict[str, Job] = {}
        for seq, rollout_id, run_id, group_id, environment, evaluation, attempt, accepted_at, body in rows:
            stand_in = RolloutRequest.model_construct(
                rollout_id=rollout_id,
                run_id=run_id,
                group_id=group_id,
                environment=environment,
                evaluation=bool(evaluation),
                task={},
            )
            found[rollout_id] = job_of(stand_in, body or "", attempt, accepted_at, ended.get(seq, ()))
        return [found[rollout_id] for rollout_id in rollout_ids if rollout_id in found]

    def _ended_attempts(self, seqs: Sequence[int]) -> dict[int, list[_Ended]]:
        grouped: dict[int, list[_Ended]] = {}
        rows = self._db.execute(
            "SELECT seq, attempt, kind, stage, message, sampled_tokens, seconds, evidence FROM attempts"
            f" WHERE seq {AMONG} ORDER BY seq, attempt",
            [json.dumps(seqs)],
        )
        for seq, *attempt in rows:
            grouped.setdefault(seq, []).append(_Ended(*attempt))
        return grouped

    def get(self, rollout_id: str) -> Rollout | RolloutRequest:
        """Return the record, or the request while there is none."""
        row = self._db.execute(
            "SELECT r.cursor, o.released_at, t.record, t.crc, b.body FROM rollouts r"
            " LEFT JOIN outcomes o ON o.cursor = r.cursor LEFT JOIN records t ON t.cursor = r.cursor"
            " LEFT JOIN bodies b ON b.seq = r.seq WHERE rollout_id = ?",
            (rollout_id,),
        ).fetchone()
        if row is None:
            raise not_found(rollout_id)
        cursor, released_at, record, crc, body = row
        if released_at is not None:
            raise gone(rollout_id)
        try:
            if cursor is None:
                return decode_request(body or "")
            if damage := damage_of(record, crc):
                raise not_readable(rollout_id, "record", damage)
            return decode_rollout(record)
        except (ValueError, RecursionError) as error:
            raise not_readable(rollout_id, "request" if cursor is None else "record", unreadable(error)) from None

    def requests(self, rollout_ids: Sequence[str]) -> list[RolloutRequest]:
        """Return the bodies of these ids, in the order asked for."""
        rows = self._db.execute(
            f"SELECT rollout_id, body FROM rollouts JOIN bodies USING (seq) WHERE rollout_id {AMONG}",
            [json.dumps(rollout_ids)],
        )
        found: dict[str, RolloutRequest] = {}
        for rollout_id, body in rows:
            with suppress(ValueError, RecursionError):  # damaged, or of another release
                found[rollout_id] = decode_request(body)
        return [found[rollout_id] for rollout_id in rollout_ids if rollout_id in found]

    def finished(self, run_id: str | None, after: int, limit: int) -> list[Delivery]:
        """Return records past a cursor, fewer where they are large. A damaged one is marked and stops no other."""
        query, values = "SELECT cursor, record, crc FROM records WHERE", ()
        among = "SELECT cursor FROM outcomes WHERE"
        if run_id is not None:
            query = (
                "SELECT cursor, record, crc FROM outcomes LEFT JOIN records USING (cursor) WHERE released_at IS NULL"
            )
            query, among, values = f"{query} AND run_id = ? AND", f"{among} run_id = ? AND", (run_id,)
        rest = "cursor > ? ORDER BY cursor LIMIT ?"
        try:
            return _page(map(self._delivery, self._db.execute(f"{query} {rest}", (*values, clipped(after), limit))))
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_CORRUPT:
                raise
        cursors = self._db.execute(
            f"{among} released_at IS NULL AND {rest}", (*values, clipped(after), limit)
        ).fetchall()
        return _page(self._alone(cursor) for (cursor,) in cursors)

    def _alone(self, cursor: int) -> Delivery:
        """Read one record where a damaged page spoils the reading of many."""
        try:
            row = self._db.execute("SELECT cursor, record, crc FROM records WHERE cursor = ?", (cursor,)).fetchone()
        except sqlite3.DatabaseError:
            row = None
        return self._delivery(row or (cursor, None, None))

    def _delivery(self, row: tuple[int, str | None, int | None]) -> Delivery:
        cursor, record, crc = row
        if (damage := damage_of(record, crc)) or record is None:
            return Delivery(cursor, encode_rollout(self._stand_in(cursor, damage)), damage)
        return Delivery(cursor, record)

    def _stand_in(self, cursor: int, damage: str) -> Rollout:
        """Return a record that says who the rollout was whose own record is damaged."""
        rollout_id, group_id, run_id, environment, size, replica = f"damaged:{cursor}", None, "damaged", "", 1, 0
        evaluation, stands_in_for, accepted_at, finished_at = False, None, 0.0, 0.0
        with suppress(sqlite3.DatabaseError, ValueError):
            (member,) = [_member(row) for row in self._db.execute(f"{_MEMBER} WHERE o.cursor = ?", (cursor,))]
            _NAME.validate_python(member.rollout_id)
            rollout_id, run_id, group_id, environment = (
                member.rollout_id,
                member.run_id,
                member.group_id,
                member.environment,
            )
            size, replica, evaluation = member.group_size, member.replica, member.evaluation
            stands_in_for, accepted_at, finished_at = member.stands_in_for, member.accepted_at, member.finished_at
        message = f"Its record in the ledger's file is damaged ({damage}); how it ended cannot be read."
        return Rollout.model_construct(
            rollout_id=rollout_id,
            run_id=run_id,
            group_id=group_id,
            group_size=size,
            replica=replica,
            environment=environment,
            evaluation=evaluation,
            stands_in_for=stands_in_for,
            outcome=Outcome(status="failed", kind=FailureKind.INTERNAL, message=message),
            accepted_at=accepted_at,
            finished_at=finished_at,
        )

    def members(
        self,
        run_id: str | None,
        groups: Sequence[str] | None,
        after: int,
        limit: int,
        newest_first: bool,
    ) -> list[Member]:
        """Return what is kept of finished rollouts beside their records."""
        where: list[str] = []
        values: list[object] = []
        if run_id is not None:
            # With groups, their index is the one to use: it finds the few rows that are asked for.
            where.append("o.run_id = ?" if groups is None else "+o.run_id = ?")
            values.append(run_id)
        if groups is not None:
            where.append(f"o.group_id {AMONG}")
            values.append(json.dumps(groups))
        if after > 0 or not newest_first:
            where.append("o.cursor < ?" if newest_first else "o.cursor > ?")
            values.append(clipped(after))
        rows = self._db.execute(
            f"{_MEMBER} WHERE {' AND '.join(where) or 'TRUE'}"
            f" ORDER BY o.cursor {'DESC' if newest_first else 'ASC'} LIMIT ?",
            (*values, clipped(limit)),
        )
        return [_member(row) for row in rows]

    def versions(self) -> dict[str, int]:
        """Return what the engines of each pool serve."""
        return dict(self._db.execute("SELECT pool, version FROM versions"))

    def demands(self) -> dict[str, Demand | ValueError]:
        """Return what is remembered, by run; what cannot be read as the complaint about it."""
        found: dict[str, Demand | ValueError] = {}
        for run_id, text in self._db.execute("SELECT run_id, demand FROM demands ORDER BY run_id"):
            try:
                found[run_id] = Demand.model_validate_json(text)
            except ValueError as error:
                found[run_id] = error
        return found


def damage_of(record: str | None, crc: int | None) -> str:
    """Return what is wrong with a stored record; empty when nothing is.

    One without a checksum, of an earlier release, has to be JSON.
    """
    if record is None:
        return "it is missing"
    if crc is not None:
        return "" if checksum(record) == crc else "its checksum is wrong"
    try:
        from_json(record)
    except ValueError:
        return "it is not JSON"
    return ""


def _page(deliveries: Iterable[Delivery]) -> list[Delivery]:
    page: list[Delivery] = []
    size = 0
    for delivery in deliveries:
        page.append(delivery)
        size += len(delivery.record)
        if size >= PAGE_SIZE:
            break
    return page


_NAME = TypeAdapter[str](Identifier)

_MEMBER = """
SELECT o.cursor, r.rollout_id, r.run_id, r.group_id, r.group_size, r.replica, r.environment, r.evaluation,
    r.stands_in_for, o.status, o.detail, o.cause, o.reward, o.masked, o.oldest_version, o.turns, o.sampled_tokens,
    r.accepted_at, o.finished_at, o.released_at IS NOT NULL
FROM outcomes o JOIN rollouts r USING (seq)
"""


def _member(row: Sequence[Any]) -> Member:
    cursor, rollout_id, run_id, group_id, group_size, replica, environment, evaluation, stands_in_for, *rest = row
    status, detail, cause, reward, masked, oldest, turns, sampled_tokens, accepted_at, finished_at, released = rest
    return Member(
        cursor=cursor,
        rollout_id=rollout_id,
        run_id=run_id,
        group_id=group_id,
        group_size=group_size,
        replica=replica,
        environment=environment,
        evaluation=bool(evaluation),
        stands_in_for=stands_in_for,
        status=status,
        detail=detail,
        cause=Cause(cause) if cause in set(Cause) else None,
        reward=reward,
        masked=bool(masked),
        oldest_version=oldest,
        turns=turns,
        sampled_tokens=sampled_tokens,
        accepted_at=accepted_at,
        finished_at=finished_at,
        released=bool(released),
    )


_PENDING_IDS = "SELECT rollout_id FROM rollouts WHERE cursor IS NULL ORDER BY seq"


def _retries(ended: Sequence[_Ended]) -> tuple[Retry, ...]:
    return tuple(
        Retry(
            attempt=one.attempt,
            kind=FailureKind(one.kind),
            stage=one.stage,
            message=one.message,
            sampled_tokens=one.sampled_tokens,
            seconds=one.seconds,
            evidence=Evidence(one.evidence) if one.evidence in set(Evidence) else None,
        )
        for one in ended
    )
