"""The ledger's statements, synchronous: all of this runs in the ledger's one writer thread, inside a transaction.

What the service does for every rollout (accept, begin, finish) takes the calls of many callers at once and answers
each: a statement per batch instead of one per rollout, since every statement makes the writer wait for Python's
lock, which it shares with the event loop. A refused call is answered with the exception, and writes nothing.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prorl_gym.client.wire_models import AcceptedRollout
from prorl_gym.errors import CancelReason, ConflictError, FailureKind, NotFoundError, ProrlError
from prorl_gym.records import Retry, Rollout, RolloutRequest
from prorl_gym.rollout.ledger.analysis import LedgerAnalysis
from prorl_gym.rollout.ledger.encoding import body_hash, checksum, clamp_int64, replace_surrogates
from prorl_gym.rollout.ledger.ledger_config import CancelledRolloutError, LedgerFullError
from prorl_gym.rollout.ledger.queries import IN_JSON_LIST, LedgerQueries, job_of, not_found_error
from prorl_gym.rollout.ledger.sql_schema import outcome_row
from prorl_gym.rollout.ledger.turn_table import TurnTable
from prorl_gym.rollout.protocol import Job, RecoveredRollout, TurnEnded

_ROWS = (32, 16, 8, 4, 2, 1)
"""Rows of one INSERT: few sizes, so that few statements are compiled."""


@dataclass(frozen=True, slots=True)
class RequestBody:
    """A request on its way into the ledger."""

    request: RolloutRequest
    text: str

    @property
    def digest(self) -> str:
        """The hash by which it is recognised: the same row may be sent from another file."""
        if not self.request.row_source:
            return body_hash(self.text)
        return body_hash(self.request.model_copy(update={"row_source": ""}).to_json(canonical=True))

    def first_job(self, accepted_at: float) -> Job:
        """Return its first attempt, as it would be read from the file."""
        return job_of(lambda: self.request, self.text, accepted_at=accepted_at)


@dataclass(frozen=True, slots=True)
class Batch:
    """What comes in one call, all or nothing."""

    bodies: tuple[RequestBody, ...]
    begin_new: bool
    """The first attempt at what is new begins at once."""

    @classmethod
    def from_requests(cls, requests: Sequence[RolloutRequest], *, begin_new: bool) -> "Batch":
        """Encode it.

        Raises:
            TaskError: a task is not JSON.
        """
        return cls(tuple(RequestBody(request, request.to_json(canonical=True)) for request in requests), begin_new)


@dataclass(frozen=True, slots=True)
class _NewRequest:
    """A request that is new to the ledger."""

    body: RequestBody
    digest: str
    begin_now: bool


@dataclass(frozen=True, slots=True)
class LedgerCounters:
    """What is known without asking the file: the last numbers given out, and how many rollouts there are."""

    seq: int
    cursor: int
    pending: int
    kept: int
    released: int


class LedgerStore:
    """Writes to the tables. Raises ``sqlite3.Error`` where the file fails.

    Args:
        connection: to the open file.
        clock: seconds by which ages are measured (``LedgerClock``).
        free_bytes: bytes that may still be written before the disk budget is used up.
    """

    def __init__(
        self, connection: sqlite3.Connection, clock: Callable[[], float], free_bytes: Callable[[], int]
    ) -> None:
        self._db = connection
        self.queries = LedgerQueries(connection)
        self.analysis = LedgerAnalysis(connection)
        self._turns = TurnTable(connection)
        self._clock = clock
        self._free_bytes = free_bytes
        self.counters = _read_counters(connection)
        """What is rolled back in the file has to be put back here."""

    @property
    def total_changes(self) -> int:
        """How many rows were written since the file was opened."""
        return self._db.total_changes

    def add_batches(self, batches: Sequence[Batch]) -> list[tuple[list[AcceptedRollout], list[Job]] | ProrlError]:
        """Insert what is new of each batch; nothing of a batch with an id that has another body."""
        ids = [body.request.rollout_id for batch in batches for body in batch.bodies]
        known: dict[str, str] = dict(
            self._db.execute(
                f"SELECT rollout_id, body_hash FROM rollouts WHERE rollout_id {IN_JSON_LIST}", [json.dumps(ids)]
            )
        )
        room = self._free_bytes()
        fresh: list[_NewRequest] = []
        answers: list[tuple[list[AcceptedRollout], list[Job]] | ProrlError] = []
        now = time.time()
        for batch in batches:
            new: dict[str, _NewRequest] = {}
            answer = _find_new(batch, known, new)
            size = sum(len(one.body.text) for one in new.values())
            if new and size > room and not isinstance(answer, ProrlError):
                answer = LedgerFullError(
                    "The ledger's disk budget (ledger.budget_bytes) is used up; what was accepted goes on.",
                    "Acknowledge records that were used, run 'prorl-gym gc' on a stopped service's ledger, or raise the"
                    " budget.",
                )
            if isinstance(answer, ProrlError):
                answers.append(answer)
                continue
            answers.append((answer, [one.body.first_job(now) for one in new.values()] if batch.begin_new else []))
            room -= size
            fresh += new.values()
            known.update((rollout_id, one.digest) for rollout_id, one in new.items())
        self._insert(fresh, now)
        return answers

    def _insert(self, fresh: Sequence["_NewRequest"], now: float) -> None:
        numbers = self.counters
        self.counters = replace(numbers, seq=numbers.seq + len(fresh), pending=numbers.pending + len(fresh))
        rows: list[list[object]] = []
        bodies: list[list[object]] = []
        for seq, new in enumerate(fresh, numbers.seq + 1):
            one = new.body.request
            rows.append(
                [
                    seq,
                    one.rollout_id,
                    one.run_id,
                    one.group_id,
                    clamp_int64(one.group_size),
                    clamp_int64(one.replica),
                    replace_surrogates(one.environment),
                    int(one.evaluation),
                    one.stands_in_for,
                    now,
                    new.digest,
                    int(new.begin_now),
                    0 if new.begin_now else None,
                ]
            )
            bodies.append([seq, new.body.text])
        columns = "seq, rollout_id, run_id, group_id, group_size, replica, environment, evaluation, stands_in_for"
        self._insert_rows(f"INSERT INTO rollouts ({columns}, accepted_at, body_hash, attempt, begun)", rows)
        self._insert_rows("INSERT INTO bodies", bodies)

    def _insert_rows(self, insert: str, rows: Sequence[Sequence[object]]) -> None:
        start = 0
        for size in _ROWS:
            while len(rows) - start >= size:
                one = f"({','.join('?' * len(rows[0]))})"
                values = [value for row in rows[start : start + size] for value in row]
                self._db.execute(f"{insert} VALUES {','.join([one] * size)}", values)
                start += size

    def recover(self, *, keep_open: bool) -> list[RecoveredRollout]:
        """Close the attempts of a service that is gone, unless ``keep_open``; then list what is pending."""
        if not keep_open:
            self._db.execute(
                f"INSERT INTO attempts SELECT seq, begun, {_RESTARTED_ATTEMPT} FROM rollouts WHERE cursor IS NULL AND "
                f"begun IS NOT NULL"
            )
            self._db.execute("UPDATE rollouts SET begun = NULL WHERE cursor IS NULL AND begun IS NOT NULL")
        ended = {
            seq: (failures, restarts)
            for seq, failures, restarts in self._db.execute(
                "SELECT seq, sum(kind NOT IN (?1, ?2)), sum(kind IN (?1, ?2)) FROM attempts JOIN rollouts USING (seq)"
                " WHERE cursor IS NULL GROUP BY seq",
                (FailureKind.SERVICE_RESTARTED.value, FailureKind.NODE_LOST.value),
            )
        }
        nothing = (0, 0)
        return [
            RecoveredRollout(
                rollout_id,
                run_id,
                group_id,
                environment,
                bool(evaluation),
                group_size,
                replica,
                stands_in_for,
                *ended.get(seq, nothing),
                None if cancel is None else parse_cancel_reason(cancel),
                begun,
            )
            for (
                seq,
                rollout_id,
                run_id,
                group_id,
                environment,
                evaluation,
                group_size,
                replica,
                stands_in_for,
                cancel,
                begun,
            ) in self._pending_rows()
        ]

    def _pending_rows(self) -> list[tuple[Any, ...]]:
        query = (
            "SELECT seq, rollout_id, run_id, group_id, environment, evaluation, group_size, replica, stands_in_for,"
            " cancel, begun FROM rollouts WHERE cursor IS NULL ORDER BY seq"
        )
        tolerant = self._db.text_factory
        self._db.text_factory = str  # half the time, where there are a hundred thousand
        try:
            return self._db.execute(query).fetchall()
        except sqlite3.OperationalError:  # a damaged text
            self._db.text_factory = tolerant
            return self._db.execute(query).fetchall()
        finally:
            self._db.text_factory = tolerant

    def begin_attempts(self, rollout_ids: Sequence[str]) -> list[Job | ProrlError]:
        """Begin the next attempt of each, and move its counter past it."""
        if len(set(rollout_ids)) < len(rollout_ids):  # each of them is given a number of its own
            return [answer for rollout_id in rollout_ids for answer in self.begin_attempts([rollout_id])]
        rows = self._progress(rollout_ids)
        for row in rows.values():
            if row.begun is not None and not row.finished:  # two cannot run: the service that had it is gone
                self._db.execute(f"INSERT INTO attempts SELECT ?, ?, {_RESTARTED_ATTEMPT}", (row.seq, row.begun))
                self._db.execute("UPDATE rollouts SET begun = NULL WHERE seq = ?", (row.seq,))
        jobs = {job.request.rollout_id: job for job in self.queries.next_jobs(rollout_ids)}
        for rollout_id, turns in self._turns.read(list(jobs)).items():
            jobs[rollout_id] = jobs[rollout_id].model_copy(update={"turns": turns})
        begun = [rows[rollout_id].seq for rollout_id, job in jobs.items() if not job.unreadable_reason]
        update = "UPDATE rollouts SET begun = attempt, attempt = attempt + 1 WHERE seq"
        self._db.execute(f"{update} {IN_JSON_LIST}", [json.dumps(begun)])
        return [
            jobs.get(rollout_id)
            or (
                ConflictError(f"rollout {rollout_id} is finished: no attempt at it can begin.")
                if rollout_id in rows
                else not_found_error(rollout_id)
            )
            for rollout_id in rollout_ids
        ]

    def _progress(self, rollout_ids: Sequence[str]) -> dict[str, "_RolloutRow"]:
        rows = self._db.execute(
            "SELECT rollout_id, seq, run_id, group_id, attempt, begun, cancel, cursor IS NOT NULL FROM rollouts"
            f" WHERE rollout_id {IN_JSON_LIST}",
            [json.dumps(rollout_ids)],
        )
        return {row[0]: _RolloutRow(*row[1:]) for row in rows}

    def withdraw_attempts(self, rollout_ids: Sequence[str]) -> None:
        """Forget the attempts that have not ended."""
        update = "UPDATE rollouts SET begun = NULL WHERE cursor IS NULL AND rollout_id"
        self._db.execute(f"{update} {IN_JSON_LIST}", [json.dumps(rollout_ids)])

    def log_turns(self, turns: Sequence[TurnEnded]) -> list[None]:
        """Keep whole turns."""
        for ended in turns if self._free_bytes() > 0 else ():
            self._turns.add(ended)
        return [None] * len(turns)

    def fail_attempt(self, rollout_id: str, retry: Retry) -> None:
        """Note how an attempt ended."""
        row = self._progress([rollout_id]).get(rollout_id)
        if row is None or row.begun != retry.attempt:
            raise NotFoundError(f"rollout {rollout_id}: attempt {retry.attempt} has not begun.")
        self._db.execute(
            "INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row.seq,
                retry.attempt,
                retry.kind.value,
                replace_surrogates(retry.stage),
                replace_surrogates(retry.message),
                retry.sampled_tokens,
                retry.seconds,
                retry.evidence and retry.evidence.value,
            ),
        )
        self._db.execute("UPDATE rollouts SET begun = NULL WHERE seq = ?", (row.seq,))
        self._turns.delete_unless_added(row.seq, retry.attempt)

    def finish(self, records: Sequence[tuple[Rollout, str]]) -> list[int | ProrlError | None]:
        """Write the terminal records of those that have none."""
        rows = self._progress([rollout.rollout_id for rollout, _ in records])
        numbers = self.counters
        outcomes: list[list[object]] = []
        texts: list[list[object]] = []
        seqs: list[int] = []
        answers: list[int | ProrlError | None] = []
        now = self._clock()
        for rollout, record in records:
            row = rows.get(rollout.rollout_id)
            if row is None or row.finished:
                answers.append(not_found_error(rollout.rollout_id) if row is None else None)
                continue
            # An end without an attempt (a cancel before the first) has the number of the next one.
            if rollout.attempt < row.attempt and rollout.attempt != row.begun:
                late = f"rollout {rollout.rollout_id}: attempt {rollout.attempt} is over, and its end comes too late."
                answers.append(ConflictError(late, "Only the attempt that runs can end the rollout."))
                continue
            if row.cancel is not None and rollout.outcome.status != "cancelled":
                answers.append(CancelledRolloutError(rollout.rollout_id, parse_cancel_reason(row.cancel)))
                continue
            row.finished = True
            seqs.append(row.seq)
            cursor = numbers.cursor + len(seqs)
            outcomes.append(outcome_row(cursor, row.seq, row.run_id, row.group_id, rollout, now))
            texts.append([cursor, record, checksum(record)])
            answers.append(cursor)
        if seqs:
            self.counters = replace(
                numbers,
                cursor=numbers.cursor + len(seqs),
                pending=numbers.pending - len(seqs),
                kept=numbers.kept + len(seqs),
            )
            self._insert_rows("INSERT INTO outcomes", outcomes)
            self._insert_rows("INSERT INTO records", texts)
            self._db.execute(
                "UPDATE rollouts SET cursor = ? + v.key FROM json_each(?) v WHERE rollouts.seq = v.value",
                (numbers.cursor + 1, json.dumps(seqs)),
            )
            self._turns.delete(seqs)
        return answers

    def cancel(self, rollout_ids: Sequence[str], reason: CancelReason) -> list[str]:
        """Note the cancel of those without a record and return them; the first reason is kept."""
        update = "UPDATE rollouts SET cancel = coalesce(cancel, ?) WHERE cursor IS NULL AND rollout_id"
        rows = self._db.execute(
            f"{update} {IN_JSON_LIST} RETURNING rollout_id", (reason.value, json.dumps(rollout_ids))
        )
        noted = {row[0] for row in rows}
        return [rollout_id for rollout_id in dict.fromkeys(rollout_ids) if rollout_id in noted]


@dataclass(slots=True)
class _RolloutRow:
    seq: int
    run_id: str
    group_id: str | None
    attempt: int
    """The next one's number."""
    begun: int | None
    cancel: str | None
    finished: bool


