"""Why a sandbox is gone: what the processes around it saw of its end.

No process inside a pid namespace can end its pid 1 by a signal. So one that SIGKILL ended was killed from outside:
by a person, by a program, by the kernel for want of memory. Whatever else ended it explains nothing.
"""

from dataclasses import dataclass
from signal import SIGKILL

from prorl_gym.errors import Evidence

_KILLED = (-SIGKILL, 128 + SIGKILL)
"""Of the process itself, and of the one below it whose end it passes on."""
_STALLED = 10.0
"""Percent of the last minute in which nothing on this host made progress for want of memory."""


@dataclass(frozen=True, slots=True)
class End:
    """How the process ended that holds a sandbox."""

    code: int
    """Its exit code, or minus the signal that ended it."""
    memory_kills: int = 0
    """Processes that the kernel killed in its cgroup because that was at its limit."""

    @property
    def evidence(self) -> Evidence:
        """What it says about who is to blame."""
        if self.code not in _KILLED:
            return Evidence.SANDBOX_LOST_UNEXPLAINED
        return Evidence.LIMIT_BREACHED if self.memory_kills else Evidence.SANDBOX_KILLED_OUTSIDE


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What is known of this host's memory at one moment."""

    kills: int
    """Processes that the kernel has killed for want of memory since boot."""
    stalled: float
    """Percent of the last minute in which everything waited for memory."""

    @classmethod
    def now(cls) -> "HostMemory":
        """Read it. A kernel that does not tell is taken for one that is never short."""
        kills = next((line.split()[1] for line in _lines("/proc/vmstat") if line.startswith("oom_kill ")), "0")
        full = next((line for line in _lines("/proc/pressure/memory") if line.startswith("full ")), "")
        stalled = next((field.partition("=")[2] for field in full.split() if field.startswith("avg60=")), "0")
        return cls(int(kills), float(stalled))

    def was_short_since(self, before: "HostMemory") -> bool:
        """Whether this host was short of memory since then, or is."""
        return self.kills > before.kills or self.stalled >= _STALLED


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().splitlines()
    except OSError:
        return []
