"""The limit that a command ran into: a closed list, with the evidence for each.

Without a cgroup, a limit is mostly an error code that only the program receives from the kernel. So a breach is named
from the strongest evidence there is:

=================  ===============================================================================================
``memory_sandbox``  fact: the watchdog killed a process of the command, since the sandbox's sum was over its budget, or
                    the kernel did at the edge of the sandbox's cgroup
``memory_process``  fact: the watchdog killed one process of the command for its own memory; else words of a program
                    whose allocation was refused
``processes``       fact when the watchdog saw the sandbox at its limit; else the words of a failed ``fork``
``disk``            fact when a file system of the sandbox, or its root on disk, was full at the command's end; else
                    words (``ENOSPC``)
``cpu``             fact: SIGXCPU ended it, or a shell reports that it ended a part of it (exit code 152)
``file_size``       fact: SIGXFSZ, likewise (153); else words (``EFBIG``) of programs that ignore the signal
``wall_clock``      fact: the service's own timeout
``output``          fact: the service left output out
``open_files``      words only (``EMFILE``): the kernel's refusal leaves no trace outside of the process
=================  ===============================================================================================

Words are searched for in the last lines that a *failed* command printed. A command that prints them can thus mislabel
its own result, and nothing else. ``disk`` and ``processes`` are only named for a command that failed: one that reached
a limit and succeeded has no breach, unless bash reports that it had to wait.
"""

import re
from collections.abc import Collection
from enum import StrEnum

_SIGXCPU, _SIGXFSZ = 24, 25
_TAIL = 4096
"""Characters at the end of the output in which words are searched for."""


class Breach(StrEnum):
    """A limit of a sandbox that a command ran into."""

    MEMORY_PROCESS = "memory_process"
    """``SandboxLimits.memory``: what one process has in memory."""
    MEMORY_SANDBOX = "memory_sandbox"
    """``SandboxLimits.total_memory``: everything that the sandbox holds in memory, its files not included."""
    PROCESSES = "processes"
    """``SandboxLimits.processes``. Bash retries a failed fork for about 15 s: this is named then, not the timeout."""
    OPEN_FILES = "open_files"
    FILE_SIZE = "file_size"
    DISK = "disk"
    """``SandboxLimits.root_size`` or ``shm_size``, in bytes or in inodes."""
    OUTPUT = "output"
    CPU = "cpu"
    WALL_CLOCK = "wall_clock"
    """The command's timeout."""


_FORK_RETRY = "fork: retry: Resource temporarily unavailable"
"""Bash, before it sleeps for 1, 2, 4 and 8 seconds."""
_PATTERNS = (
    (Breach.PROCESSES, r"fork: Resource temporarily unavailable"),
    (Breach.PROCESSES, r"BlockingIOError: \[Errno 11\]|can't start new thread|[Cc]annot fork|pthread_create failed"),
    (Breach.DISK, r"No space left on device|Disk quota exceeded"),
    (Breach.FILE_SIZE, r"File too large|File size limit exceeded"),
    (Breach.OPEN_FILES, r"Too many open files"),
    (Breach.MEMORY_PROCESS, r"\bMemoryError\b|Cannot allocate memory|std::bad_alloc|memory exhausted|[Oo]ut of memory"),
    (Breach.CPU, r"CPU time limit exceeded"),
)


def classify_breach(
    *, exit_code: int, observed: Collection[Breach], output: str = "", timed_out: bool = False, truncated: bool = False
) -> Breach | None:
    """Return the limit that a finished command ran into, or ``None``.

    ``exit_code`` is as a shell reports it, ``observed`` what the guest saw while the command ran, ``output`` what it
    printed to stderr or the terminal (only the end matters). ``timed_out``: the service ended it; ``truncated``: output
    was left out.
    """
    if Breach.MEMORY_SANDBOX in observed:
        return Breach.MEMORY_SANDBOX
    output = output[-_TAIL:]
    if _FORK_RETRY in output:  # however it ended: this explains the delay
        return Breach.PROCESSES
    if exit_code != 0 or timed_out:
        size = Breach.DISK if Breach.DISK in observed else Breach.FILE_SIZE  # a full root on disk takes no bytes either
        by_signal = {128 + _SIGXCPU: Breach.CPU, 128 + _SIGXFSZ: size}.get(exit_code)
        in_words = (breach for breach, pattern in _PATTERNS if re.search(pattern, output))
        named = by_signal or next(iter(observed), None) or next(in_words, None)
        if named is not None:
            return named
    if timed_out:
        return Breach.WALL_CLOCK
    return Breach.OUTPUT if truncated else None
