"""Opens the ledger's file for one process: locks it, sets up SQLite, and checks the schema.

On a local disk it uses a write-ahead log and a lock that ends with the process. A network file system supports neither:
there it uses a rollback journal, a lease file with a heartbeat, and an epoch in the database, which every transaction
compares with its own.
"""

import fcntl
import os
import sqlite3
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from prorl_gym.rollout.ledger.lease import Lease, fenced_error
from prorl_gym.rollout.ledger.ledger_clock import LedgerClock
from prorl_gym.rollout.ledger.ledger_config import (
    LedgerConfig,
    LedgerError,
    LedgerInUseError,
    translated_errors,
)
from prorl_gym.rollout.ledger.sidecar_files import CommitMark, DiskReserve
from prorl_gym.rollout.ledger.sql_schema import LEDGER_SCHEMA, create_tables

_WAL_PAGES = 4096
"""Pages of the log at which it is copied into the file; a page that was written several times is copied once."""

_WAL_BYTES = 64 << 20
"""Size to which the log is truncated after a burst."""

_PAGE_BYTES = 8192
"""Page size: a page holds several small rows, and a record of 20 kB needs three."""

_NETWORK_TYPES = frozenset(
    "nfs nfs3 nfs4 cifs smb smb2 smb3 smbfs lustre gpfs mmfs beegfs ceph afs ocfs2 gfs2 orangefs pvfs2 panfs wekafs "
    "glusterfs 9p virtiofs".split()
)

_LOCAL_FUSE_TYPES = frozenset(
    "fuse.fuse-overlayfs fuse.unionfs fuse.mergerfs fuse.bindfs fuse.lxcfs fuse.encfs".split()
)
"""FUSE file systems over local files. Any other (sshfs, gcsfuse, juicefs, ...) is treated as a network file system: an
error then costs speed, not records."""


@dataclass(frozen=True, slots=True)
class LocalSidecars:
    """Files next to a local ledger."""

    locks: tuple[int, ...]
    """Descriptors that hold the locks. They are closed after the connection: closing any descriptor of the database
    drops SQLite's own locks in this process."""
    mark: CommitMark
    reserve: DiskReserve


@dataclass(slots=True)
class OpenLedger:
    """The file, locked for this process. Only the thread that opened it uses any member but ``lease``."""

    connection: sqlite3.Connection
    sidecars: LocalSidecars | None
    """On a local disk only."""
    lease: Lease | None
    """On a network file system only."""
    clock: LedgerClock
    _changes: int = 0
    _is_durable: bool = True
    """Whether commits are synced."""

    def begin(self, *, durable: bool = True) -> None:
        """Begin a transaction.

        Args:
            durable: clear it for what a power cut may lose: on a local disk, its commit is not synced.

        Raises:
            FencedError: another service holds the ledger by now, or may hold it.
        """
        self._changes = self.connection.total_changes
        if self.sidecars is not None and durable != self._is_durable:
            self._is_durable = durable
            self.connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        if self.lease is None:
            self.connection.execute("BEGIN IMMEDIATE")
            return
        self.lease.require_held()
        self.connection.execute("BEGIN EXCLUSIVE")
        (epoch,) = self.connection.execute("SELECT epoch FROM marks").fetchone()
        if epoch != self.lease.epoch:
            raise fenced_error(self.lease.ledger)

    def probe_disk(self) -> None:
        """Wait until the disk responds, so that an immediate commit does not hang. No-op on a network file system."""
        if self.sidecars is not None:
            self.sidecars.mark.sync()

    def commit(self) -> None:
        """Commit the transaction and count it; roll back one without changes."""
        if self.connection.total_changes == self._changes:
            self.connection.execute("ROLLBACK")  # after reading a damaged page, SQLite refuses to commit
            return
        update = "UPDATE marks SET commits = commits + 1 RETURNING commits"
        ((commits,),) = self.connection.execute(update).fetchall()
        self.connection.execute("COMMIT")
        if self.sidecars is not None and self._is_durable:  # the mark is never ahead of the disk
            self.sidecars.mark.write(commits)

    def close(self) -> None:
        """Release the file for another process."""
        try:
            self.connection.close()
        finally:
            if self.lease is not None:
                self.lease.release()
            if self.sidecars is not None:
                self.sidecars.mark.close()
                self.sidecars.reserve.release()
                for lock in self.sidecars.locks:
                    os.close(lock)


