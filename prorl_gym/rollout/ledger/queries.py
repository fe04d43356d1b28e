"""Reads of the ledger's tables. In the writer thread, inside a transaction."""

import json
import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from prorl_gym.client.wire_models import RolloutSummary
from prorl_gym.demand import Demand
from prorl_gym.errors import Cause, Evidence, FailureKind, GoneError, NotFoundError
from prorl_gym.records import Identifier, Outcome, Retry, Rollout, RolloutRequest
from prorl_gym.rollout.ledger.encoding import (
    checksum,
    clamp_int64,
    decode_request,
    describe_decode_error,
    encode_rollout,
)
from prorl_gym.rollout.ledger.ledger_config import UnreadableRecordError
from prorl_gym.rollout.protocol import PAGE_CHARS, Delivery, Job

_LOG = logging.getLogger(__name__)

IN_JSON_LIST = "IN (SELECT value FROM json_each(?))"
"""A list as one parameter: the statement is the same however long it is, and stays compiled."""


def job_of(
    identify: Callable[[], RolloutRequest],
    body: str,
    attempt: int = 0,
    accepted_at: float = 0.0,
    ended: Sequence[Mapping[str, Any]] = (),
) -> Job:
    """Return an attempt at what is stored, after earlier ones; one that cannot be read has ``unreadable_reason``.

    ``identify`` returns a request with the rollout's identity; called only where the stored ``body`` cannot be read.
    """
    try:
        retries = tuple(Retry.model_validate(one) for one in ended)
        return Job(request=decode_request(body), attempt=attempt, accepted_at=accepted_at, retries=retries)
    except (ValueError, RecursionError) as error:
        complaint = f"The ledger's entry cannot be read ({describe_decode_error(error)})."
        placeholder = identify().model_copy(update={"task": {}})
        return Job(request=placeholder, attempt=attempt, accepted_at=accepted_at, unreadable_reason=complaint)


