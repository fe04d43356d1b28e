"""The files next to a ledger on a local disk: the mark of its last commit, and the disk space it keeps in reserve."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from prorl_gym.rollout.ledger.ledger_config import DamagedLedgerError

_MAX_RESERVE_BYTES = 4 << 20

_MIN_RESERVE_BYTES = 64 << 10
"""Nothing is reserved where there is space for less."""

_FREE_SPACE_DIVISOR = 16
"""At most this fraction (1/16) of the free space is reserved."""


class CommitMark:
    """The number of the last commit, in ``.mark`` next to the file.

    SQLite treats a missing or truncated write-ahead log as if it never existed, and drops its commits silently. So each
    commit is counted in the database, and the count is written to this file once the commit is on the disk. The write
    is not synced: the mark may fall behind after a power cut, and is never ahead of the disk.

    Args:
        ledger: path of the database.
    """

    def __init__(self, ledger: Path) -> None:
        self.path = ledger.with_name(ledger.name + ".mark")
        self._ledger = ledger
        self._file: int | None = None
        self._commits = 0

    def check_file(self) -> None:
        """Refuse to create a new database in place of a missing one.

        Raises:
            DamagedLedgerError: the database is missing or empty, and files next to it show that there was one.
        """
        if self._ledger.exists() and self._ledger.stat().st_size:
            return
        log = self._ledger.with_name(self._ledger.name + "-wal")
        leftover = self.path if self._read() else log if log.exists() and log.stat().st_size else None
        if leftover is not None:
            raise DamagedLedgerError(
                f"{self._ledger}: the ledger is missing or empty, but {leftover.name} is left of it.",
                f"Put the ledger back, or remove {leftover} to begin an empty one.",
            )

    def check_commits(self, commits: int) -> None:
        """Compare the mark with the number of commits in the database.

        Raises:
            DamagedLedgerError: commits are missing.
        """
        self._commits = commits
        missing = self._read() - commits
        if missing > 0:
            raise DamagedLedgerError(
                f"{self._ledger}: its last {missing} commits are missing: the log (-wal) was removed, cut or damaged.",
                f"Put the file and its -wal back, or remove {self.path} to go on without these commits.",
            )

    def write(self, commits: int) -> None:
        """Write the number of a commit that is on the disk."""
        self._commits = commits
        self._write()

    def sync(self) -> None:
        """Write the number again and wait until it is on the disk."""
        os.fsync(self._write())

    def _write(self) -> int:
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.pwrite(self._file, b"%020d\n" % self._commits, 0)
        return self._file

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self) -> int:
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        digits = text.strip()
        return int(digits) if digits.isdigit() and len(digits) == 20 else 0


class DiskReserve:
    """Disk blocks reserved so that acknowledgements, cancels and demands can be written when the disk is full.

    Args:
        ledger: path of the database.
    """

    def __init__(self, ledger: Path) -> None:
        self._path = ledger.with_name(ledger.name + ".reserve")

    def acquire(self) -> None:
        """Reserve as much as the free space allows, within the bounds above."""
        try:
            free = os.statvfs(self._path.parent)
            have = self._path.stat().st_size if self._path.exists() else 0
            size = min(_MAX_RESERVE_BYTES, max(have, free.f_bavail * free.f_frsize // _FREE_SPACE_DIVISOR))
            if size >= max(_MIN_RESERVE_BYTES, have):
                self._allocate(size)
        except OSError:  # a full disk: there is nothing to hold
            self.release()

    @contextmanager
    def lend(self) -> Generator[bool]:
        """Free the reserved blocks for the ``with`` block, then reserve again. Yields whether there were any."""
        try:
            size = self._path.stat().st_size
        except OSError:
            yield False
            return
        self.release()
        try:
            yield True
        finally:
            self._reclaim(size)

    def release(self) -> None:
        """Free the blocks."""
        self._path.unlink(missing_ok=True)

    def _reclaim(self, size: int) -> None:
        while size >= _MIN_RESERVE_BYTES:
            try:
                self._allocate(size)
            except OSError:
                self.release()
                size //= 2
            else:
                return

    def _allocate(self, size: int) -> None:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
        finally:
            os.close(file)
