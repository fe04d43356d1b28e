"""The clock by which a ledger measures ages of records: monotonic, and continued across restarts."""

import sqlite3
import time
from dataclasses import dataclass

from prorl_gym.process_identity import boot_id


@dataclass(frozen=True, slots=True)
class LedgerClock:
    """A monotonic clock in seconds. It begins at Unix time and falls behind by the time that hosts were down.

    Ages follow the kernel's uptime, which cannot be set. The file stores this clock's time with boot id and uptime; the
    next start in the same boot adds the difference. The time across a reboot is unknown without trusting the wall clock
    and does not count: records may be kept for longer, never for less.
    """

    start: float
    start_uptime: float
    """Uptime at ``start``."""

    def __call__(self) -> float:
        """Return the current time."""
        return self.start + max(0.0, uptime() - self.start_uptime)

    @classmethod
    def resume(cls, db: sqlite3.Connection) -> "LedgerClock":
        """Return the clock of an open ledger, continued from the time in the file."""
        boot, since, start = db.execute("SELECT boot, uptime, clock FROM marks").fetchone()
        now = uptime()
        if start is None:  # a new file
            start = time.time()
        elif boot == boot_id():
            start += max(0.0, now - since)
        return cls(start, now)

    def save(self, db: sqlite3.Connection) -> None:
        """Write the time to the file. Inside the caller's transaction."""
        db.execute("UPDATE marks SET boot = ?, uptime = ?, clock = ?", (boot_id(), uptime(), self()))


def uptime() -> float:
    """Return seconds since boot, including suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
