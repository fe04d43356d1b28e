"""Files of earlier releases: what they hold is there after the upgrade, and ids keep their meaning."""

import asyncio
import hashlib
import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_gym.errors import CancelReason, ConflictError, FailureKind
from prorl_gym.records import Outcome, Rollout, RolloutRequest, Score
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig, LedgerError, UnreadableRecordError
from prorl_gym.rollout.ledger.open_ledger import open_ledger_file
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.protocol import ListPage, RolloutFilter
from prorl_gym.rollout.scheduling.attempt import terminal_record

_FIRST = """
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    rollout_id TEXT NOT NULL UNIQUE,
    run_id TEXT NOT NULL,
    group_id TEXT,
    environment TEXT NOT NULL,
    evaluation INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'finished')),
    cancel TEXT,
    accepted_at REAL NOT NULL,
    body_hash TEXT NOT NULL,
    body TEXT NOT NULL,
    cursor INTEGER UNIQUE,
    record TEXT,
    CHECK ((state = 'finished') = (record IS NOT NULL)),
    CHECK ((state = 'finished') = (cursor IS NOT NULL))
) STRICT;
CREATE INDEX pending ON rollouts (seq) WHERE state = 'pending';
CREATE INDEX finished ON rollouts (run_id, cursor) WHERE state = 'finished';
CREATE TABLE attempts (
    rollout_id TEXT NOT NULL REFERENCES rollouts (rollout_id),
    attempt INTEGER NOT NULL,
    kind TEXT,
    stage TEXT,
    message TEXT,
    PRIMARY KEY (rollout_id, attempt)
) STRICT, WITHOUT ROWID;
CREATE TABLE schema_version (version INTEGER NOT NULL) STRICT;
INSERT INTO schema_version VALUES (1);
"""
"""As release 1 made them."""

_FIELDS = "rollout_id, run_id, group_id, environment, evaluation, accepted_at, body_hash, body"


def first_body(rollout_id: str, replica: int) -> str:
    """A request as release 1 wrote it: every field of its day, those as by default too."""
    settings = dict.fromkeys(
        "temperature top_p top_k seed stop_token_ids max_turns max_tokens max_turn_tokens init_seconds run_seconds"
        " eval_seconds action_seconds".split()
    )
    body = {
        "rollout_id": rollout_id,
        "run_id": "run",
        "group_id": "g",
        "group_size": 200,
        "replica": replica,
        "environment": "noop",
        "task": {"b": 1, "a": "ä"},
        "settings": {**settings, "temperature": 0.5},
        "evaluation": False,
        "inference_url": None,
        "metadata": {},
    }
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def asked(rollout_id: str, replica: int) -> RolloutRequest:
    """The same, as a client sends it today."""
    return RolloutRequest.model_validate(
        {
            "rollout_id": rollout_id,
            "run_id": "run",
            "group_id": "g",
            "group_size": 200,
            "replica": replica,
            "environment": "noop",
            "task": {"a": "ä", "b": 1},
            "settings": {"temperature": 0.5},
        }
    )


def first_record(rollout_id: str, replica: int) -> str:
    record = Rollout(
        rollout_id=rollout_id,
        run_id="run",
        group_id="g",
        group_size=200,
        replica=replica,
        environment="noop",
        outcome=Outcome(status="completed"),
        score=Score(reward=0.25),
        accepted_at=10.0,
        finished_at=2e9,
    )
    return record.model_dump_json(exclude={"stands_in_for", "prompt_messages"})