def open_ledger_file(config: LedgerConfig) -> OpenLedger:
    """Open or create the file and lock it for this process.

    Raises:
        LedgerError: the file cannot be used; the subclasses in ``ledger_config`` name the reasons that callers tell
        apart.
    """
    config = config.model_copy(update={"path": config.path.resolve()})  # SQLite puts its log next to the real file
    directory = config.path.parent
    if not directory.is_dir():
        raise LedgerError(f"{config.path}: the directory {directory} does not exist.", "Make it, or set ledger.path.")
    kind = network_filesystem(directory)
    if kind is None:
        return _open_local(config)
    if config.allow_network_filesystem:
        return _open_on_network(config)
    raise LedgerError(
        f"{config.path}: lies on a network file system ({kind}), where SQLite's log is not safe.",
        "Set ledger.path to a local disk, or ledger.allow_network_filesystem: true (slower, safe by a lease).",
    )


def _open_local(config: LedgerConfig) -> OpenLedger:
    path = config.path
    with ExitStack() as undo:
        locks = [_acquire_lock_file(path)]
        undo.callback(lambda: [os.close(lock) for lock in locks])
        with translated_errors(path):
            mark, reserve = CommitMark(path), DiskReserve(path)
            undo.callback(mark.close)
            mark.check_file()
            _create_file(path)
            locks.append(_lock_inode(path))
            connection = _connect(config)
            undo.callback(connection.close)  # rolls back
            _enable_wal(connection, path)
            connection.execute("BEGIN IMMEDIATE")
            _ensure_schema(connection, path)
            (commits, home) = connection.execute("SELECT commits, home FROM marks").fetchone()
            _refuse_hard_link(path, home)
            mark.check_commits(commits)
            clock = LedgerClock.resume(connection)
            opened = OpenLedger(connection, LocalSidecars(tuple(locks), mark, reserve), None, clock)
            clock.save(connection)
            connection.execute("UPDATE marks SET home = ?", (str(path),))
            opened.commit()
            if home != str(path):  # into the file itself: under another name there is no log
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            reserve.acquire()
        undo.pop_all()
    return opened


def _refuse_hard_link(path: Path, home: str | None) -> None:
    """Refuse another hard link of a ledger: its log exists next to one name only."""
    if home is not None and home != str(path) and os.path.exists(home) and os.path.samefile(home, path):
        raise LedgerError(
            f"{path}: is another name (a hard link) of the ledger {home}, whose log lies beside that name.",
            f"Set ledger.path to {home}.",
        )


def _open_on_network(config: LedgerConfig) -> OpenLedger:
    with translated_errors(config.path):
        _create_file(config.path)
        connection = _connect(config)
        lease = None
        try:
            _enable_rollback_journal(connection, config.path)
            # One transaction: of two processes that find a stale lease, the second waits here and finds a fresh one.
            connection.execute("BEGIN EXCLUSIVE")
            claim = Lease.claim(config.path, config.lease_seconds)
            _ensure_schema(connection, config.path)
            (epoch,) = connection.execute("SELECT epoch FROM marks").fetchone()
            lease = claim.acquire(epoch)
            clock = LedgerClock.resume(connection)
            connection.execute("UPDATE marks SET epoch = ?", (lease.epoch,))
            clock.save(connection)
            connection.execute("COMMIT")
        except BaseException:
            connection.close()  # rolls back
            if lease is not None:
                lease.release()
            raise
    return OpenLedger(connection, None, lease, clock)


