"""The ledger's file: where it is, how long it keeps what, and what can be wrong with it."""

import contextlib
import errno
import sqlite3
from pathlib import Path

from pydantic import Field

from prorl_gym.config import ConfigModel
from prorl_gym.errors import CancelReason, ProrlError


class LedgerError(ProrlError):
    """The ledger's file cannot be used: missing or full disk, corrupt or locked file, newer schema."""


class DamagedLedgerError(LedgerError):
    """It is no ledger, or not a whole one: waiting does not help."""


class LedgerInUseError(LedgerError):
    """Another service has it."""


class LedgerFullError(LedgerError):
    """Nothing more can be accepted: the disk budget is used up, or the disk itself."""


class DiskFullError(LedgerFullError):
    """The disk has no room, whatever the budget says."""


class StuckDiskError(LedgerError):
    """The disk has not answered for some time."""


class FencedError(LedgerError):
    """Another service has taken the ledger over, or may have: this one must not write to it any more."""


class UnreadableRecordError(ProrlError):
    """What is written under an id cannot be read by this release. Waiting does not help, so it is no LedgerError."""


class CancelledRolloutError(ProrlError):
    """A record was refused because the rollout's cancel is remembered: only a cancelled record may end it.

    Args:
        rollout_id: of the rollout.
        reason: why it was cancelled.
    """

    def __init__(self, rollout_id: str, reason: CancelReason) -> None:
        super().__init__(f"rollout {rollout_id} was cancelled ({reason.value}).", "Write a cancelled record.")
        self.reason = reason


class LedgerConfig(ConfigModel):
    """Where the service remembers, and for how long."""

    path: Path
    """SQLite file, on a local disk; made at the first start. Its directory must exist."""
    keep_days: float = Field(default=14.0, gt=0, allow_inf_nan=False)
    """How long a record is kept that nobody acknowledges."""
    trace_days: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """How long an id stays known after its record was released: submitting it again is a duplicate until then."""
    budget_bytes: int = Field(default=20 << 30, gt=0)
    """What the file may hold; at most 64 MiB of log come on top. Beyond it nothing is accepted until records are
    acknowledged or expire; what was accepted before is still finished and written."""
    allow_network_filesystem: bool = False
    """Accept NFS, Lustre and the like. The ledger is slower there (a rollback journal instead of a log), and the one
    service that may write is told by a lease file beside it instead of a lock."""
    lease_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """On a network file system: after so long without a heartbeat of the service that holds the ledger, another one
    may take it over."""
    busy_seconds: float = Field(default=5.0, gt=0)
    """How long to wait for a reader of the file (a backup, a shell) that is in the way."""


class translated(contextlib.AbstractContextManager["translated"]):
    """Turn SQLite's and the system's complaints about ``path`` into ``LedgerError``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise the translation, if there is one."""
        if isinstance(error, sqlite3.Error | OSError):
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> LedgerError:
        text, code = str(error), getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest of it says where
        if code == sqlite3.SQLITE_FULL or getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
            return DiskFullError(f"{self.path}: the disk is full.", "Free space there; what was accepted is safe.")
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return DamagedLedgerError(
                f"{self.path}: not a ledger, or damaged ({text}).", "Move it away, or restore it from a backup."
            )
        if code == sqlite3.SQLITE_BUSY:
            return LedgerError(f"{self.path}: another process holds it ({text}).", "End that one: a shell, a backup.")
        return LedgerError(f"{self.path}: {text}.", "Check the disk and the file's permissions.")