class LedgerQueries:
    """Reads. Raises ``sqlite3.Error`` where the file fails; a row that makes no sense is no failure of the file."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def pending_jobs(self) -> list[Job]:
        """Return every rollout without a terminal record, oldest first, with the attempt to make next."""
        pending = self._db.execute("SELECT rollout_id FROM rollouts WHERE cursor IS NULL ORDER BY seq")
        return self.next_jobs([row[0] for row in pending])

    def next_jobs(self, rollout_ids: Sequence[str]) -> list[Job]:
        """Return the next attempt of each pending one, in this order. What cannot be read has ``unreadable_reason``."""
        rows = self._db.execute(
            "SELECT r.seq, rollout_id, run_id, group_id, environment, evaluation, attempt, accepted_at, body"
            f" FROM rollouts r LEFT JOIN bodies USING (seq) WHERE cursor IS NULL AND rollout_id {IN_JSON_LIST}",
            [json.dumps(rollout_ids)],
        ).fetchall()
        ended: dict[int, list[dict[str, Any]]] = {}
        for seq, *values, evidence in self._db.execute(
            f"SELECT seq, {', '.join(_RETRY_FIELDS)} FROM attempts WHERE seq {IN_JSON_LIST} ORDER BY seq, attempt",
            [json.dumps([row[0] for row in rows])],
        ):
            known = Evidence(evidence) if evidence in set(Evidence) else None
            ended.setdefault(seq, []).append(dict(zip(_RETRY_FIELDS, (*values, known), strict=True)))
        found: dict[str, Job] = {}
        for seq, rollout_id, run_id, group_id, environment, evaluation, attempt, accepted_at, body in rows:
            identify = partial(
                RolloutRequest.model_construct,
                rollout_id=rollout_id,
                run_id=run_id,
                group_id=group_id,
                environment=environment,
                evaluation=bool(evaluation),
                task={},
            )
            found[rollout_id] = job_of(identify, body or "", attempt, accepted_at, ended.get(seq, ()))
        return [found[rollout_id] for rollout_id in rollout_ids if rollout_id in found]

    def get(self, rollout_id: str) -> Rollout | RolloutRequest:
        """Return the record, or the request. Raises ``NotFoundError``, ``GoneError`` or ``UnreadableRecordError``."""
        row = self._db.execute(
            "SELECT r.cursor, o.released_at, t.record, t.crc, b.body FROM rollouts r"
            " LEFT JOIN outcomes o ON o.cursor = r.cursor LEFT JOIN records t ON t.cursor = r.cursor"
            " LEFT JOIN bodies b ON b.seq = r.seq WHERE rollout_id = ?",
            (rollout_id,),
        ).fetchone()
        if row is None:
            raise not_found_error(rollout_id)
        cursor, released_at, record, crc, body = row
        if released_at is not None:
            raise GoneError(
                f"rollout {rollout_id} is finished; its record was acknowledged or expired, and is not kept any more.",
                "Acknowledge records only once they are used; the others are kept for ledger.keep_days.",
            )
        try:
            if cursor is None:
                return decode_request(body or "")
            if damage := damage_of(record, crc):
                raise _unreadable_error(rollout_id, "record", damage)
            return Rollout.model_validate_json(record)
        except (ValueError, RecursionError) as error:
            raise _unreadable_error(
                rollout_id, "request" if cursor is None else "record", describe_decode_error(error)
            ) from None

    def requests(self, rollout_ids: Sequence[str]) -> list[RolloutRequest]:
        """Return what was accepted under these ids, finished ones too; unknown and unreadable ones are left out."""
        rows = self._db.execute(
            f"SELECT rollout_id, body FROM rollouts JOIN bodies USING (seq) WHERE rollout_id {IN_JSON_LIST}",
            [json.dumps(rollout_ids)],
        )
        found: dict[str, RolloutRequest] = {}
        for rollout_id, body in rows:
            with suppress(ValueError, RecursionError):  # damaged, or of another release
                found[rollout_id] = decode_request(body)
        return [found[rollout_id] for rollout_id in rollout_ids if rollout_id in found]

    def read_records(self, run_id: str | None, after: int, limit: int) -> list[Delivery]:
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
            return _page(map(self._delivery, self._db.execute(f"{query} {rest}", (*values, clamp_int64(after), limit))))
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_CORRUPT:
                raise
        cursors = self._db.execute(
            f"{among} released_at IS NULL AND {rest}", (*values, clamp_int64(after), limit)
        ).fetchall()
        return _page(self._read_alone(cursor) for (cursor,) in cursors)

    def _read_alone(self, cursor: int) -> Delivery:
        """Read one record where a damaged page spoils the reading of many."""
        try:
            row = self._db.execute("SELECT cursor, record, crc FROM records WHERE cursor = ?", (cursor,)).fetchone()
        except sqlite3.DatabaseError:
            row = None
        return self._delivery(row or (cursor, None, None))

    def _delivery(self, row: tuple[int, str | None, int | None]) -> Delivery:
        cursor, record, crc = row
        if (damage := damage_of(record, crc)) or record is None:
            return Delivery(cursor, encode_rollout(self._damaged_placeholder(cursor, damage)), damage)
        return Delivery(cursor, record)

    def _damaged_placeholder(self, cursor: int, damage: str) -> Rollout:
        """Return a record with the identity of a rollout whose own record is damaged."""
        identity: dict[str, Any] = {
            "rollout_id": f"damaged:{cursor}",
            "run_id": "damaged",
            "group_id": None,
            "group_size": 1,
            "replica": 0,
            "environment": "",
            "evaluation": False,
            "stands_in_for": None,
            "accepted_at": 0.0,
            "finished_at": 0.0,
        }
        with suppress(sqlite3.DatabaseError, ValueError):
            (member,) = [
                summary_of(row) for row in self._db.execute(f"{_SELECT_SUMMARY} WHERE o.cursor = ?", (cursor,))
            ]
            _IDENTIFIER.validate_python(member.rollout_id)
            identity = {name: getattr(member, name) for name in identity}
        message = f"Its record in the ledger's file is damaged ({damage}); how it ended cannot be read."
        outcome = Outcome(status="failed", kind=FailureKind.INTERNAL, message=message)
        return Rollout.model_construct(**identity, outcome=outcome)

    def summaries(
        self,
        run_id: str | None = None,
        *,
        groups: Sequence[str] | None = None,
        prefix: str | None = None,
        after: int = 0,
        limit: int = 1000,
        newest_first: bool = False,
    ) -> list[RolloutSummary]:
        """Return finished rollouts by cursor, released ones too; ``newest_first``: falling, before ``after``."""
        where: list[str] = []
        values: list[object] = []
        if run_id is not None:
            # With groups, use their index, which finds only the few rows needed; the "+" disables the other one.
            where.append("o.run_id = ?" if groups is None else "+o.run_id = ?")
            values.append(run_id)
        if groups is not None:
            where.append(f"o.group_id {IN_JSON_LIST}")
            values.append(json.dumps(groups))
        if prefix is not None:  # a range, which the index on the ids serves; no identifier has this character
            where.append("r.rollout_id >= ? AND r.rollout_id < ?")
            values += [prefix, f"{prefix}\U0010ffff"]
        if after > 0 or not newest_first:
            where.append("o.cursor < ?" if newest_first else "o.cursor > ?")
            values.append(clamp_int64(after))
        rows = self._db.execute(
            f"{_SELECT_SUMMARY} WHERE {' AND '.join(where) or 'TRUE'}"
            f" ORDER BY o.cursor {'DESC' if newest_first else 'ASC'} LIMIT ?",
            (*values, clamp_int64(limit)),
        )
        return [summary_of(row) for row in rows]

    def policy_versions(self) -> dict[str, int]:
        return dict(self._db.execute("SELECT pool, version FROM versions"))

    def demands(self) -> dict[str, Demand]:
        """Return the stored demands by run; one that this release cannot read is left out, and logged."""
        found: dict[str, Demand] = {}
        for run_id, text in self._db.execute("SELECT run_id, demand FROM demands ORDER BY run_id"):
            try:
                found[run_id] = Demand.model_validate_json(text)
            except ValueError:
                _LOG.error("the demand of run %s cannot be read: its rollouts are all made", run_id)
        return found


def not_found_error(rollout_id: str) -> NotFoundError:
    return NotFoundError(f"rollout {rollout_id} was never accepted.", "Check the rollout_id and the service's address.")


def _unreadable_error(rollout_id: str, what: str, why: str) -> UnreadableRecordError:
    return UnreadableRecordError(
        f"rollout {rollout_id}: its {what} is in the ledger and cannot be read ({why}).",
        "Upgrade prorl-gym if a newer release wrote it; otherwise the file is damaged. The stream hands records on.",
    )


def damage_of(record: str | None, crc: int | None) -> str:
    if record is None:
        return "it is missing"
    return "" if checksum(record) == crc else "its checksum is wrong"


def _page(deliveries: Iterable[Delivery]) -> list[Delivery]:
    page: list[Delivery] = []
    size = 0
    for delivery in deliveries:
        page.append(delivery)
        size += len(delivery.record)
        if size >= PAGE_CHARS:
            break
    return page


_RETRY_FIELDS = tuple(Retry.model_fields)

_IDENTIFIER = TypeAdapter[str](Identifier)

_SUMMARY_FIELDS = [field.name for field in fields(RolloutSummary)]

SUMMARY_COLUMNS = """
SELECT o.cursor, r.rollout_id, o.run_id, o.group_id, r.group_size, r.replica, r.environment, r.evaluation,
    r.stands_in_for, o.status, o.detail, o.cause, o.reward, o.masked, o.oldest_version, o.turns, o.sampled_tokens,
    r.accepted_at, o.finished_at, o.released_at IS NOT NULL AS released, o.begun_at, o.row_id, o.why
"""
"""Columns of a ``RolloutSummary``, in the order of its fields."""

_SELECT_SUMMARY = f"{SUMMARY_COLUMNS} FROM outcomes o JOIN rollouts r USING (seq)"


def summary_of(row: Sequence[Any]) -> RolloutSummary:
    """Return the summary in a row that begins with ``SUMMARY_COLUMNS``."""
    values: dict[str, Any] = dict(zip(_SUMMARY_FIELDS, row[: len(_SUMMARY_FIELDS)], strict=True))
    for name in ("evaluation", "masked", "released"):
        values[name] = bool(values[name])
    values["cause"] = Cause(values["cause"]) if values["cause"] in set(Cause) else None
    return RolloutSummary(**values)
