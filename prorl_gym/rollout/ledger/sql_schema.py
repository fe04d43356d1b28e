"""The ledger's tables, and how those of earlier releases become them.

A rollout's identity and progress (``rollouts``) are small and change; how it ended (``outcomes``) is small too, and
written once. The long texts, its request (``bodies``) and its record (``records``), stand apart: a change never copies
them, and deleting one frees whole pages. What is left of a rollout then is who it was, how it ended, and the hash by
which its id stays idempotent.
"""

import sqlite3
import time
from collections.abc import Iterator

from prorl_gym.records import Rollout
from prorl_gym.rollout.ledger.encoding import (
    body_hash,
    clamp_int64,
    decode_request,
    decode_rollout,
    outcome_detail,
    replace_surrogates,
)

LEDGER_SCHEMA = 6
"""Version of the tables. A newer one is refused: its meaning is not known here."""

_TURNS = """CREATE TABLE turns (
        seq INTEGER NOT NULL,
        number INTEGER NOT NULL,            -- from 0, without gaps
        attempt INTEGER NOT NULL,           -- that sampled it
        body BLOB NOT NULL,                 -- compressed JSON
        PRIMARY KEY (seq, number)
    ) STRICT"""

_TABLES = (
    """CREATE TABLE rollouts (
        seq INTEGER PRIMARY KEY,
        rollout_id TEXT NOT NULL UNIQUE,
        run_id TEXT NOT NULL,
        group_id TEXT,
        group_size INTEGER NOT NULL,
        replica INTEGER NOT NULL,
        environment TEXT NOT NULL,
        evaluation INTEGER NOT NULL,
        stands_in_for TEXT,
        accepted_at REAL NOT NULL,
        body_hash TEXT NOT NULL,
        attempt INTEGER NOT NULL DEFAULT 0, -- the next one's number
        begun INTEGER,                      -- the number of the one that runs
        cancel TEXT,
        cursor INTEGER                      -- of its outcome; NULL: pending
    ) STRICT""",
    "CREATE INDEX pending ON rollouts (seq) WHERE cursor IS NULL",
    "CREATE TABLE bodies (seq INTEGER PRIMARY KEY, body TEXT NOT NULL) STRICT",
    """CREATE TABLE outcomes (
        cursor INTEGER PRIMARY KEY,
        seq INTEGER NOT NULL,
        run_id TEXT NOT NULL,
        group_id TEXT,
        status TEXT NOT NULL,
        detail TEXT NOT NULL,
        cause TEXT,
        reward REAL,
        masked INTEGER NOT NULL,
        oldest_version INTEGER,
        turns INTEGER NOT NULL,
        sampled_tokens INTEGER NOT NULL,
        finished_at REAL NOT NULL,
        released_at REAL,                   -- by the ledger's clock; NULL: the record is kept
        written_at REAL NOT NULL DEFAULT 0, -- by the ledger's clock
        begun_at REAL,
        row_id TEXT NOT NULL DEFAULT '',
        why TEXT NOT NULL DEFAULT ''
    ) STRICT""",
    # crc: of the record as UTF-8; NULL: written by a release that did not count it
    "CREATE TABLE records (cursor INTEGER PRIMARY KEY, record TEXT NOT NULL, crc INTEGER) STRICT",
    "CREATE INDEX of_run ON outcomes (run_id, cursor, released_at)",
    "CREATE INDEX of_group ON outcomes (group_id, cursor) WHERE group_id IS NOT NULL",
    "CREATE INDEX kept ON outcomes (written_at) WHERE released_at IS NULL",
    "CREATE INDEX released ON outcomes (released_at) WHERE released_at IS NOT NULL",
    """CREATE TABLE attempts (
        seq INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        kind TEXT NOT NULL,
        stage TEXT NOT NULL,
        message TEXT NOT NULL,
        sampled_tokens INTEGER NOT NULL,
        seconds REAL NOT NULL,
        evidence TEXT,                      -- of errors.Evidence, where that decides about the next attempt
        PRIMARY KEY (seq, attempt)
    ) STRICT, WITHOUT ROWID""",
    _TURNS,
    "CREATE TABLE demands (run_id TEXT PRIMARY KEY, demand TEXT NOT NULL, set_at REAL NOT NULL) STRICT, WITHOUT ROWID",
    "CREATE TABLE versions (pool TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT, WITHOUT ROWID",
    # epoch: of the head that may write (see lease.py); last_cursor: the highest of a forgotten outcome; commits:
    # see CommitMark; home: where the file was opened last; boot, uptime, clock: see LedgerClock.
    """CREATE TABLE marks (
        epoch INTEGER NOT NULL,
        last_cursor INTEGER NOT NULL,
        commits INTEGER NOT NULL DEFAULT 0,
        home TEXT,
        boot TEXT,
        uptime REAL,
        clock REAL
    ) STRICT""",
    "INSERT INTO marks (epoch, last_cursor) VALUES (0, 0)",
)

