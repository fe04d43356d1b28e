"""Opening the ledger's file: one process at a time, on a disk that keeps its word, with a schema we know."""

import contextlib
import fcntl
import os
import sqlite3
from pathlib import Path

from pydantic import Field

from prorl_gym.config import ConfigModel
from prorl_gym.errors import ProrlError
from prorl_gym.rollout.filesystem import network_filesystem

LEDGER_SCHEMA = 1
"""Version of the tables. A newer one is refused: its meaning is not known here."""

_TABLES = """
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
"""


class LedgerError(ProrlError):
    """The ledger's file cannot be used: missing or full disk, corrupt or locked file, newer schema."""


class DamagedLedgerError(LedgerError):
    """It is no ledger, or not a whole one: waiting does not help."""


class LedgerConfig(ConfigModel):
    """Where the service remembers."""

    path: Path
    """SQLite file, on a local disk; made at the first start. Its directory must exist."""
    allow_network_filesystem: bool = False
    """Accept NFS, Lustre and the like, where a crash of the node can lose what was acknowledged."""
    busy_seconds: float = Field(default=5.0, gt=0)
    """How long to wait for a reader of the file (a backup, a shell) that is in the way."""


def open_ledger_file(config: LedgerConfig) -> tuple[sqlite3.Connection, int]:
    """Open or make the file and take it for this process.

    Returns:
        The connection (for the calling thread only) and the descriptor that holds the lock; closing it frees the file.

    Raises:
        LedgerError: see the class.
    """
    _check_place(config)
    lock = _take(config.path)
    try:
        with translated(config.path):
            return _connect(config), lock
    except BaseException:
        os.close(lock)
        raise


class translated(contextlib.AbstractContextManager["translated"]):
    """Turn SQLite's and the system's complaints about ``path`` into ``LedgerError``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise the translation, if there is one."""
        if isinstance(error, sqlite3.Error | OSError):
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> LedgerError:
        text = str(error)
        if "full" in text:
            return LedgerError(f"{self.path}: the disk is full.", "Free space there; what was accepted is safe.")
        if "not a database" in text or "malformed" in text:
            return DamagedLedgerError(
                f"{self.path}: not a ledger, or damaged ({text}).", "Move it away, or restore it from a backup."
            )
        return LedgerError(f"{self.path}: {text}.", "Check the disk and the file's permissions.")


def _check_place(config: LedgerConfig) -> None:
    directory = config.path.parent
    if not directory.is_dir():
        raise LedgerError(f"{config.path}: the directory {directory} does not exist.", "Make it, or set ledger.path.")
    kind = network_filesystem(directory)
    if kind is not None and not config.allow_network_filesystem:
        raise LedgerError(
            f"{config.path}: lies on a network file system ({kind}), where SQLite's log is not safe.",
            "Set ledger.path to a local disk, or ledger.allow_network_filesystem: true to take the risk.",
        )


def _take(path: Path) -> int:
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise LedgerError(
            f"{lock_path}: cannot be made ({error.strerror}).", "Make the directory writable, or set ledger.path."
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise LedgerError(
            f"{path}: another service uses it (process {holder}).", "Stop that one, or set another ledger.path."
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _connect(config: LedgerConfig) -> sqlite3.Connection:
    if not config.path.exists():
        # Records hold prompts and model output: nobody else's business.
        os.close(os.open(config.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(config.path, timeout=config.busy_seconds, isolation_level=None)
    try:
        _set_durable(connection, config.path)
        _check_schema(connection, config.path)
    except BaseException:
        connection.close()
        raise
    return connection


def _set_durable(connection: sqlite3.Connection, path: Path) -> None:
    """Ask for a write-ahead log that is synced at every commit, and check that we got it."""
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    connection.execute("PRAGMA synchronous = FULL")
    level = connection.execute("PRAGMA synchronous").fetchone()[0]
    if mode != "wal" or level != 2:
        raise LedgerError(
            f"{path}: SQLite gave journal_mode={mode}, synchronous={level} instead of wal and 2 (FULL).",
            "Use a local disk that supports shared memory files.",
        )
    connection.execute("PRAGMA foreign_keys = ON")


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        connection.executescript(
            f"BEGIN IMMEDIATE; {_TABLES} INSERT INTO schema_version VALUES ({LEDGER_SCHEMA}); COMMIT;"
        )
        return
    row = connection.execute("SELECT version FROM schema_version").fetchone() if "schema_version" in tables else None
    if row is None:
        raise LedgerError(f"{path}: an SQLite file, but not a ledger.", "Set ledger.path to a file of its own.")
    if row[0] > LEDGER_SCHEMA:
        raise LedgerError(
            f"{path}: ledger schema {row[0]} is newer than {LEDGER_SCHEMA}.", "Upgrade prorl-gym, or use another file."
        )
