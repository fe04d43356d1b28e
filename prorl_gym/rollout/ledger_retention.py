"""How long the ledger keeps what: records until they are acknowledged or expire, their traces for a while after that.

A *trace* is what is left of a released record: who it was and how it ended (``Member``), and the hash by which its id
stays idempotent. When the trace goes too, the id is forgotten.

Releasing touches every page of a record, so it is done in slices, between which other calls get their turn.
"""

import json
import sqlite3
from dataclasses import dataclass, replace

from prorl_gym.demand import Demand
from prorl_gym.rollout.encoding import clipped
from prorl_gym.rollout.ledger_file import LedgerConfig
from prorl_gym.rollout.ledger_reads import AMONG
from prorl_gym.rollout.ledger_store import LedgerStore
from prorl_gym.rollout.protocol import LedgerUsage

_DAY = 86400.0

_SLICE = 256
"""Records released in one transaction."""

_PAGES = 1024
"""Pages given back in one transaction."""

_SPARE_BYTES = 64 << 20
"""Free pages up to this are kept for the records to come; giving back copies pages, which those would take again."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What one call has released."""

    count: int
    last: int
    """Cursor of the last one, where the next slice goes on."""
    more: bool
    """There may be more."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What a slice of collecting did, or what all of it would do."""

    records: int
    """Expired, hence released."""
    traces: int
    """Of records released long ago, hence forgotten."""
    more: bool
    """There may be more."""


def used_bytes(db: sqlite3.Connection) -> int:
    """Return what the file holds. Free pages of the file do not count: they are taken before it grows."""
    query = "SELECT (p.page_count - f.freelist_count) * s.page_size"
    return db.execute(f"{query} FROM pragma_page_count p, pragma_freelist_count f, pragma_page_size s").fetchone()[0]


