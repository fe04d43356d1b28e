"""The lease of a ledger on a network file system: a lease file with a heartbeat, and a fencing epoch.

The file ``<ledger>.lease`` names the service that may write and its epoch; its modification time is the heartbeat. All
ages are differences of modification times, so that only the file server's clock counts, never a host's. A service that
finds the heartbeat stale takes the lease inside an exclusive transaction that also raises the epoch in the database.
The former holder stops writing when it cannot renew in time, and at the latest at its next transaction, which finds
another epoch.
"""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from prorl_gym.process_identity import ProcessIdentity, boot_id, read_start_ticks
from prorl_gym.records import Record
from prorl_gym.rollout.ledger.ledger_config import FencedError, LedgerInUseError

_WRITE_SHARE = 0.7
"""Of the lease: how long after its last heartbeat a holder still writes. Less than 1: a commit takes time too."""

HEARTBEATS_PER_LEASE = 5
"""Heartbeats in one lease."""

_MAX_FILE_BYTES = 4096


class LeaseHolder(Record):
    """A service, and the epoch by which it holds the ledger."""

    host: str
    boot: str
    """Id of the kernel's boot: pids mean nothing in another one."""
    namespace: str
    """Which pid namespace the pid is of: containers of one host have their own."""
    pid: int
    start: int
    """Start time of the process: pids are used again."""
    token: str
    epoch: int

    @classmethod
    def this_process(cls, epoch: int) -> "LeaseHolder":
        """Return this process."""
        own = ProcessIdentity.of(os.getpid())
        return cls(
            host=socket.gethostname(),
            boot=boot_id(),
            namespace=_namespace(),
            pid=own.pid,
            start=own.start_ticks,
            token=token_hex(8),
            epoch=epoch,
        )

    @property
    def is_known_dead(self) -> bool:
        """Whether that process is known to have ended: it was one of this kernel, and there is none like it."""
        here = self.boot == boot_id() and self.namespace == _namespace()
        return here and read_start_ticks(self.pid) != self.start


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """The right to take the lease, as long as the database is locked."""

    ledger: Path
    seconds: float
    seen_epoch: int

    def acquire(self, database_epoch: int) -> "Lease":
        """Write the lease file. The database must have its epoch before the transaction ends."""
        holder = LeaseHolder.this_process(max(self.seen_epoch, database_epoch) + 1)
        lease = Lease(self.ledger, self.seconds, holder)
        _write_atomically(lease.path, holder.model_dump_json())
        return lease


class Lease:
    """Held by this process. ``renew`` and ``require_held`` may be called from different threads."""

    def __init__(self, ledger: Path, seconds: float, holder: LeaseHolder) -> None:
        self.ledger = ledger
        self.path = _lease_path(ledger)
        self.seconds = seconds
        self._holder = holder
        self._renewed = _now()
        self._lost = False

    @classmethod
    def claim(cls, ledger: Path, seconds: float) -> LeaseClaim:
        """Check that the lease is free. Call it inside an exclusive transaction, which must also acquire the lease.

        Raises:
            LedgerInUseError: another service holds it.
        """
        path = _lease_path(ledger)
        try:
            age = _heartbeat_age(path)
            holder = _read_holder(path)
        except FileNotFoundError:
            return LeaseClaim(ledger, seconds, 0)
        if age >= seconds or (holder is not None and holder.is_known_dead):
            return LeaseClaim(ledger, seconds, holder.epoch if holder else 0)
        who = f"process {holder.pid} on {holder.host}" if holder else "unknown"
        raise LedgerInUseError(
            f"{ledger}: another service uses it ({who}, heartbeat {max(age, 0):.0f} s ago).",
            f"Stop that one, or try again when it has been silent for {seconds:g} s (ledger.lease_seconds).",
        )

    @property
    def epoch(self) -> int:
        """The epoch by which it is held."""
        return self._holder.epoch

    def require_held(self) -> None:
        """Raise ``FencedError`` unless this process may still write."""
        if self._lost:
            raise fenced_error(self.ledger)
        silent = _now() - self._renewed
        if silent > self.seconds * _WRITE_SHARE:
            raise FencedError(
                f"{self.path}: could not be renewed for {silent:.0f} s, so that another service may take over.",
                "Check the file system; if the lease is still this service's, it goes on by itself.",
            )

    def renew(self) -> None:
        """Renew the heartbeat.

        Raises:
            FencedError: another service has the lease, or the file is gone.
            OSError: the file system does not answer as it should.
        """
        begun = _now()  # others count from a moment after this
        try:
            self._require_our_token()
            os.utime(self.path)
            self._require_our_token()
        except FileNotFoundError:
            self._lost = True
            raise fenced_error(self.ledger) from None
        self._renewed = begun

    def release(self) -> None:
        """Let the next one take it at once."""
        try:
            if self._has_our_token():
                self.path.unlink()
        except OSError:  # it goes stale
            return

    def _require_our_token(self) -> None:
        if not self._has_our_token():
            self._lost = True
            raise fenced_error(self.ledger)

    def _has_our_token(self) -> bool:
        found = _read_holder(self.path)
        return found is not None and found.token == self._holder.token


def fenced_error(ledger: Path) -> FencedError:
    """Return the error of a service that lost the lease of its ledger."""
    holder = None
    try:
        holder = _read_holder(_lease_path(ledger))
    except OSError:
        who = "its lease file is gone"
    else:
        who = f"process {holder.pid} on {holder.host}" if holder else "its lease file cannot be read"
    return FencedError(
        f"{ledger}: this service does not hold the ledger any more ({who}).",
        "Stop this service: what it accepted is in the ledger, and goes on with the one that holds it.",
    )


def _lease_path(ledger: Path) -> Path:
    return ledger.with_name(ledger.name + ".lease")


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _now() -> float:
    """Return seconds since boot, those of a suspended machine included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _read_holder(path: Path) -> LeaseHolder | None:
    """Return the holder of the lease; ``None`` when the file is not readable as one."""
    with path.open("rb") as file:
        text = file.read(_MAX_FILE_BYTES)
    try:
        return LeaseHolder.model_validate_json(text)
    except ValueError:
        return None


def _heartbeat_age(path: Path) -> float:
    """Return how long ago the heartbeat was, by the clock of the file server."""
    heartbeat = path.stat().st_mtime
    probe = path.with_name(f"{path.name}.{token_hex(4)}")
    _write_atomically(probe, "")
    try:
        return probe.stat().st_mtime - heartbeat
    finally:
        probe.unlink()


def _write_atomically(path: Path, text: str) -> None:
    """Write a whole file, or none."""
    draft = path.with_name(f"{path.name}.{token_hex(4)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
