"""The ledger's clock: how old a record is, whatever happens to the wall clock.

Ages are measured by the kernel's uptime, which nobody sets. The ledger notes its own time together with boot id and
uptime; the next start in the same boot adds the difference. Time across a reboot cannot be known without trusting the
wall clock, so it does not count: records are then kept for longer, never for less.
"""

import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from prorl_gym.sandbox.processes import boot_id


def uptime() -> float:
    """Return seconds since boot, time asleep included."""
    return float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])


@dataclass(frozen=True, slots=True)
class LedgerClock:
    """Seconds that only rise. They begin at Unix time and fall behind it by the time that hosts were down."""

    start: float
    since: float
    """Uptime at ``start``."""

    def __call__(self) -> float:
        """Return the time."""
        return self.start + max(0.0, uptime() - self.since)

    @classmethod
    def resumed(cls, db: sqlite3.Connection) -> "LedgerClock":
        """Return the clock of an open ledger, going on where the file says."""
        boot, since, start = db.execute("SELECT boot, uptime, clock FROM marks").fetchone()
        now = uptime()
        if start is None:
            start = _latest(db)
        elif boot == boot_id():
            start += max(0.0, now - since)
        return cls(start, now)

    def note(self, db: sqlite3.Connection) -> None:
        """Write down where it stands. Inside the caller's transaction."""
        db.execute("UPDATE marks SET boot = ?, uptime = ?, clock = ?", (boot_id(), uptime(), self()))


def _latest(db: sqlite3.Connection) -> float:
    """Return where the clock of a file without one begins: at its latest stamp, and not after now."""
    (stamp,) = db.execute(
        "SELECT max(stamp) FROM (SELECT max(accepted_at) AS stamp FROM rollouts UNION ALL"
        " SELECT max(finished_at) FROM outcomes UNION ALL SELECT max(released_at) FROM outcomes UNION ALL"
        " SELECT max(set_at) FROM demands)"
    ).fetchone()
    return time.time() if stamp is None else min(time.time(), stamp)