def _acquire_lock_file(path: Path) -> int:
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise LedgerError(
            f"{lock_path}: cannot be made ({error.strerror}).", "Make the directory writable, or set ledger.path."
        ) from None
    _flock(lock, path)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _lock_inode(path: Path) -> int:
    """Lock the database's inode, which hard links share. SQLite's own locks are of another kind (``fcntl``)."""
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    _flock(lock, path)
    return lock


def _flock(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pid = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
        os.close(lock)
        holder = f" (process {pid})" if pid.isdigit() else ""
        raise LedgerInUseError(
            f"{path}: another service uses it{holder}.", "Stop that one, or set another ledger.path."
        ) from None


def _create_file(path: Path) -> None:
    if not path.exists():
        # Records hold prompts and model output: readable by the owner only.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _connect(config: LedgerConfig) -> sqlite3.Connection:
    connection = sqlite3.connect(config.path, timeout=config.busy_seconds, isolation_level=None)
    # A damaged text must decode to something, instead of failing every call of its batch.
    connection.text_factory = decode_text
    # Both only take effect in an empty file.
    connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    return connection


def decode_text(data: bytes) -> str:
    """Return the text; what is damaged in it becomes U+FFFD."""
    return data.decode("utf-8", "replace")


def _enable_wal(connection: sqlite3.Connection, path: Path) -> None:
    """Set a write-ahead log that is synced at every commit, and check that it is set."""
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    connection.execute("PRAGMA synchronous = FULL")
    level = connection.execute("PRAGMA synchronous").fetchone()[0]
    if mode != "wal" or level != 2:
        raise LedgerError(
            f"{path}: SQLite gave journal_mode={mode}, synchronous={level} instead of wal and 2 (FULL).",
            "Use a local disk that supports shared memory files.",
        )
    connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")


def _enable_rollback_journal(connection: sqlite3.Connection, path: Path) -> None:
    """Set a rollback journal whose end is synced too, and check that it is set.

    Each transaction takes the lock (``BEGIN EXCLUSIVE``) instead of holding it permanently (``locking_mode``): a
    service that holds it never rereads the file, and would miss another service's writes.
    """
    if _is_wal(path):  # it was on a local disk; exclusive, so that reading it needs no shared memory
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


def _is_wal(path: Path) -> bool:
    """Whether the file's header names a write-ahead log (https://sqlite.org/fileformat2.html, offset 18)."""
    with path.open("rb") as file:
        return file.read(20)[18:] == b"\x02\x02"


def _ensure_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables of a new file; refuse a file with tables of another kind or version."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        create_tables(connection)
        return
    is_ledger = tables >= {"schema_version", "marks"}
    row = connection.execute("SELECT version FROM schema_version").fetchone() if is_ledger else None
    if row is None:
        raise LedgerError(f"{path}: an SQLite file, but not a ledger.", "Set ledger.path to a file of its own.")
    if row[0] != LEDGER_SCHEMA:
        raise LedgerError(
            f"{path}: its ledger schema is {row[0]}; this version of prorl-gym needs {LEDGER_SCHEMA}.",
            "Start with another state directory, or use the version of prorl-gym that wrote the file.",
        )


def network_filesystem(path: Path, mountinfo: str | None = None) -> str | None:
    """Return the type of the network file system that ``path`` lies on, or ``None`` when it is local.

    Args:
        path: an existing directory.
        mountinfo: text in the form of ``/proc/self/mountinfo``, which is read by default (see ``proc(5)``).
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
    kind = _type_at(path.resolve(), mountinfo)
    remote = kind in _NETWORK_TYPES or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE_TYPES)
    return kind if remote else None


def _type_at(path: Path, mountinfo: str) -> str:
    """Return the type of the last mount whose mount point is the longest prefix of the path."""
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = Path(fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), right.split(" ")[0]
    return kind
