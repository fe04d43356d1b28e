"""Opens the ledger's file for one process: locks it, sets up SQLite, and checks the schema.

On a local disk it uses a write-ahead log and a lock that ends with the process. A network file system supports neither:
there it uses a rollback journal, a lease file with a heartbeat, and an epoch in the database, which every transaction
compares with its own.
"""

import fcntl
import os
import sqlite3
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from prorl_gym.process_identity import boot_id
from prorl_gym.rollout.ledger.lease import Lease, fenced_error, uptime
from prorl_gym.rollout.ledger.ledger_config import (
    DamagedLedgerError,
    LedgerConfig,
    LedgerError,
    LedgerInUseError,
    translated_errors,
)
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

_MAX_RESERVE_BYTES = 4 << 20

_MIN_RESERVE_BYTES = 64 << 10
"""Nothing is reserved where there is space for less."""

_FREE_SPACE_DIVISOR = 16
"""At most this fraction (1/16) of the free space is reserved."""


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


class CommitMark:
    """The number of the last commit, in ``.mark`` next to the file.

    SQLite treats a missing or truncated write-ahead log as if it never existed, and drops its commits silently. So each
    commit is counted in the database, and the count is written to this file once the commit is on the disk. The write
    is not synced: the mark may fall behind after a power cut, and is never ahead of the disk.
    """

    def __init__(self, ledger: Path) -> None:
        self.path = ledger.with_name(ledger.name + ".mark")
        self._ledger = ledger
        self._file: int | None = None
        self._commits = 0

    def check_file(self) -> None:
        """Raise ``DamagedLedgerError`` if the database is missing or empty, and other files show that there was one."""
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
        """Compare the mark with the number of commits in the database. Raises ``DamagedLedgerError``."""
        self._commits = commits
        missing = self._read() - commits
        if missing > 0:
            raise DamagedLedgerError(
                f"{self._ledger}: its last {missing} commits are missing: the log (-wal) was removed, cut or damaged.",
                f"Put the file and its -wal back, or remove {self.path} to go on without these commits.",
            )

    def sync(self) -> None:
        """Write the number again and wait until it is on the disk."""
        os.fsync(self.write(self._commits))

    def write(self, commits: int) -> int:
        """Write the number of a commit that is on the disk; return the file's descriptor."""
        self._commits = commits
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.pwrite(self._file, b"%020d\n" % self._commits, 0)
        return self._file

    def close(self) -> None:
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
    """Disk blocks reserved so that acknowledgements, cancels and demands can be written when the disk is full."""

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
            while size >= _MIN_RESERVE_BYTES:
                try:
                    self._allocate(size)
                    break
                except OSError:
                    self.release()
                    size //= 2

    def release(self) -> None:
        self._path.unlink(missing_ok=True)

    def _allocate(self, size: int) -> None:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
        finally:
            os.close(file)


@dataclass(slots=True)
class OpenLedger:
    """The file, locked for this process. Only the thread that opened it uses any member but ``lease``."""

    connection: sqlite3.Connection
    clock: LedgerClock
    lease: Lease | None = None
    """On a network file system only."""
    mark: CommitMark | None = None
    reserve: DiskReserve | None = None
    """Both on a local disk only."""
    locks: tuple[int, ...] = ()
    """Descriptors that hold the locks. They are closed after the connection: closing any descriptor of the database
    drops SQLite's own locks in this process."""
    _changes: int = 0
    _is_durable: bool = True
    """Whether commits are synced."""

    def begin(self, *, durable: bool = True) -> None:
        """Begin a transaction, not synced on a local disk unless ``durable``. Raises ``FencedError``."""
        self._changes = self.connection.total_changes
        if self.mark is not None and durable != self._is_durable:
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

    def commit(self) -> None:
        """Commit the transaction and count it; roll back one without changes."""
        if self.connection.total_changes == self._changes:
            self.connection.execute("ROLLBACK")  # after reading a damaged page, SQLite refuses to commit
            return
        update = "UPDATE marks SET commits = commits + 1 RETURNING commits"
        ((commits,),) = self.connection.execute(update).fetchall()
        self.connection.execute("COMMIT")
        if self.mark is not None and self._is_durable:  # the mark is never ahead of the disk
            self.mark.write(commits)

    def close(self) -> None:
        try:
            self.connection.close()
        finally:
            if self.lease is not None:
                self.lease.release()
            if self.mark is not None:
                self.mark.close()
            if self.reserve is not None:
                self.reserve.release()
            for lock in self.locks:
                os.close(lock)


