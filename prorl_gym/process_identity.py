"""Identity of processes: a pid alone may be reused, a pid with its start time may not."""

import os
import signal
from dataclasses import dataclass


def boot_id() -> str:
    """Return the id of this boot of the kernel: pids and start times mean nothing across boots."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def read_start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; ``None``: there is none, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses and may itself contain blanks and parentheses.
    fields = text.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, unique on this boot: the pid and the start time in clock ticks since boot."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """Return the identity of a running process. Raises ``ProcessLookupError``."""
        start = read_start_ticks(pid)
        if start is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, start)

    @property
    def is_alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        return read_start_ticks(self.pid) == self.start_ticks

    def kill(self) -> bool:
        """Send SIGKILL to this very process; ``False``: it is gone, or belongs to another user."""
        try:
            handle = os.pidfd_open(self.pid)
        except (ProcessLookupError, PermissionError):
            return False
        try:
            # Checked after the handle is open: from here on a reused pid cannot be hit.
            if not self.is_alive:
                return False
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(handle)
        return True
