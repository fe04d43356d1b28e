"""The whole sandbox's memory and processes, looked at now and then from inside: there need not be a cgroup.

Runs in the guest. Resident sizes are read first: they count shared pages several times, so a sum within the budget is
within it for certain, and it costs one small file per process. Only beyond it are proportional sizes (PSS) asked for,
which share such pages out.

Memory files that a process holds without mapping them are in nobody's resident size; they are counted by their
holders' descriptors.

Policy: the largest process is killed, then the next, until the rest fits; the shell or the session that started it
lives on where it is not the hog itself. Between two looks a sandbox may overshoot: about as much as its processes can
touch in ``_QUICK`` or, from rest, ``_IDLE`` seconds. Files on tmpfs are not counted here: ``root_size`` and
``shm_size`` bound them.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence

from prorl_gym.sandbox.breach import Breach
from prorl_gym.sandbox.guest.tree import Process, ProcessTable

_QUICK = 0.1
_SLOW = 0.5
_IDLE = 1.0
"""Seconds between two looks: while memory is growing or past half of the budget, normally, and while nothing moves."""
_GROWTH = 16 << 20
"""Bytes from one look to the next that count as growing."""
_DESCRIPTORS = 20_000
"""Descriptors looked at in one go; the next look begins where this one stopped."""


class Watchdog:
    """Samples the processes below the guest.

    Args:
        table: the process table.
        root: the guest's pid.
        memory: budget of all processes together, in bytes.
        processes: processes and threads at which forking fails; 0: not limited here.
        tell: called with a child of the guest and its breach, before anything is killed.
    """

    def __init__(
        self, table: ProcessTable, root: int, memory: int, processes: int, tell: Callable[[int, Breach], None]
    ) -> None:
        self._table = table
        self._root = root
        self._memory = memory
        self._processes = processes
        self._tell = tell
        self._used = 0
        self._count = 0
        self._last_scanned = 0
        self._due = time.monotonic()
        memory_file = os.memfd_create("device")
        self._device = os.fstat(memory_file).st_dev
        os.close(memory_file)

    def wait_ms(self, busy: bool) -> int | None:
        """Return the milliseconds until the next look; ``None`` while there is nothing to look at.

        Args:
            busy: there are children that were asked for; orphans are known from the last look.
        """
        if not busy and not self._count:
            self._due = time.monotonic() + _QUICK  # so that the first look comes soon after the first child
            return None
        return max(0, int((self._due - time.monotonic()) * 1000) + 1)

    def look_if_due(self) -> None:
        """Look when it is time; kill what is over the budget."""
        if time.monotonic() >= self._due:
            self.look()

    def look(self) -> None:
        """Look now."""
        processes = self._table.descendants(self._root)
        held = self._held(processes)
        used = sum(process.resident for process in processes) + sum(held.values())
        if self._at_limit(processes):
            # The youngest process belongs to whoever is forking.
            self._tell(self._owner(max(processes, key=lambda process: process.start), processes), Breach.PROCESSES)
        if used > self._memory:
            self._relieve(processes, held)
        moved = used - self._used
        period = _QUICK if moved > _GROWTH or used > self._memory // 2 else _SLOW if moved else _IDLE
        self._used, self._count = used, len(processes)
        self._due = time.monotonic() + period

    def _relieve(self, processes: Sequence[Process], held: Mapping[int, int]) -> None:
        """Kill the largest processes until the others fit."""
        proportional = {process: self._table.proportional(process) for process in processes}
        mapped = sum(shmem for _, shmem in proportional.values())
        excess = sum(size for size, _ in proportional.values()) - self._memory
        excess += max(0, sum(held.values()) - mapped)  # what is mapped has been counted
        sizes = {process: size + held.get(process.pid, 0) for process, (size, _) in proportional.items()}
        for process in sorted(processes, key=lambda process: sizes[process], reverse=True):
            if excess <= 0:
                return
            self._tell(self._owner(process, processes), Breach.MEMORY_SANDBOX)
            self._table.kill(process)
            excess -= sizes[process]

    def _held(self, processes: Sequence[Process]) -> dict[int, int]:
        """Return the bytes of memory files by the pid of a holder; each file counts once."""
        order = sorted(processes, key=lambda process: (process.pid <= self._last_scanned, process.pid))
        seen: set[int] = set()
        held: dict[int, int] = {}
        left = _DESCRIPTORS
        for process in order:
            count, files = self._table.open_files(process.pid, self._device)
            fresh = files.keys() - seen
            seen |= fresh
            if fresh:
                held[process.pid] = sum(files[inode] for inode in fresh)
            left -= count
            self._last_scanned = process.pid
            if left < 0:
                break
        return held

    def _at_limit(self, processes: Sequence[Process]) -> bool:
        """Whether forks fail now, or are about to: some threads of our own count as well, and a look takes time."""
        threads = sum(process.threads for process in processes)
        return self._processes > 0 and threads >= max(2, self._processes - 2 - self._processes // 16)

    def _owner(self, process: Process, processes: Sequence[Process]) -> int:
        """Return the child of the guest below which a process runs."""
        by_pid = {other.pid: other for other in processes}
        while process.parent != self._root and process.parent in by_pid:
            process = by_pid[process.parent]
        return process.pid
