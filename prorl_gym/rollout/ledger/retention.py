"""Retention: records are kept until they are acknowledged or expire, then a tombstone is.

A *tombstone* is what is left of a released record: its identity and outcome (``RolloutSummary``), and the hash by which
its id stays idempotent. When the tombstone is deleted too, the id is unknown.

Releasing touches every page of a record, so it is done in slices, and other calls run between two slices. The service
collects by itself; ``collect_garbage`` does the same in the ledger of a stopped service and gives all free room back.
"""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prorl_gym.client.wire_models import LedgerStatus
from prorl_gym.rollout.ledger.encoding import clamp_int64
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig, LedgerError, LedgerInUseError, translated_errors
from prorl_gym.rollout.ledger.open_ledger import OpenLedger, open_ledger_file
from prorl_gym.rollout.ledger.queries import IN_JSON_LIST
from prorl_gym.rollout.ledger.statements import LedgerStore

_DAY = 86400.0

RELEASE_SLICE = 256
"""Records released in one transaction."""

_PAGES = 1024
"""Pages given back in one transaction."""

_SPARE_BYTES = 64 << 20
"""Free pages up to this are kept for the records to come; giving back copies pages, which those would take again."""


@dataclass(frozen=True, slots=True)
class GarbageSlice:
    """Result of one slice of the garbage collection, or of a dry run of all of it."""

    records: int
    """Expired records that were released."""
    tombstones: int
    """Old tombstones that were deleted."""
    more: bool
    """Whether there may be more."""


def used_bytes(db: sqlite3.Connection) -> int:
    """Return what the file holds, without its free pages: they are taken before it grows."""
    query = "SELECT (p.page_count - f.freelist_count) * s.page_size"
    return db.execute(f"{query} FROM pragma_page_count p, pragma_freelist_count f, pragma_page_size s").fetchone()[0]


