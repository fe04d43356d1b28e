"""Evidence about a lost sandbox: how its init ended, according to the processes around it.

No process inside a pid namespace can end its pid 1 by a signal. So an init that SIGKILL ended was killed from outside:
by a person, by a program, or by the kernel when memory ran out. Any other end explains nothing.
"""

from dataclasses import dataclass
from signal import SIGKILL

from prorl_gym.errors import Evidence

_SIGKILL_STATUSES = (-SIGKILL, 128 + SIGKILL)
"""Of the process itself, and of the one below it whose end it passes on."""


@dataclass(frozen=True, slots=True)
class SandboxExit:
    """How the process ended that holds a sandbox."""

    code: int
    """Its exit code, or minus the signal that ended it."""
    oom_kills: int = 0
    """Processes that the kernel killed in its cgroup because that was at its limit."""

    @property
    def evidence(self) -> Evidence:
        """The evidence about the cause."""
        if self.code not in _SIGKILL_STATUSES:
            return Evidence.SANDBOX_LOST_UNEXPLAINED
        return Evidence.LIMIT_BREACHED if self.oom_kills else Evidence.SANDBOX_KILLED_OUTSIDE