def write_first(path: Path, rollouts: int) -> None:
    """Write a file of release 1 by its statements: every third one is finished."""
    with sqlite3.connect(path, isolation_level=None) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(_FIRST)
        db.execute("BEGIN")
        for number in range(rollouts):
            name, body = f"r{number}", first_body(f"r{number}", number)
            digest = hashlib.sha256(body.encode("ascii")).hexdigest()
            row = (name, "run", "g", "noop", 0, 10.0 + number, digest, body)
            db.execute(f"INSERT INTO rollouts ({_FIELDS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            if number % 3 == 0:
                db.execute(
                    "UPDATE rollouts SET state = 'finished', record = ?, cursor = ? WHERE rollout_id = ?",
                    (first_record(name, number), number // 3 + 1, name),
                )
        db.execute("INSERT INTO attempts VALUES ('r1', 0, 'engine_timeout', 'run', 'no answer')")
        db.execute("INSERT INTO attempts (rollout_id, attempt) VALUES ('r1', 1)")
        db.execute("UPDATE rollouts SET attempt = 2, cancel = 'stale' WHERE rollout_id = 'r1'")
        db.execute("UPDATE rollouts SET body = '{\"later\": 1}' WHERE rollout_id = 'r2'")
        db.execute("UPDATE rollouts SET record = '{\"later\": 2}' WHERE rollout_id = 'r3'")
        db.execute("COMMIT")
    db.close()


async def check_upgraded(path: Path, rollouts: int) -> None:
    """Everything that ``write_first`` wrote is there."""
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    try:
        pending = {one.rollout_id: one for one in await ledger.recover()}
        assert list(pending) == [f"r{i}" for i in range(rollouts) if i % 3]
        one = pending["r1"]
        assert (one.failures, one.restarts, one.cancel_reason) == (1, 1, CancelReason.STALE)
        assert (one.group_size, one.replica) == (200, 1)
        (job,) = await ledger.next_jobs(["r1"])
        assert (job.attempt, job.accepted_at, job.request) == (2, 11.0, asked("r1", 1))
        assert [retry.kind for retry in job.retries] == [FailureKind.ENGINE_TIMEOUT, FailureKind.SERVICE_RESTARTED]
        assert (await ledger.next_jobs(["r2"]))[0].unreadable_reason
        answers = await ledger.add_rollouts([asked(f"r{i}", i) for i in (0, 1, 4, 6)])
        assert all(answer.duplicate for answer in answers)
        with pytest.raises(ConflictError):
            await ledger.add_rollouts([asked("r0", 1)])
        stream = await ledger.read_records("run", 0, 1000)
        assert [delivery.cursor for delivery in stream] == list(range(1, (rollouts + 2) // 3 + 1))
        assert stream[1].record == '{"later": 2}'
        first, unreadable, *_ = await ledger.summaries("run")
        assert (first.rollout_id, first.reward, first.status, first.masked) == ("r0", 0.25, "completed", False)
        assert (unreadable.reward, unreadable.status, unreadable.masked) == (None, "failed", True)
        record = await ledger.get("r0")
        assert isinstance(record, Rollout)
        with pytest.raises(UnreadableRecordError):
            await ledger.get("r3")
        usage = await ledger.usage()
        assert (usage.pending, usage.kept) == (len(pending), len(stream))
    finally:
        await ledger.close()


async def test_a_file_of_the_first_release_is_upgraded(tmp_path: Path) -> None:
    write_first(tmp_path / "l.db", 250)
    await check_upgraded(tmp_path / "l.db", 250)
    await check_upgraded(tmp_path / "l.db", 250)


def test_an_upgrade_that_was_not_asked_for_is_refused(tmp_path: Path) -> None:
    write_first(tmp_path / "l.db", 4)
    before = (tmp_path / "l.db").read_bytes()
    with pytest.raises(LedgerError, match="schema 1 is of an earlier release"):
        open_ledger_file(LedgerConfig(path=tmp_path / "l.db"), upgrade=False)
    assert (tmp_path / "l.db").read_bytes() == before


_SECOND = (
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
        released_at REAL                    -- NULL: the record is kept
    ) STRICT""",
    "CREATE TABLE records (cursor INTEGER PRIMARY KEY, record TEXT NOT NULL) STRICT",
    "CREATE INDEX of_run ON outcomes (run_id, cursor, released_at)",
    "CREATE INDEX of_group ON outcomes (group_id, cursor) WHERE group_id IS NOT NULL",
    "CREATE INDEX kept ON outcomes (finished_at) WHERE released_at IS NULL",
    "CREATE INDEX released ON outcomes (released_at) WHERE released_at IS NOT NULL",
    """CREATE TABLE attempts (
        seq INTEGER NOT NULL,
        attempt INTEGER NOT NULL,
        kind TEXT NOT NULL,
        stage TEXT NOT NULL,
        message TEXT NOT NULL,
        sampled_tokens INTEGER NOT NULL,
        seconds REAL NOT NULL,
        PRIMARY KEY (seq, attempt)
    ) STRICT, WITHOUT ROWID""",
    "CREATE TABLE demands (run_id TEXT PRIMARY KEY, demand TEXT NOT NULL, set_at REAL NOT NULL) STRICT, WITHOUT ROWID",
    "CREATE TABLE versions (pool TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT, WITHOUT ROWID",
    # epoch: of the head that may write (see ledger_lease); last_cursor: the highest of a forgotten outcome.
    "CREATE TABLE marks (epoch INTEGER NOT NULL, last_cursor INTEGER NOT NULL) STRICT",
    "INSERT INTO marks VALUES (0, 0)",
    "CREATE TABLE schema_version (version INTEGER NOT NULL) STRICT",
    "INSERT INTO schema_version VALUES (2)",
)


def write_second(path: Path) -> None:
    """Write a file of schema 2 by its statements: one rollout that is finished, one that runs, one cancelled."""
    with sqlite3.connect(path, isolation_level=None) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN")
        for statement in _SECOND:
            db.execute(statement)
        for seq in (1, 2, 3):
            body = asked(f"r{seq}", seq).to_json(canonical=True)
            digest = hashlib.sha256(body.encode("ascii")).hexdigest()
            row = (seq, f"r{seq}", "run", "g", 200, seq, "noop", 0, 10.0 + seq, digest)
            db.execute(
                "INSERT INTO rollouts (seq, rollout_id, run_id, group_id, group_size, replica, environment, evaluation,"
                " accepted_at, body_hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            db.execute("INSERT INTO bodies VALUES (?, ?)", (seq, body))
        outcome = (1, 1, "run", "g", "completed", "", None, 0.25, 0, None, 0, 0, 1e9, None)
        db.execute(f"INSERT INTO outcomes VALUES ({','.join('?' * len(outcome))})", outcome)
        db.execute("INSERT INTO records VALUES (1, ?)", (first_record("r1", 1),))
        db.execute("UPDATE rollouts SET cursor = 1, attempt = 1 WHERE seq = 1")
        db.execute("UPDATE rollouts SET attempt = 1, begun = 0 WHERE seq = 2")
        db.execute("UPDATE rollouts SET cancel = 'client' WHERE seq = 3")
        db.execute("UPDATE marks SET last_cursor = 7")
        db.execute("COMMIT")
    db.close()


async def test_a_file_of_the_second_schema_is_upgraded(tmp_path: Path) -> None:
    """Also one that is old by the wall clock keeps its records: it is not known how long it lay there."""
    write_second(tmp_path / "l.db")
    for _ in range(2):
        ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
        assert await ledger.collect_garbage() == 0
        pending = {one.rollout_id: one for one in await ledger.recover()}
        assert {name: (one.restarts, one.cancel_reason) for name, one in pending.items()} == {
            "r2": (1, None),
            "r3": (0, CancelReason.CLIENT),
        }
        record = await ledger.get("r1")
        assert isinstance(record, Rollout) and record.reward == 0.25
        assert [(one.cursor, one.damage) for one in await ledger.read_records(None, 0, 10)] == [(1, "")]
        assert [answer.duplicate for answer in await ledger.add_rollouts([asked("r1", 1)])] == [True]
        await ledger.close()
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
    stopped = Outcome(status="cancelled", reason=CancelReason.CLIENT)
    (job,) = await ledger.next_jobs(["r3"])
    assert await ledger.finish(terminal_record(job, stopped)) == 8
    await ledger.close()


_DIE_UPGRADING = """
import os, signal, sys
from pathlib import Path
from prorl_gym.rollout.ledger import sql_schema
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.open_ledger import open_ledger_file

taken, take_over = [], sql_schema._copy_version_1_row

def die_at_last(db, row):
    take_over(db, row)
    taken.append(row)
    if len(taken) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

sql_schema._copy_version_1_row = die_at_last
open_ledger_file(LedgerConfig(path=Path(sys.argv[1])))
"""


def test_an_upgrade_that_is_killed_leaves_the_old_file(tmp_path: Path) -> None:
    write_first(tmp_path / "l.db", 150)
    command = [sys.executable, "-c", _DIE_UPGRADING, str(tmp_path / "l.db"), "140"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    with sqlite3.connect(tmp_path / "l.db") as db:
        assert db.execute("SELECT version FROM schema_version").fetchone() == (1,)
        assert db.execute("SELECT count(*) FROM rollouts WHERE state = 'finished'").fetchone() == (50,)
    db.close()
    asyncio.run(check_upgraded(tmp_path / "l.db", 150))


async def test_rollouts_of_the_fifth_schema_are_listed_without_problem_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    await ledger.add_rollouts([asked("r0", 0), asked("r1", 1)])
    await ledger.finish(terminal_record((await ledger.pending_jobs())[0], Outcome(status="completed")))
    await ledger.close()
    with sqlite3.connect(path) as connection:
        for table, column in (("outcomes", "row_id"), ("outcomes", "why"), ("outcomes", "begun_at")):
            connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        connection.execute("UPDATE schema_version SET version = 5")
    connection.close()
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    try:
        (found,) = (await ledger.list_rollouts(RolloutFilter(), "finished", ListPage())).rollouts
        assert (found.rollout_id, found.row_id, found.why, found.begun_at) == ("r0", "", "", None)
        assert [one.problem for one in (await ledger.list_problems(RolloutFilter(), "newest", 0, 9)).problems] == ["g"]
        assert (await ledger.analyze(RolloutFilter())).spreads.keys() == {"took", "turns", "tokens"}
        pending = (await ledger.list_rollouts(RolloutFilter(), "waiting", ListPage())).pending
        assert [(one.rollout_id, one.problem) for one in pending] == [("r1", "g")]
    finally:
        await ledger.close()
