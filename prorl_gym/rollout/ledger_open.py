"""Opening the ledger's file: one process at a time, on a disk that keeps its word, with a schema we know.

On a local disk that is a write-ahead log and a lock that dies with its process. On a network file system neither can
be trusted: there it is a rollback journal, a lease file with a heartbeat, and an epoch in the database that every
transaction compares with its own.
"""

import fcntl
import os
import sqlite3
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from prorl_gym.rollout.filesystem import network_filesystem
from prorl_gym.rollout.ledger_clock import LedgerClock
from prorl_gym.rollout.ledger_file import LedgerConfig, LedgerError, LedgerInUseError, translated
from prorl_gym.rollout.ledger_guard import Mark, Reserve
from prorl_gym.rollout.ledger_lease import Lease, fenced
from prorl_gym.rollout.ledger_schema import LEDGER_SCHEMA, create, migrate

_LOG_PAGES = 4096
"""The log is copied into the file when it has so many pages: pages written over and over are copied once."""

_LOG_BYTES = 64 << 20
"""The log shrinks to this after a burst."""

_PAGE_BYTES = 8192
"""A page holds several small rows, and a record of 20 kB needs three."""


@dataclass(frozen=True, slots=True)
class Guard:
    """What a local file has beside it."""

    locks: tuple[int, ...]
    """Descriptors that hold the locks. They are closed after the connection: closing any descriptor of the database
    drops the locks that SQLite holds in this process."""
    mark: Mark
    reserve: Reserve


@dataclass(slots=True)
class OpenLedger:
    """The file, taken for this process. All but ``lease`` belongs to the thread that opened it."""

    connection: sqlite3.Connection
    guard: Guard | None
    """Of a local file."""
    lease: Lease | None
    """Of one on a network file system."""
    clock: LedgerClock
    _changes: int = 0

    def begin(self) -> None:
        """Begin a transaction.

        Raises:
            FencedError: another service has the ledger by now, or may have.
        """
        self._changes = self.connection.total_changes
        if self.lease is None:
            self.connection.execute("BEGIN IMMEDIATE")
            return
        self.lease.check()
        self.connection.execute("BEGIN EXCLUSIVE")
        (epoch,) = self.connection.execute("SELECT epoch FROM marks").fetchone()
        if epoch != self.lease.epoch:
            raise fenced(self.lease.ledger)

    def probe(self) -> None:
        """Return when the disk answers: a commit that follows at once does not hang. Nothing to ask on a network."""
        if self.guard is not None:
            self.guard.mark.probe()

    def commit(self) -> None:
        """Commit the transaction and count it; one that changed nothing just ends."""
        if self.connection.total_changes == self._changes:
            self.connection.execute("ROLLBACK")  # after a look at a damaged page, SQLite refuses to commit
            return
        update = "UPDATE marks SET commits = commits + 1 RETURNING commits"
        ((commits,),) = self.connection.execute(update).fetchall()
        self.connection.execute("COMMIT")
        if self.guard is not None:
            self.guard.mark.note(commits)

    def close(self) -> None:
        """Free the file for another process."""
        try:
            self.connection.close()
        finally:
            if self.lease is not None:
                self.lease.release()
            if self.guard is not None:
                self.guard.mark.close()
                self.guard.reserve.release()
                for lock in self.guard.locks:
                    os.close(lock)


def open_ledger_file(config: LedgerConfig, *, upgrade: bool = True) -> OpenLedger:
    """Open or make the file and take it for this process.

    Args:
        config: where.
        upgrade: bring the tables of an earlier release to this one's; otherwise they are refused.

    Raises:
        LedgerError: see the class.
    """
    config = config.model_copy(update={"path": config.path.resolve()})  # SQLite puts its log beside the real file
    directory = config.path.parent
    if not directory.is_dir():
        raise LedgerError(f"{config.path}: the directory {directory} does not exist.", "Make it, or set ledger.path.")
    kind = network_filesystem(directory)
    if kind is None:
        return _open_local(config, upgrade)
    if config.allow_network_filesystem:
        return _open_on_network(config, upgrade)
    raise LedgerError(
        f"{config.path}: lies on a network file system ({kind}), where SQLite's log is not safe.",
        "Set ledger.path to a local disk, or ledger.allow_network_filesystem: true (slower, safe by a lease).",
    )


def _open_local(config: LedgerConfig, upgrade: bool) -> OpenLedger:
    path = config.path
    with ExitStack() as undo:
        locks = [_take(path)]
        undo.callback(lambda: [os.close(lock) for lock in locks])
        with translated(path):
            mark, reserve = Mark(path), Reserve(path)
            undo.callback(mark.close)
            mark.check_file()
            _make(path)
            locks.append(_take_inode(path))
            connection = _connect(config)
            undo.callback(connection.close)  # rolls back
            _set_log(connection, path)
            connection.execute("BEGIN IMMEDIATE")
            _ensure_schema(connection, path, upgrade)
            (commits, home) = connection.execute("SELECT commits, home FROM marks").fetchone()
            _refuse_twin(path, home)
            mark.check_commits(commits)
            clock = LedgerClock.resumed(connection)
            opened = OpenLedger(connection, Guard(tuple(locks), mark, reserve), None, clock)
            if upgrade:
                clock.note(connection)
                connection.execute("UPDATE marks SET home = ?", (str(path),))
            opened.commit()
            if upgrade and home != str(path):  # into the file itself: another name of it finds no log
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            reserve.hold()
        undo.pop_all()
    return opened


