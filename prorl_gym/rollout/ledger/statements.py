"""The ledger's statements, synchronous: all of this runs in the ledger's one writer thread, inside a transaction.

What the service does for every rollout (accept, begin, finish) takes the calls of many callers at once and answers
each: a statement per batch instead of one per rollout, since every statement makes the writer wait for Python's
lock, which it shares with the event loop. A refused call is answered with the exception, and writes nothing.
"""

import hashlib
import json
import sqlite3
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from prorl_gym.client.wire_models import AcceptedRollout, Unacknowledged, UnacknowledgedRollout
from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, ConflictError, FailureKind, NotFoundError, ProrlError
from prorl_gym.inference.tokens.turn_log import LoggedTurn
from prorl_gym.records import Retry, Rollout, RolloutRequest
from prorl_gym.rollout.ledger.analysis import LedgerAnalysis
from prorl_gym.rollout.ledger.encoding import checksum, clamp_int64, replace_surrogates
from prorl_gym.rollout.ledger.ledger_config import CancelledRolloutError, LedgerFullError
from prorl_gym.rollout.ledger.queries import IN_JSON_LIST, LedgerQueries, job_of, not_found_error
from prorl_gym.rollout.ledger.sql_schema import outcome_row
from prorl_gym.rollout.protocol import Job, RecoveredRollout, TurnEnded

_ROWS = (32, 16, 8, 4, 2, 1)
"""Rows of one INSERT: few sizes, so that few statements are compiled."""