def open_ledger_file(config: LedgerConfig) -> OpenLedger:
    """Open or create the file and lock it for this process. Raises ``LedgerError`` and its subclasses."""
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
            # The inode too, which hard links share. SQLite's own locks are of another kind (``fcntl``).
            locks.append(_flock(_open_file(path), path))
            connection = _connect(config)
            undo.callback(connection.close)  # rolls back
            _enable_wal(connection, path)
            connection.execute("BEGIN IMMEDIATE")
            _ensure_schema(connection, path)
            (commits, home) = connection.execute("SELECT commits, home FROM marks").fetchone()
            if home is not None and home != str(path) and os.path.exists(home) and os.path.samefile(home, path):
                raise LedgerError(
                    f"{path}: is another name (a hard link) of the ledger {home}, whose log lies next to that name.",
                    f"Set ledger.path to {home}.",
                )
            mark.check_commits(commits)
            clock = LedgerClock.resume(connection)
            opened = OpenLedger(connection, clock, None, mark, reserve, tuple(locks))
            clock.save(connection)
            connection.execute("UPDATE marks SET home = ?", (str(path),))
            opened.commit()
            if home != str(path):  # into the file itself: under another name there is no log
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            reserve.acquire()
        undo.pop_all()
    return opened


def _open_on_network(config: LedgerConfig) -> OpenLedger:
    with translated_errors(config.path):
        os.close(_open_file(config.path))
        connection = _connect(config)
        lease = None
        try:
            _enable_rollback_journal(connection, config.path)
            # One transaction: of two processes that find a stale lease, the second waits here and finds a fresh one.
            connection.execute("BEGIN EXCLUSIVE")
            _ensure_schema(connection, config.path)
            (epoch,) = connection.execute("SELECT epoch FROM marks").fetchone()
            lease = Lease.acquire(config.path, config.lease_seconds, epoch)
            clock = LedgerClock.resume(connection)
            connection.execute("UPDATE marks SET epoch = ?", (lease.epoch,))
            clock.save(connection)
            connection.execute("COMMIT")
        except BaseException:
            connection.close()  # rolls back
            if lease is not None:
                lease.release()
            raise
    return OpenLedger(connection, clock, lease)


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


def _flock(lock: int, path: Path) -> int:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pid = os.pread(lock, 20, 0).decode("ascii", "replace").strip()
        os.close(lock)
        holder = f" (process {pid})" if pid.isdigit() else ""
        raise LedgerInUseError(
            f"{path}: another service uses it{holder}.", "Stop that one, or set another ledger.path."
        ) from None
    return lock


def _open_file(path: Path) -> int:
    # A new one is readable by the owner only: records hold prompts and model output.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


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
    # The header's byte for a write-ahead log (https://sqlite.org/fileformat2.html, offset 18): it was on a local disk.
    # Exclusive, so that reading it needs no shared memory.
    with path.open("rb") as file:
        is_wal = file.read(20)[18:] == b"\x02\x02"
    if is_wal:
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
    """Return the type of the network file system that a directory is on; ``None``: local.

    ``mountinfo``: ``proc(5)``.
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
    path = path.resolve()
    deepest, kind = -1, ""  # the last mount whose mount point is the longest prefix of the path
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = Path(fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
        if path.is_relative_to(point) and len(point.parts) >= deepest:
            deepest, kind = len(point.parts), right.split(" ")[0]
    remote = kind in _NETWORK_TYPES or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE_TYPES)
    return kind if remote else None
