"""The ledger's configuration and its errors."""

import contextlib
import errno
import sqlite3
from collections.abc import Generator
from pathlib import Path

from pydantic import Field

from prorl_gym.config import ConfigModel
from prorl_gym.errors import CancelReason, ProrlError


class LedgerConfig(ConfigModel):
    """The ledger's file, its size and its retention."""

    path: Path
    """SQLite file, on a local disk; created at the first start. Its directory must exist."""
    keep_days: float = Field(default=14.0, gt=0, allow_inf_nan=False)
    """How long a record is kept that is not acknowledged."""
    tombstone_days: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """How long an id stays known after its record was released; until then, submitting it again is a duplicate."""
    budget_bytes: int = Field(default=20 << 30, gt=0)
    """Largest size of the file, plus at most 64 MiB of log. Beyond it submissions are refused until records are
    acknowledged or expire; rollouts accepted before still finish and are written."""
    allow_network_filesystem: bool = False
    """Accept NFS, Lustre and the like. The ledger is slower there (a rollback journal instead of a log), and a lease
    file next to it, instead of a lock, names the one service that may write."""
    lease_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """On a network file system: time without a heartbeat of the service that holds the ledger, after which another
    service may take it over."""
    busy_seconds: float = Field(default=5.0, gt=0)
    """How long to wait for a reader that locks the file (a backup, a shell)."""


class LedgerError(ProrlError):
    """The ledger's file cannot be used: missing or full disk, corrupt or locked file, another schema."""


class DamagedLedgerError(LedgerError):
    """The file is not a ledger, or is damaged: waiting does not help."""


class LedgerInUseError(LedgerError):
    """Another service holds the ledger."""


class LedgerFullError(LedgerError):
    """Submissions are refused: the disk budget is used up, or the disk is full."""


class DiskFullError(LedgerFullError):
    """The disk is full, even if the budget is not."""


class StuckDiskError(LedgerError):
    """The disk has not answered for some time."""


class FencedError(LedgerError):
    """Another service has, or may have, taken the ledger over: this one must stop writing."""


class UnreadableRecordError(ProrlError):
    """This release cannot read what is stored under an id. Not a LedgerError, since waiting does not help."""


class CancelledRolloutError(ProrlError):
    """A record was refused because its rollout was cancelled: only a cancelled record may end it."""

    def __init__(self, rollout_id: str, reason: CancelReason) -> None:
        super().__init__(f"rollout {rollout_id} was cancelled ({reason.value}).", "Write a cancelled record.")
        self.reason = reason


@contextlib.contextmanager
def translated_errors(path: Path) -> Generator[None]:
    """Turn errors of SQLite and the system about ``path`` into ``LedgerError``."""
    try:
        yield
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
        raise _explain(path, error) from error


def _explain(path: Path, error: Exception) -> LedgerError:
    text, code = str(error), getattr(error, "sqlite_errorcode", 0) & 0xFF  # the higher bits are an extended code
    if code == sqlite3.SQLITE_FULL or getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(f"{path}: the disk is full.", "Free space there; what was accepted is safe.")
    # SQLite puts names of a broken schema into its message, whatever their bytes.
    if isinstance(error, UnicodeDecodeError) or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DamagedLedgerError(
            f"{path}: not a ledger, or damaged ({text}).", "Move it away, or restore it from a backup."
        )
    if code == sqlite3.SQLITE_BUSY:
        return LedgerError(f"{path}: another process holds it ({text}).", "End that one: a shell, a backup.")
    return LedgerError(f"{path}: {text}.", "Check the disk and the file's permissions.")