@dataclass(frozen=True)
class RequestBody:
    request: RolloutRequest
    text: str
    begin_now: bool
    """Its first attempt begins at once, if it is new."""

    @cached_property
    def digest(self) -> str:
        """The hash by which it is recognised: the same row may be sent from another file."""
        text = self.text
        if self.request.row_source:
            text = self.request.model_copy(update={"row_source": ""}).to_json(canonical=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()


def encode_batch(requests: Sequence[RolloutRequest], *, begin_new: bool) -> list[RequestBody]:
    """Encode the requests of one call. Raises ``TaskError``: a task is not JSON."""
    return [RequestBody(request, request.to_json(canonical=True), begin_new) for request in requests]


@dataclass(frozen=True, slots=True)
class LedgerCounters:
    """The last numbers given out, and how many rollouts there are, without asking the file."""

    seq: int
    cursor: int
    pending: int
    kept: int
    released: int


class LedgerStore(LedgerQueries):
    """Reads and writes the tables, by a ``clock`` that measures ages. Raises ``sqlite3.Error`` where the file fails."""

    def __init__(
        self, connection: sqlite3.Connection, clock: Callable[[], float], free_bytes: Callable[[], int]
    ) -> None:
        super().__init__(connection)
        self.analysis = LedgerAnalysis(connection)
        self._turns = TurnTable(connection)
        self._clock = clock
        self._free_bytes = free_bytes
        total, seq = self._db.execute("SELECT count(*), coalesce(max(seq), 0) FROM rollouts").fetchone()
        ended, cursor = self._db.execute("SELECT count(*), coalesce(max(cursor), 0) FROM outcomes").fetchone()
        (released,) = self._db.execute("SELECT count(*) FROM outcomes WHERE released_at IS NOT NULL").fetchone()
        (last,) = self._db.execute("SELECT last_cursor FROM marks").fetchone()
        self.counters = LedgerCounters(seq, max(cursor, last), total - ended, ended - released, released)
        """Must be restored after a rollback in the file."""

    @property
    def total_changes(self) -> int:
        return self._db.total_changes

    def add_batches(
        self, batches: Sequence[Sequence[RequestBody]]
    ) -> list[tuple[list[AcceptedRollout], list[Job]] | ProrlError]:
        """Insert what is new of each batch; nothing of a batch with an id that has another body."""
        ids = [body.request.rollout_id for batch in batches for body in batch]
        known: dict[str, str] = dict(
            self._db.execute(
                f"SELECT rollout_id, body_hash FROM rollouts WHERE rollout_id {IN_JSON_LIST}", [json.dumps(ids)]
            )
        )
        room = self._free_bytes()
        fresh: list[RequestBody] = []
        answers: list[tuple[list[AcceptedRollout], list[Job]] | ProrlError] = []
        now = time.time()
        for batch in batches:
            new: dict[str, RequestBody] = {}
            answer = _find_new(batch, known, new)
            size = sum(len(one.text) for one in new.values())
            if new and size > room and not isinstance(answer, ProrlError):
                answer = LedgerFullError(
                    "The ledger's disk budget (ledger.budget_bytes) is used up; what was accepted goes on.",
                    "Acknowledge records that were used, run 'prorl-gym gc' on a stopped service's ledger, or raise the"
                    " budget.",
                )
            if isinstance(answer, ProrlError):
                answers.append(answer)
                continue
            begun = [one for one in new.values() if one.begin_now]
            # As they would be read from the file.
            jobs = [job_of(lambda one=one: one.request, one.text, accepted_at=now) for one in begun]
            answers.append((answer, jobs))
            room -= size
            fresh += new.values()
            known.update((rollout_id, one.digest) for rollout_id, one in new.items())
        self._insert(fresh, now)
        return answers

    def _insert(self, fresh: Sequence["RequestBody"], now: float) -> None:
        numbers = self.counters
        self.counters = replace(numbers, seq=numbers.seq + len(fresh), pending=numbers.pending + len(fresh))
        rows: list[list[object]] = []
        bodies: list[list[object]] = []
        for seq, new in enumerate(fresh, numbers.seq + 1):
            one = new.request
            members = (clamp_int64(one.group_size), clamp_int64(one.replica))
            kind = (replace_surrogates(one.environment), int(one.evaluation))
            begun = (1, 0) if new.begin_now else (0, None)
            identity = (seq, one.rollout_id, one.run_id, one.group_id, *members, *kind, one.stands_in_for)
            rows.append([*identity, now, new.digest, *begun])
            bodies.append([seq, new.text])
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

    def recover(self, *, keep_open: bool = False) -> list[RecoveredRollout]:
        """Close the attempts that a killed service left open, as ``SERVICE_RESTARTED``; list what is pending, by age.

        Called once, before anything begins. ``keep_open`` leaves them open: nodes may still run them.
        """
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
        query = (
            "SELECT seq, cancel, begun, rollout_id, run_id, group_id, environment, evaluation, group_size,"
            " stands_in_for FROM rollouts WHERE cursor IS NULL ORDER BY seq"
        )
        tolerant = self._db.text_factory
        self._db.text_factory = str  # half the time, where there are a hundred thousand
        try:
            rows = self._db.execute(query).fetchall()
        except sqlite3.OperationalError:  # a damaged text
            self._db.text_factory = tolerant
            rows = self._db.execute(query).fetchall()
        finally:
            self._db.text_factory = tolerant
        nothing = (0, 0)
        found: list[RecoveredRollout] = []
        for seq, cancel, begun, rollout_id, run_id, group_id, environment, evaluation, *members in rows:
            identity = (rollout_id, run_id, group_id, environment, bool(evaluation), *members)
            reason = None if cancel is None else parse_cancel_reason(cancel)
            found.append(RecoveredRollout._make((*identity, *ended.get(seq, nothing), reason, begun)))
        return found

    def begin_attempts(self, rollout_ids: Sequence[str]) -> list[Job | ProrlError]:
        """Begin the next attempt of each, and move its counter past it."""
        if len(set(rollout_ids)) < len(rollout_ids):  # each of them is given a number of its own
            return [answer for rollout_id in rollout_ids for answer in self.begin_attempts([rollout_id])]
        rows = self._progress(rollout_ids)
        for row in rows.values():
            if row.begun is not None and not row.finished:  # two cannot run: the service that had it is gone
                self._db.execute(f"INSERT INTO attempts SELECT ?, ?, {_RESTARTED_ATTEMPT}", (row.seq, row.begun))
                self._db.execute("UPDATE rollouts SET begun = NULL WHERE seq = ?", (row.seq,))
        jobs = {job.request.rollout_id: job for job in self.next_jobs(rollout_ids)}
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
        """Forget the open attempts of these: a stop cut them off. Their numbers stay used."""
        update = "UPDATE rollouts SET begun = NULL WHERE cursor IS NULL AND rollout_id"
        self._db.execute(f"{update} {IN_JSON_LIST}", [json.dumps(rollout_ids)])

    def log_turns(self, turns: Sequence[TurnEnded]) -> list[None]:
        for ended in turns if self._free_bytes() > 0 else ():
            self._turns.add(ended)
        return [None] * len(turns)

    def fail_attempt(self, rollout_id: str, retry: Retry) -> None:
        """Store how an attempt ended that will be retried. The attempt must have begun."""
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
        """Store that these are cancelled, which allows no other record; return those without one.

        The first reason stays.
        """
        update = "UPDATE rollouts SET cancel = coalesce(cancel, ?) WHERE cursor IS NULL AND rollout_id"
        rows = self._db.execute(
            f"{update} {IN_JSON_LIST} RETURNING rollout_id", (reason.value, json.dumps(rollout_ids))
        )
        noted = {row[0] for row in rows}
        return [rollout_id for rollout_id in dict.fromkeys(rollout_ids) if rollout_id in noted]

    def unacknowledged(self, run_id: str | None) -> Unacknowledged:
        """Return the rollouts of a run (``None``: of all) without a record or with one that is kept, oldest first."""
        of_run = "" if run_id is None else "AND r.run_id = ?1"
        rows = self._db.execute(
            f"SELECT r.seq, rollout_id, r.run_id, 0 FROM rollouts r WHERE cursor IS NULL {of_run} UNION ALL"
            " SELECT r.seq, rollout_id, r.run_id, 1 FROM outcomes o JOIN rollouts r USING (seq)"
            f" WHERE released_at IS NULL {of_run} ORDER BY 1",
            () if run_id is None else (run_id,),
        )
        found = [
            UnacknowledgedRollout(rollout_id=rollout_id, run_id=run, finished=bool(finished))
            for _, rollout_id, run, finished in rows
        ]
        return Unacknowledged(cursor=self.counters.cursor, rollouts=tuple(found))

    def set_policy_version(self, pool: str, version: int) -> None:
        """Store which policy version the engines of a pool serve: they outlive the service."""
        self._db.execute("INSERT OR REPLACE INTO versions VALUES (?, ?)", (pool, version))

    def set_demand(self, run_id: str, demand: Demand | None) -> None:
        """Store the demand of a run; ``None`` deletes it."""
        if demand is None:
            self._db.execute("DELETE FROM demands WHERE run_id = ?", (run_id,))
        else:
            values = (run_id, demand.model_dump_json(), self._clock())
            self._db.execute("INSERT OR REPLACE INTO demands VALUES (?, ?, ?)", values)


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


def _find_new(
    batch: Sequence[RequestBody], known: dict[str, str], new: dict[str, RequestBody]
) -> list[AcceptedRollout] | ConflictError:
    """Collect what is new in a batch; return an error if an id has another body."""
    answers: list[AcceptedRollout] = []
    for body in batch:
        rollout_id, digest = body.request.rollout_id, body.digest
        accepted = known.get(rollout_id) or (new[rollout_id].digest if rollout_id in new else None)
        if accepted is None:
            new[rollout_id] = body
        elif accepted != digest:
            what = f"rollout {rollout_id} was submitted before with another body."
            return ConflictError(what, "Send the same body again, or use a fresh rollout_id.")
        answers.append(AcceptedRollout(rollout_id=rollout_id, duplicate=accepted is not None))
    return answers


MAX_TURN_BYTES = 8 << 20
"""Most bytes of one rollout's turns, compressed; later ones are not kept. About a million sampled tokens."""


class TurnTable:
    """Logged turns, from which a later attempt resumes. Where none was ever written, nothing is looked up either."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        (self._is_used,) = connection.execute("SELECT EXISTS (SELECT 1 FROM turns)").fetchone()

    def add(self, ended: TurnEnded) -> None:
        """Write a turn in place of this and all later ones. Raises ``ValueError``: it holds half a surrogate pair."""
        body = zlib.compress(ended.turn.model_dump_json().encode(), 1)
        self._is_used = True
        query = "SELECT seq FROM rollouts WHERE rollout_id = ? AND begun = ? AND cursor IS NULL"
        for (seq,) in self._db.execute(query, (ended.rollout_id, ended.attempt)).fetchall():
            self._db.execute("DELETE FROM turns WHERE seq = ? AND number >= ?", (seq, ended.number))
            self._db.execute(
                "INSERT INTO turns SELECT ?1, ?2, ?3, ?4 FROM (SELECT count(*) AS n, total(length(body)) AS bytes"
                " FROM turns WHERE seq = ?1) WHERE n = ?2 AND bytes + length(?4) <= ?5",
                (seq, ended.number, ended.attempt, body, MAX_TURN_BYTES),
            )

    def read(self, rollout_ids: Sequence[str]) -> dict[str, tuple[LoggedTurn, ...]]:
        """Return the turns of these, from the first; what follows a damaged one is left out."""
        if not self._is_used:
            return {}
        found: dict[str, list[LoggedTurn]] = {}
        query = f"SELECT rollout_id, number, body FROM turns JOIN rollouts USING (seq) WHERE rollout_id {IN_JSON_LIST}"
        for rollout_id, number, body in self._db.execute(f"{query} ORDER BY seq, number", [json.dumps(rollout_ids)]):
            turns = found.setdefault(rollout_id, [])
            if len(turns) == number:
                with suppress(ValueError, zlib.error):
                    turns.append(LoggedTurn.model_validate_json(zlib.decompress(body)))
        return {rollout_id: tuple(turns) for rollout_id, turns in found.items()}

    def delete(self, seqs: Sequence[int]) -> None:
        if self._is_used:
            self._db.execute(f"DELETE FROM turns WHERE seq {IN_JSON_LIST}", [json.dumps(seqs)])

    def delete_unless_added(self, seq: int, attempt: int) -> None:
        """Delete the turns of a rollout whose attempt failed and added none: what it resumed may be why it failed."""
        if self._is_used:
            added = "SELECT 1 FROM turns WHERE seq = ?1 AND attempt = ?2"
            self._db.execute(f"DELETE FROM turns WHERE seq = ?1 AND NOT EXISTS ({added})", (seq, attempt))