_PAGE = 100
"""Rows migrated at once: they hold records."""


def create_tables(db: sqlite3.Connection) -> None:
    """Make the tables of a new file. Inside the caller's transaction."""
    for statement in _TABLES:
        db.execute(statement)
    db.execute("CREATE TABLE schema_version (version INTEGER NOT NULL) STRICT")
    db.execute("INSERT INTO schema_version VALUES (?)", (LEDGER_SCHEMA,))


def migrate_tables(db: sqlite3.Connection, version: int) -> None:
    """Bring tables of an earlier version to this one. Inside the caller's transaction: all of it, or nothing."""
    if version < 2:
        _migrate_from_1(db)
    else:
        if version < 3:
            _migrate_from_2(db)
        if version < 4:
            db.execute("ALTER TABLE attempts ADD COLUMN evidence TEXT")  # version 3 kept none
        if version < 5:
            db.execute(_TURNS)
        db.execute("ALTER TABLE outcomes ADD COLUMN begun_at REAL")  # version 5 named no row and no reason
        db.execute("ALTER TABLE outcomes ADD COLUMN row_id TEXT NOT NULL DEFAULT ''")
        db.execute("ALTER TABLE outcomes ADD COLUMN why TEXT NOT NULL DEFAULT ''")
    db.execute("UPDATE schema_version SET version = ?", (LEDGER_SCHEMA,))


def outcome_row(
    cursor: int, seq: int, run_id: str, group_id: str | None, rollout: Rollout, written_at: float
) -> list[object]:
    """Return the row of a record that is kept, in the order of the columns of ``outcomes``."""
    outcome = rollout.outcome
    oldest = rollout.oldest_version
    return [
        cursor,
        seq,
        run_id,
        group_id,
        outcome.status,
        outcome_detail(outcome),
        None if outcome.cause is None else outcome.cause.value,
        rollout.reward,
        int(rollout.masked),
        None if oldest is None else clamp_int64(oldest),
        rollout.turns,
        rollout.sampled_tokens,
        rollout.finished_at,
        None,
        written_at,
        rollout.begun_at,
        replace_surrogates(rollout.row_id),
        replace_surrogates(rollout.why),
    ]


def _migrate_from_2(db: sqlite3.Connection) -> None:
    """Version 2 measured ages by the wall clock, and knew nothing of damaged records and lost commits."""
    for statement in (
        "ALTER TABLE outcomes ADD COLUMN written_at REAL NOT NULL DEFAULT 0",
        "UPDATE outcomes SET written_at = finished_at",
        "DROP INDEX kept",
        "CREATE INDEX kept ON outcomes (written_at) WHERE released_at IS NULL",
        "ALTER TABLE records ADD COLUMN crc INTEGER",
        "ALTER TABLE marks ADD COLUMN commits INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE marks ADD COLUMN home TEXT",
        "ALTER TABLE marks ADD COLUMN boot TEXT",
        "ALTER TABLE marks ADD COLUMN uptime REAL",
        "ALTER TABLE marks ADD COLUMN clock REAL",
    ):
        db.execute(statement)