class Retention:
    """Releases and forgets. In the writer thread, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection, store: LedgerStore, config: LedgerConfig) -> None:
        self._db = connection
        self._store = store
        self._budget_bytes = config.budget_bytes
        self._keep_seconds = config.keep_days * _DAY
        self._tombstone_seconds = config.tombstone_days * _DAY

    def acknowledge(self, run_id: str | None, after: int, cursor: int, now: float) -> list[int]:
        """Release some kept records past ``after`` and up to ``cursor``; return their cursors."""
        where, values = ("", ()) if run_id is None else ("AND run_id = ?", (run_id,))
        return self._release(
            f"cursor > ? AND cursor <= ? {where} ORDER BY cursor", (after, clamp_int64(cursor), *values), now
        )

    def acknowledge_rollouts(self, rollout_ids: Sequence[str], now: float) -> list[int]:
        """Release the kept records of these rollouts, at most ``RELEASE_SLICE`` of them."""
        cursors = f"SELECT cursor FROM rollouts WHERE rollout_id {IN_JSON_LIST}"
        return self._release(f"cursor IN ({cursors})", (json.dumps(rollout_ids),), now)

    def _release(self, where: str, values: tuple[object, ...], now: float) -> list[int]:
        rows = self._db.execute(
            f"SELECT cursor, seq FROM outcomes WHERE released_at IS NULL AND {where} LIMIT ?", (*values, RELEASE_SLICE)
        ).fetchall()
        if not rows:
            return []
        released = [row[0] for row in rows]
        cursors, seqs = json.dumps(released), json.dumps([row[1] for row in rows])
        self._db.execute(f"UPDATE outcomes SET released_at = ? WHERE cursor {IN_JSON_LIST}", (now, cursors))
        self._db.execute(f"DELETE FROM records WHERE cursor {IN_JSON_LIST}", (cursors,))
        self._db.execute(f"DELETE FROM bodies WHERE seq {IN_JSON_LIST}", (seqs,))
        self._db.execute(f"DELETE FROM attempts WHERE seq {IN_JSON_LIST}", (seqs,))
        self._adjust_counters(kept=-len(rows), released=len(rows))
        return released

    def _delete_tombstones(self, now: float) -> int:
        rows = self._db.execute(
            "SELECT cursor, seq FROM outcomes WHERE released_at < ? ORDER BY released_at LIMIT ?",
            (now - self._tombstone_seconds, RELEASE_SLICE),
        ).fetchall()
        if not rows:
            return 0
        highest = max(row[0] for row in rows)
        # A cursor is never given out again: readers resume by it.
        self._db.execute("UPDATE marks SET last_cursor = max(last_cursor, ?)", (highest,))
        self._db.execute(f"DELETE FROM outcomes WHERE cursor {IN_JSON_LIST}", (json.dumps([row[0] for row in rows]),))
        self._db.execute(f"DELETE FROM rollouts WHERE seq {IN_JSON_LIST}", (json.dumps([row[1] for row in rows]),))
        self._adjust_counters(kept=0, released=-len(rows))
        return len(rows)

    def _adjust_counters(self, *, kept: int, released: int) -> None:
        numbers = self._store.counters
        self._store.counters = replace(numbers, kept=numbers.kept + kept, released=numbers.released + released)

    def collect_garbage(self, now: float, spare_bytes: int | None = None) -> GarbageSlice:
        """Do one slice: release expired records, delete tombstones, give pages back beyond ``spare_bytes``."""
        if expired := self._release("written_at < ? ORDER BY written_at", (now - self._keep_seconds,), now):
            return GarbageSlice(len(expired), 0, more=True)
        if deleted := self._delete_tombstones(now):
            return GarbageSlice(0, deleted, more=True)
        self._db.execute(  # demands of runs of which nothing is left
            "DELETE FROM demands WHERE set_at < ?"
            " AND NOT EXISTS (SELECT 1 FROM outcomes o WHERE o.run_id = demands.run_id)"
            " AND NOT EXISTS (SELECT 1 FROM rollouts r WHERE r.cursor IS NULL AND r.run_id = demands.run_id)",
            (now - self._tombstone_seconds,),
        )
        return GarbageSlice(0, 0, more=self._vacuum(_SPARE_BYTES if spare_bytes is None else spare_bytes))

    def _vacuum(self, spare_bytes: int) -> bool:
        """Return some free pages to the file system; return whether there are more."""
        (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        (total,) = self._db.execute("PRAGMA page_count").fetchone()
        (size,) = self._db.execute("PRAGMA page_size").fetchone()
        if free * size <= spare_bytes or (spare_bytes and free * 4 < total):
            return False
        self._db.execute(f"PRAGMA incremental_vacuum({_PAGES})").fetchall()
        self._db.execute("UPDATE marks SET last_cursor = last_cursor")  # a change that counts, so that it is committed
        return self._db.execute("PRAGMA freelist_count").fetchone()[0] < free  # not in a file from a dump

    def count_garbage(self, now: float) -> GarbageSlice:
        kept = "SELECT count(*) FROM outcomes WHERE released_at IS NULL AND written_at < ?"
        tombstones = "SELECT count(*) FROM outcomes WHERE released_at < ?"
        (records,) = self._db.execute(kept, (now - self._keep_seconds,)).fetchone()
        (old,) = self._db.execute(tombstones, (now - self._tombstone_seconds,)).fetchone()
        return GarbageSlice(records, old, more=bool(records or old))

    def usage(self) -> LedgerStatus:
        numbers, used = self._store.counters, used_bytes(self._db)
        return LedgerStatus(used, numbers.pending, numbers.kept, numbers.released, used >= self._budget_bytes)


@dataclass(frozen=True, slots=True)
class GarbageReport:
    records: int
    """Expired and released."""
    tombstones: int
    """Forgotten."""
    bytes_before: int
    """Size of the file."""
    bytes_after: int
    usage_after: LedgerStatus


def collect_garbage(config: LedgerConfig, *, dry_run: bool) -> GarbageReport:
    """Release what has expired, delete old tombstones, return free pages; or only count. Raises ``LedgerError``."""
    if not config.path.exists():
        raise LedgerError(f"{config.path}: there is no such ledger.", "Name the file, or the service's --config.")
    before = config.path.stat().st_size
    try:
        opened = open_ledger_file(config)
    except LedgerInUseError as error:
        raise LedgerInUseError(error.what, "That service collects by itself, at its start and every hour.") from None
    try:
        with translated_errors(config.path):
            store = LedgerStore(opened.connection, opened.clock, lambda: 0)
            retention = Retention(opened.connection, store, config)
            done = retention.count_garbage(opened.clock()) if dry_run else _collect(opened, retention)
            left = retention.usage()
    finally:
        opened.close()
    return GarbageReport(done.records, done.tombstones, before, config.path.stat().st_size, left)


def _collect(opened: OpenLedger, retention: Retention) -> GarbageSlice:
    records = tombstones = 0
    more = True
    while more:
        if opened.lease is not None:
            opened.lease.renew()
        opened.begin()
        part = retention.collect_garbage(opened.clock(), spare_bytes=0)
        opened.commit()
        records, tombstones, more = records + part.records, tombstones + part.tombstones, part.more
    return GarbageSlice(records, tombstones, more=False)