_RESTARTED_ATTEMPT = f"'{FailureKind.SERVICE_RESTARTED.value}', 'unknown', 'the service was restarted', 0, 0.0, NULL"
"""Kind, stage, message, tokens, seconds and evidence of an attempt of which nothing is known."""


def parse_cancel_reason(text: str) -> CancelReason:
    """Read a stored reason; a damaged one counts as the client's."""
    return CancelReason(text) if text in set(CancelReason) else CancelReason.CLIENT


def _read_counters(db: sqlite3.Connection) -> LedgerCounters:
    total, seq = db.execute("SELECT count(*), coalesce(max(seq), 0) FROM rollouts").fetchone()
    ended, cursor = db.execute("SELECT count(*), coalesce(max(cursor), 0) FROM outcomes").fetchone()
    (released,) = db.execute("SELECT count(*) FROM outcomes WHERE released_at IS NOT NULL").fetchone()
    (last,) = db.execute("SELECT last_cursor FROM marks").fetchone()
    return LedgerCounters(seq, max(cursor, last), total - ended, ended - released, released)


def _find_new(
    batch: Batch, known: dict[str, str], new: dict[str, _NewRequest]
) -> list[AcceptedRollout] | ConflictError:
    """Collect what is new in a batch; return an error if an id has another body."""
    answers: list[AcceptedRollout] = []
    for body in batch.bodies:
        rollout_id, digest = body.request.rollout_id, body.digest
        accepted = known.get(rollout_id) or (new[rollout_id].digest if rollout_id in new else None)
        if accepted is None:
            new[rollout_id] = _NewRequest(body, digest, batch.begin_new)
        elif accepted != digest:
            what = f"rollout {rollout_id} was submitted before with another body."
            return ConflictError(what, "Send the same body again, or use a fresh rollout_id.")
        answers.append(AcceptedRollout(rollout_id=rollout_id, duplicate=accepted is not None))
    return answers