def _migrate_from_1(db: sqlite3.Connection) -> None:
    """Version 1 had one table with body and record in the row, and hashed bodies with every default written out."""
    for statement in (
        "DROP INDEX pending",
        "DROP INDEX finished",
        "ALTER TABLE rollouts RENAME TO rollouts_1",
        "ALTER TABLE attempts RENAME TO attempts_1",
        *_TABLES,
    ):
        db.execute(statement)
    for row in _version_1_rows(db):
        _copy_version_1_row(db, row)
    db.execute(
        "INSERT INTO attempts SELECT r.seq, a.attempt, a.kind, a.stage, a.message, 0, 0.0, NULL"
        " FROM attempts_1 a JOIN rollouts r USING (rollout_id) WHERE a.kind IS NOT NULL"
    )
    db.execute(
        "UPDATE rollouts SET begun = (SELECT max(a.attempt) FROM attempts_1 a"
        " WHERE a.rollout_id = rollouts.rollout_id AND a.kind IS NULL) WHERE cursor IS NULL"
    )
    db.execute("DROP TABLE attempts_1")
    db.execute("DROP TABLE rollouts_1")


def _version_1_rows(db: sqlite3.Connection) -> Iterator[sqlite3.Row]:
    last = -1
    while True:
        cursor = db.cursor()
        cursor.row_factory = sqlite3.Row
        rows = cursor.execute("SELECT * FROM rollouts_1 WHERE seq > ? ORDER BY seq LIMIT ?", (last, _PAGE)).fetchall()
        if not rows:
            return
        yield from rows
        last = rows[-1]["seq"]


def _copy_version_1_row(db: sqlite3.Connection, row: sqlite3.Row) -> None:
    size, replica, stands_in_for = 1, 0, None
    body, digest = row["body"], row["body_hash"]
    try:
        request = decode_request(body)
        body = request.to_json(canonical=True)
    except (ValueError, RecursionError):  # it stays unchanged; the service reports it when the rollout starts
        pass
    else:
        digest = body_hash(body)
        size, replica, stands_in_for = (
            clamp_int64(request.group_size),
            clamp_int64(request.replica),
            request.stands_in_for,
        )
    identity = (row["seq"], row["rollout_id"], row["run_id"], row["group_id"], size, replica, row["environment"])
    progress = (row["evaluation"], stands_in_for, row["accepted_at"], digest, row["attempt"], row["cancel"])
    db.execute(
        "INSERT INTO rollouts (seq, rollout_id, run_id, group_id, group_size, replica, environment, evaluation,"
        " stands_in_for, accepted_at, body_hash, attempt, cancel, cursor) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
        (*identity, *progress, row["cursor"]),
    )
    db.execute("INSERT INTO bodies VALUES (?, ?)", (row["seq"], body))
    if row["cursor"] is not None:
        place = (row["cursor"], row["seq"], row["run_id"], row["group_id"])
        outcome = _version_1_outcome(place, row)
        db.execute(f"INSERT INTO outcomes VALUES ({','.join('?' * len(outcome))})", outcome)
        db.execute("INSERT INTO records (cursor, record) VALUES (?, ?)", (row["cursor"], row["record"]))


def _version_1_outcome(place: tuple[int, int, str, str | None], row: sqlite3.Row) -> list[object]:
    try:
        rollout = decode_rollout(row["record"])
        return outcome_row(*place, rollout, rollout.finished_at)
    except ValueError:  # nothing can be learnt from it; its text is handed on, and kept for its time from now on
        unknown = [
            "failed",
            "internal",
            "infrastructure",
            None,
            1,
            None,
            0,
            0,
            time.time(),
            None,
            time.time(),
            None,
            "",
            "",
        ]
        return [*place, *unknown]
