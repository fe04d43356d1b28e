"""A ledger on a virtual clock whose file checks itself: triggers on the real statements note what must never happen."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.ledger.writer_thread import LedgerWriter

OnRecord = Callable[[str, int, str], object]
"""Called with id, attempt and status of each record that is written (and may still be rolled back)."""

_TRIGGERS = """
CREATE TEMP TRIGGER sim_second_record BEFORE UPDATE OF cursor ON rollouts WHEN OLD.cursor IS NOT NULL
BEGIN SELECT sim_violation(OLD.rollout_id, 'a second record'); END;

CREATE TEMP TRIGGER sim_attempt_falls BEFORE UPDATE OF attempt ON rollouts
WHEN NEW.attempt <= OLD.attempt OR OLD.cursor IS NOT NULL OR OLD.begun IS NOT NULL
BEGIN SELECT sim_violation(OLD.rollout_id, 'attempt ' || NEW.attempt || ' begins after ' || OLD.attempt); END;

CREATE TEMP TRIGGER sim_attempt_ends BEFORE INSERT ON attempts
WHEN NEW.attempt IS NOT (SELECT begun FROM rollouts WHERE seq = NEW.seq)
BEGIN SELECT sim_violation(NEW.seq, 'attempt ' || NEW.attempt || ' ends and does not run'); END;

CREATE TEMP TRIGGER sim_cancel_undone BEFORE UPDATE OF cancel ON rollouts
WHEN OLD.cancel IS NOT NULL AND NEW.cancel IS NOT OLD.cancel
BEGIN SELECT sim_violation(OLD.rollout_id, 'its cancel changes'); END;

CREATE TEMP TRIGGER sim_record AFTER UPDATE OF cursor ON rollouts WHEN NEW.cursor IS NOT NULL
BEGIN
    SELECT sim_record(
        NEW.rollout_id, json_extract(r.record, '$.attempt'), NEW.attempt, NEW.begun, NEW.cancel,
        o.seq = NEW.seq, o.status, o.cause, o.reward
    ) FROM outcomes o JOIN records r USING (cursor) WHERE o.cursor = NEW.cursor;
END;
"""


async def open_checked_ledger(
    path: Path, clock: Callable[[], float], complain: Callable[[str], object], on_record: OnRecord
) -> tuple[SqliteLedger, LedgerWriter]:
    """Open a ledger's file in the running process.

    Args:
        path: of the file.
        clock: virtual seconds.
        complain: called with each violation.
        on_record: see there.
    """

    def check_record(
        rollout_id: str,
        attempt: int,
        next_attempt: int,
        begun: int | None,
        cancel: str | None,
        is_its_own: int,
        status: str,
        cause: str | None,
        reward: float | None,
    ) -> None:
        if not is_its_own:
            complain(f"{rollout_id}: its cursor is another's")
        if attempt != begun and (attempt < next_attempt or (begun is not None and status != "cancelled")):
            complain(f"{rollout_id}: a record of attempt {attempt}, which is over (running: {begun})")
        if cancel is not None and status != "cancelled":
            complain(f"{rollout_id}: {status} after its cancel was remembered")
        if reward is not None and (status == "cancelled" or cause in ("infrastructure", "task")):
            complain(f"{rollout_id}: a reward from {status}, {cause}")
        on_record(rollout_id, attempt, status)

    def note_violation(name: str | int, what: str) -> None:
        complain(f"{name}: {what}")

    writer = await LedgerWriter.open(LedgerConfig(path=path), clock)
    connection = writer.open_ledger.connection
    connection.create_function("sim_violation", 2, note_violation)
    connection.create_function("sim_record", 9, check_record)
    connection.executescript(_TRIGGERS)
    return SqliteLedger(writer, clock), writer


def break_writes(connection: sqlite3.Connection, *, broken: bool) -> None:
    """Let every statement that changes the file fail, as a broken disk does, or let them work again."""
    changes = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE}

    def authorize(action: int, *_: str | None) -> int:
        return sqlite3.SQLITE_DENY if action in changes else sqlite3.SQLITE_OK

    connection.set_authorizer(authorize if broken else None)