def _refuse_twin(path: Path, home: str | None) -> None:
    """Refuse another hard link of a ledger: its log lies beside one name only."""
    if home is not None and home != str(path) and os.path.exists(home) and os.path.samefile(home, path):
        raise LedgerError(
            f"{path}: is another name (a hard link) of the ledger {home}, whose log lies beside that name.",
            f"Set ledger.path to {home}.",
        )


def _open_on_network(config: LedgerConfig, upgrade: bool) -> OpenLedger:
    with translated(config.path):
        _make(config.path)
        connection = _connect(config)
        lease = None
        try:
            _set_journal(connection, config.path)
            # One transaction: of two that find a stale lease, the second waits here and then finds a fresh one.
            connection.execute("BEGIN EXCLUSIVE")
            claim = Lease.claim(config.path, config.lease_seconds)
            _ensure_schema(connection, config.path, upgrade)
            (epoch,) = connection.execute("SELECT epoch FROM marks").fetchone()
            lease = claim.take(epoch)
            clock = LedgerClock.resumed(connection)
            connection.execute("UPDATE marks SET epoch = ?", (lease.epoch,))
            if upgrade:
                clock.note(connection)
            connection.execute("COMMIT")
        except BaseException:
            connection.close()  # rolls back
            if lease is not None:
                lease.release()
            raise
    return OpenLedger(connection, None, lease, clock)


def _take(path: Path) -> int:
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise LedgerError(
            f"{lock_path}: cannot be made ({error.strerror}).", "Make the directory writable, or set ledger.path."
        ) from None
    _lock(lock, path)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _take_inode(path: Path) -> int:
    """Lock the database itself, which hard links share. SQLite's own locks are of another kind (``fcntl``)."""
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    _lock(lock, path)
    return lock


def _lock(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        said = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
        os.close(lock)
        holder = f" (process {said})" if said.isdigit() else ""
        raise LedgerInUseError(
            f"{path}: another service uses it{holder}.", "Stop that one, or set another ledger.path."
        ) from None


def _make(path: Path) -> None:
    if not path.exists():
        # Records hold prompts and model output: nobody else's business.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _connect(config: LedgerConfig) -> sqlite3.Connection:
    connection = sqlite3.connect(config.path, timeout=config.busy_seconds, isolation_level=None)
    # A damaged text must be readable for what it is, instead of failing every call of its batch.
    connection.text_factory = _text
    # Both only take hold in a file that is still empty.
    connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    return connection


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _set_log(connection: sqlite3.Connection, path: Path) -> None:
    """Ask for a write-ahead log that is synced at every commit, and check that we got it."""
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    connection.execute("PRAGMA synchronous = FULL")
    level = connection.execute("PRAGMA synchronous").fetchone()[0]
    if mode != "wal" or level != 2:
        raise LedgerError(
            f"{path}: SQLite gave journal_mode={mode}, synchronous={level} instead of wal and 2 (FULL).",
            "Use a local disk that supports shared memory files.",
        )
    connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")


def _set_journal(connection: sqlite3.Connection, path: Path) -> None:
    """Ask for a rollback journal whose end is synced too, and check that we got it.

    The lock is taken by every transaction (``BEGIN EXCLUSIVE``) instead of for good (``locking_mode``): who keeps it
    never looks at the file again, and would not see that another service has written.
    """
    if _has_log(path):  # of a time on a local disk; alone, so that no shared memory is needed to read it
        connection.execute("PRAGMA locking_mode = EXCLUSIVE").fetchone()
    mode = connection.execute("PRAGMA journal_mode = TRUNCATE").fetchone()[0]
    connection.execute("PRAGMA locking_mode = NORMAL").fetchone()
    connection.execute("PRAGMA synchronous = EXTRA")
    level = connection.execute("PRAGMA synchronous").fetchone()[0]
    if mode != "truncate" or level != 3:
        raise LedgerError(
            f"{path}: SQLite gave journal_mode={mode}, synchronous={level} instead of truncate and 3 (EXTRA).",
            "Stop whatever else has the file open.",
        )


def _has_log(path: Path) -> bool:
    """Tell whether the file's header asks for a write-ahead log (https://sqlite.org/fileformat2.html, offset 18)."""
    with path.open("rb") as file:
        return file.read(20)[18:] == b"\x02\x02"


def _ensure_schema(connection: sqlite3.Connection, path: Path, upgrade: bool) -> None:
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        create(connection)
        return
    row = connection.execute("SELECT version FROM schema_version").fetchone() if "schema_version" in tables else None
    if row is None:
        raise LedgerError(f"{path}: an SQLite file, but not a ledger.", "Set ledger.path to a file of its own.")
    version = row[0]
    if version > LEDGER_SCHEMA:
        raise LedgerError(
            f"{path}: ledger schema {version} is newer than {LEDGER_SCHEMA}.",
            "Upgrade prorl-gym, or use another file.",
        )
    if version < LEDGER_SCHEMA:
        if not upgrade:
            raise LedgerError(
                f"{path}: ledger schema {version} is of an earlier release.", "Start the service once: it upgrades it."
            )
        migrate(connection, version)
