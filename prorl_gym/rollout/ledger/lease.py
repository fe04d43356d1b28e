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
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from prorl_gym.process_identity import ProcessIdentity, boot_id, read_start_ticks
from prorl_gym.records import Record
from prorl_gym.rollout.ledger.ledger_config import FencedError, LedgerInUseError

_WRITE_SHARE = 0.7
"""Share of the lease for which a holder still writes after its last heartbeat: a commit takes time too."""

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


class Lease:
    """Held by this process. ``renew`` and ``require_held`` may be called from different threads."""

    def __init__(self, ledger: Path, seconds: float, holder: LeaseHolder) -> None:
        self.ledger = ledger
        self.path = _lease_path(ledger)
        self.seconds = seconds
        self.epoch = holder.epoch
        self._token = holder.token
        self._renewed = uptime()
        self._lost = False

    @classmethod
    def acquire(cls, ledger: Path, seconds: float, database_epoch: int) -> "Lease":
        """Check that the lease is free, and write its file.

        Call it inside an exclusive transaction, which must also store the lease's epoch. Raises ``LedgerInUseError``:
        another service holds it.
        """
        path, namespace = _lease_path(ledger), os.readlink("/proc/self/ns/pid")
        seen_epoch = 0
        with suppress(FileNotFoundError):
            age = _heartbeat_age(path)
            holder = _read_holder(path)
            # Known to have ended: it was a process of this kernel and namespace, and there is none like it.
            is_dead = (
                holder is not None
                and (holder.boot, holder.namespace) == (boot_id(), namespace)
                and read_start_ticks(holder.pid) != holder.start
            )
            if age < seconds and not is_dead:
                who = f"process {holder.pid} on {holder.host}" if holder else "unknown"
                raise LedgerInUseError(
                    f"{ledger}: another service uses it ({who}, heartbeat {max(age, 0):.0f} s ago).",
                    f"Stop that one, or try again when it has been silent for {seconds:g} s (ledger.lease_seconds).",
                )
            seen_epoch = holder.epoch if holder else 0
        own = ProcessIdentity.of(os.getpid())
        holder = LeaseHolder(
            host=socket.gethostname(),
            boot=boot_id(),
            namespace=namespace,
            pid=own.pid,
            start=own.start_ticks,
            token=token_hex(8),
            epoch=max(seen_epoch, database_epoch) + 1,
        )
        _write_atomically(path, holder.model_dump_json())
        return cls(ledger, seconds, holder)

    def require_held(self) -> None:
        """Raise ``FencedError`` unless this process may still write."""
        if self._lost:
            raise fenced_error(self.ledger)
        silent = uptime() - self._renewed
        if silent > self.seconds * _WRITE_SHARE:
            raise FencedError(
                f"{self.path}: could not be renewed for {silent:.0f} s, so that another service may take over.",
                "Check the file system; if the lease is still this service's, it goes on by itself.",
            )

    def renew(self) -> None:
        """Renew the heartbeat. Raises ``FencedError``: another service has the lease, or the file is gone."""
        begun = uptime()  # others count from a moment after this
        try:
            is_ours = self._has_our_token()
            if is_ours:
                os.utime(self.path)
                is_ours = self._has_our_token()
        except FileNotFoundError:
            is_ours = False
        if not is_ours:
            self._lost = True
            raise fenced_error(self.ledger)
        self._renewed = begun

    def release(self) -> None:
        """Let the next service take it at once."""
        try:
            if self._has_our_token():
                self.path.unlink()
        except OSError:  # it goes stale
            return

    def _has_our_token(self) -> bool:
        found = _read_holder(self.path)
        return found is not None and found.token == self._token


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


def uptime() -> float:
    """Return seconds since boot, those of a suspended machine included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _read_holder(path: Path) -> LeaseHolder | None:
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
