"""The ledger's tables.

A rollout's identity and progress (``rollouts``) are small and change; how it ended (``outcomes``) is small too, and
written once. The long texts, its request (``bodies``) and its record (``records``), stand apart: a change never copies
them, and deleting one frees whole pages. What is left of a rollout then is who it was, how it ended, and the hash by
which its id stays idempotent.
"""

import sqlite3

from prorl_gym.records import Rollout
from prorl_gym.rollout.ledger.encoding import clamp_int64, outcome_detail, replace_surrogates

LEDGER_SCHEMA = 1
"""Version of the tables. A file with any other is refused. Raise it with every change of ``_TABLES``."""

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
        written_at REAL NOT NULL,           -- by the ledger's clock
        begun_at REAL,
        row_id TEXT NOT NULL,
        why TEXT NOT NULL
    ) STRICT""",
    # crc: of the record as UTF-8
    "CREATE TABLE records (cursor INTEGER PRIMARY KEY, record TEXT NOT NULL, crc INTEGER NOT NULL) STRICT",
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
    """CREATE TABLE turns (
        seq INTEGER NOT NULL,
        number INTEGER NOT NULL,            -- from 0, without gaps
        attempt INTEGER NOT NULL,           -- that sampled it
        body BLOB NOT NULL,                 -- compressed JSON
        PRIMARY KEY (seq, number)
    ) STRICT""",
    "CREATE TABLE demands (run_id TEXT PRIMARY KEY, demand TEXT NOT NULL, set_at REAL NOT NULL) STRICT, WITHOUT ROWID",
    "CREATE TABLE versions (pool TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT, WITHOUT ROWID",
    # epoch: the head's that may write (see lease.py); last_cursor: the highest of a forgotten outcome; commits:
    # see CommitMark; home: where the file was opened last; boot, uptime, clock: see LedgerClock.
    """CREATE TABLE marks (
        epoch INTEGER NOT NULL,
        last_cursor INTEGER NOT NULL,
        commits INTEGER NOT NULL,
        home TEXT,
        boot TEXT,
        uptime REAL,
        clock REAL
    ) STRICT""",
    "INSERT INTO marks (epoch, last_cursor, commits) VALUES (0, 0, 0)",
    "CREATE TABLE schema_version (version INTEGER NOT NULL) STRICT",
    f"INSERT INTO schema_version VALUES ({LEDGER_SCHEMA})",
)


def create_tables(db: sqlite3.Connection) -> None:
    """Create the tables of a new file. Inside the caller's transaction."""
    for statement in _TABLES:
        db.execute(statement)


def outcome_row(
    cursor: int, seq: int, run_id: str, group_id: str | None, rollout: Rollout, written_at: float
) -> list[object]:
    """Return the row of a record that is kept, in the order of the columns of ``outcomes``."""
    outcome, oldest = rollout.outcome, rollout.oldest_version
    cause = None if outcome.cause is None else outcome.cause.value
    oldest_version = None if oldest is None else clamp_int64(oldest)
    values = (rollout.reward, int(rollout.masked), oldest_version, rollout.turns, rollout.sampled_tokens)
    times = (rollout.finished_at, None, written_at, rollout.begun_at)
    texts = (replace_surrogates(rollout.row_id), replace_surrogates(rollout.why))
    return [cursor, seq, run_id, group_id, outcome.status, outcome_detail(outcome), cause, *values, *times, *texts]
