"""Identity of processes: a pid alone may be reused, a pid with its start time may not."""

import os
import signal
from dataclasses import dataclass

_OOM_SCORE = 800
"""From -1000 to 1000, of which the service has 0, normally."""


def boot_id() -> str:
    """Return the id of this boot of the kernel: pids and start times mean nothing across boots."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; ``None`` when there is none or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses and may itself contain blanks and parentheses.
    fields = text.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def shell_code(status: int) -> int:
    """Turn a wait status into an exit code, 128 + signal for a process that a signal ended, as shells do."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def be_first_victim() -> None:
    """Have the kernel pick this process and its children before the service when memory runs out.

    Raises:
        PermissionError: this process is not dumpable.
    """
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(_OOM_SCORE))


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of this boot, for ever: the pid and when it started, in clock ticks since boot."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """Take the identity of a running process.

        Raises:
            ProcessLookupError: there is no such process.
        """
        start = start_time(pid)
        if start is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, start)

    @property
    def alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        return start_time(self.pid) == self.start

    def kill(self) -> bool:
        """Send SIGKILL to this very process; ``False`` when it is gone or not ours."""
        try:
            handle = os.pidfd_open(self.pid)
        except (ProcessLookupError, PermissionError):
            return False
        try:
            # Checked after the handle is open: from here on a reused pid cannot be hit.
            if not self.alive:
                return False
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(handle)
        return True