class Retention:
    """Releases and forgets. In the writer thread, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection, store: LedgerStore, config: LedgerConfig) -> None:
        self._db = connection
        self._store = store
        self._config = config

    def acknowledge(self, run_id: str | None, after: int, cursor: int, now: float) -> Slice:
        """Release some kept records past ``after`` and up to ``cursor``."""
        where, values = ("", ()) if run_id is None else ("AND run_id = ?", (run_id,))
        return self._release(
            f"cursor > ? AND cursor <= ? {where} ORDER BY cursor", (after, clipped(cursor), *values), now
        )

    def expire(self, now: float) -> Slice:
        """Release some records that nobody has acknowledged in time."""
        return self._release("written_at < ? ORDER BY written_at", (self._expiry(now),), now)

    def _release(self, where: str, values: tuple[object, ...], now: float) -> Slice:
        rows = self._db.execute(
            f"SELECT cursor, seq FROM outcomes WHERE released_at IS NULL AND {where} LIMIT ?", (*values, _SLICE)
        ).fetchall()
        if not rows:
            return Slice(0, 0, False)
        cursors, seqs = json.dumps([row[0] for row in rows]), json.dumps([row[1] for row in rows])
        self._db.execute(f"UPDATE outcomes SET released_at = ? WHERE cursor {AMONG}", (now, cursors))
        self._db.execute(f"DELETE FROM records WHERE cursor {AMONG}", (cursors,))
        self._db.execute(f"DELETE FROM bodies WHERE seq {AMONG}", (seqs,))
        self._db.execute(f"DELETE FROM attempts WHERE seq {AMONG}", (seqs,))
        self._count(kept=-len(rows), released=len(rows))
        return Slice(len(rows), rows[-1][0], len(rows) == _SLICE)

    def forget_traces(self, now: float) -> Slice:
        """Forget some rollouts whose records were released long ago."""
        rows = self._db.execute(
            "SELECT cursor, seq FROM outcomes WHERE released_at < ? ORDER BY released_at LIMIT ?",
            (self._forgetting(now), _SLICE),
        ).fetchall()
        if not rows:
            return Slice(0, 0, False)
        highest = max(row[0] for row in rows)
        # A cursor is never given out again: readers resume by it.
        self._db.execute("UPDATE marks SET last_cursor = max(last_cursor, ?)", (highest,))
        self._db.execute(f"DELETE FROM outcomes WHERE cursor {AMONG}", (json.dumps([row[0] for row in rows]),))
        self._db.execute(f"DELETE FROM rollouts WHERE seq {AMONG}", (json.dumps([row[1] for row in rows]),))
        self._count(kept=0, released=-len(rows))
        return Slice(len(rows), rows[-1][0], len(rows) == _SLICE)

    def _count(self, *, kept: int, released: int) -> None:
        numbers = self._store.numbers
        self._store.numbers = replace(numbers, kept=numbers.kept + kept, released=numbers.released + released)

    def forget_demands(self, now: float) -> None:
        """Forget what was wanted long ago of runs of which nothing is left."""
        self._db.execute(
            "DELETE FROM demands WHERE set_at < ?"
            " AND NOT EXISTS (SELECT 1 FROM outcomes o WHERE o.run_id = demands.run_id)"
            " AND NOT EXISTS (SELECT 1 FROM rollouts r WHERE r.cursor IS NULL AND r.run_id = demands.run_id)",
            (self._forgetting(now),),
        )

    def collect(self, now: float, spare_bytes: int | None = None) -> Collected:
        """Do a slice of what is to be done: expire, forget, give pages back.

        Args:
            now: by the ledger's clock.
            spare_bytes: free pages to keep for the records to come.
        """
        part = self.expire(now)
        if part.count:
            return Collected(part.count, 0, more=True)
        part = self.forget_traces(now)
        if part.count:
            return Collected(0, part.count, more=True)
        self.forget_demands(now)
        return Collected(0, 0, more=self._give_back(_SPARE_BYTES if spare_bytes is None else spare_bytes))

    def _give_back(self, spare_bytes: int) -> bool:
        """Return some free pages to the file system; tell whether there are more to return."""
        (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        (total,) = self._db.execute("PRAGMA page_count").fetchone()
        (size,) = self._db.execute("PRAGMA page_size").fetchone()
        if free * size <= spare_bytes or (spare_bytes and free * 4 < total):
            return False
        self._db.execute(f"PRAGMA incremental_vacuum({_PAGES})").fetchall()
        self._db.execute("UPDATE marks SET last_cursor = last_cursor")  # a change that counts, so that it is committed
        return self._db.execute("PRAGMA freelist_count").fetchone()[0] < free  # not in a file made by release 1

    def collectable(self, now: float) -> Collected:
        """Count what there is to do."""
        kept = "SELECT count(*) FROM outcomes WHERE released_at IS NULL AND written_at < ?"
        traces = "SELECT count(*) FROM outcomes WHERE released_at < ?"
        (records,) = self._db.execute(kept, (self._expiry(now),)).fetchone()
        (old,) = self._db.execute(traces, (self._forgetting(now),)).fetchone()
        return Collected(records, old, more=bool(records or old))

    def set_version(self, pool: str, version: int) -> None:
        """Note what the engines of a pool serve."""
        self._db.execute("INSERT OR REPLACE INTO versions VALUES (?, ?)", (pool, version))

    def set_demand(self, run_id: str, demand: Demand | None, now: float) -> None:
        """Remember or forget what is wanted of a run."""
        if demand is None:
            self._db.execute("DELETE FROM demands WHERE run_id = ?", (run_id,))
        else:
            self._db.execute("INSERT OR REPLACE INTO demands VALUES (?, ?, ?)", (run_id, demand.model_dump_json(), now))

    def usage(self) -> LedgerUsage:
        """Report what is held."""
        numbers, used = self._store.numbers, used_bytes(self._db)
        return LedgerUsage(used, numbers.pending, numbers.kept, numbers.released, used >= self._config.budget_bytes)

    def _expiry(self, now: float) -> float:
        return now - self._config.keep_days * _DAY

    def _forgetting(self, now: float) -> float:
        return now - self._config.trace_days * _DAY
