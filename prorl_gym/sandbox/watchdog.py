"""The memory and the processes of a whole sandbox, looked at now and then from inside: there need not be a cgroup.

Runs in the guest. What one small file per process says is a bound from above: resident sizes count shared pages several
times, and the size of an address space bounds what the kernel takes to describe it. A sum within the budget is within
it for certain. Only beyond it are exact sizes asked for: proportional ones (PSS), page tables, mappings.

What belongs to no process counts as well: shared memory however it is kept (``guest/shared_memory.py``), the buffers of
sockets, and ``_DESCRIPTOR`` bytes for each open descriptor. Locks on files have a bound of their own.

Policy: a process beyond what one may have is killed; then the largest, then the next, until the rest fits; the shell or
the session that started it lives on where it is not the hog itself. Between two looks a sandbox may overshoot: the more
room there is, the longer the next look may wait. Files on tmpfs are not counted here: ``root_size`` and ``shm_size``
bound them.
"""

import time
from collections.abc import Callable, Sequence

from prorl_gym.sandbox.breach import Breach
from prorl_gym.sandbox.guest.shared_memory import SharedMemory
from prorl_gym.sandbox.guest.tree import Process, ProcessTable

_SHORTEST, _RESTING, _LONGEST = 0.1, 0.5, 1.0
"""Seconds between two looks: at least, at least while nothing moves, and at most."""
_PATIENCE = 1.0
"""Seconds that exact sizes may take in one look. What is left then was made slow to read, and counts with its bound."""
_RATE = 4 << 30
"""Bytes that a sandbox is expected to touch in a second at most."""
_GRACE = 1.0
"""Seconds in which a process that was killed should have given its memory back; until then no other dies for it."""
_LOCKS = 16384
"""Record locks of all processes together: each is kernel memory, whose number nothing else bounds."""
_LOCK_DESCRIPTORS = 256
"""Descriptors whose locks are counted in one look; the next goes on with the next process."""
_DESCRIPTOR = 4096
"""What an open descriptor counts: half of a pipe (two pages and the pipe) or a socket."""


class Watchdog:
    """Samples the processes below the guest.

    Args:
        table: the process table.
        root: the guest's pid.
        memory: budget of all processes together, in bytes.
        process_memory: budget of each process.
        processes: processes and threads at which forking fails; 0: not limited here.
        shared: the shared memory objects of the sandbox.
        sockets: returns the memory of its sockets.
        tell: called with a child of the guest and its breach, before anything is killed.
    """

    def __init__(
        self,
        table: ProcessTable,
        root: int,
        *,
        memory: int,
        process_memory: int,
        processes: int,
        shared: SharedMemory | None,
        sockets: Callable[[], int],
        tell: Callable[[int, Breach], None],
    ) -> None:
        self._table = table
        self._root = root
        self._memory = memory
        self._process_memory = process_memory
        self._processes = processes
        self._shared = shared
        self._sockets = sockets
        self._tell = tell
        self._narrower: dict[int, int] = {}
        self._killed: dict[tuple[int, int], float] = {}
        self._locks: dict[tuple[int, int], int] = {}
        self._last_counted = 0
        self._used = 0
        self._count = 0
        self._due = time.monotonic()

    def wait_ms(self, busy: bool) -> int | None:
        """Return the milliseconds until the next look; ``None`` while there is nothing to look at.

        Args:
            busy: there are children that were asked for; orphans are known from the last look.
        """
        if not busy and not self._count:
            self._due = time.monotonic() + _SHORTEST  # so that the first look comes soon after the first child
            return None
        return max(0, int((self._due - time.monotonic()) * 1000) + 1)

    def bound(self, child: int, memory: int) -> None:
        """Give each process below a child of the guest less memory than the sandbox's processes have."""
        self._narrower[child] = memory
        self._due = min(self._due, time.monotonic() + _SHORTEST)

    def forget(self, child: int) -> None:
        """A child has ended; its number may become another's."""
        self._narrower.pop(child, None)

    def look_if_due(self) -> None:
        """Look when it is time; kill what is over the budget."""
        if time.monotonic() >= self._due:
            self.look()

    def look(self) -> None:
        """Look now."""
        processes = self._table.descendants(self._root)
        if self._at_limit(processes):
            # The youngest process belongs to whoever is forking.
            self._tell(self._owner(max(processes, key=lambda process: process.start), processes), Breach.PROCESSES)
        self._count = len(processes)
        dying = self._dying(processes)
        processes = [process for process in processes if _identity(process) not in self._killed]
        room = self._judge_each(processes)
        sockets = self._sockets()
        used = sockets + (self._shared.most if self._shared else 0)
        used += sum(process.resident + self._table.descriptors(process) * _DESCRIPTOR for process in processes)
        most = used + sum(self._table.most_overhead(process) for process in processes)
        if most > self._memory and not dying:
            used = self._relieve(processes, sockets)
        self._judge_locks(processes)
        shortest = _RESTING if used == self._used else _SHORTEST
        self._used = used
        self._due = time.monotonic() + min(_LONGEST, max(shortest, min(room, self._memory - used) / _RATE))

    def _dying(self, processes: Sequence[Process]) -> bool:
        """Whether what was killed lately is still giving back its memory. Forgets what is gone."""
        present = {_identity(process) for process in processes}
        self._killed = {killed: when for killed, when in self._killed.items() if killed in present}
        return any(time.monotonic() - when < _GRACE for when in self._killed.values())

    def _kill(self, process: Process, processes: Sequence[Process], breach: Breach) -> None:
        self._tell(self._owner(process, processes), breach)
        self._killed[_identity(process)] = time.monotonic()
        self._table.kill(process)

    def _judge_each(self, processes: list[Process]) -> int:
        """Kill the processes that are too large by themselves, and take them off the list.

        Returns:
            Bytes that the largest of the others may still take.
        """
        room = self._memory
        deadline = time.monotonic() + _PATIENCE
        for process in list(processes):
            owner = self._owner(process, processes) if self._narrower else 0
            limit = self._narrower.get(owner, self._process_memory)
            size = self._bound_of(process)
            if size > limit and time.monotonic() < deadline and (size := self._table.own(process)) > limit:
                self._kill(process, processes, Breach.MEMORY_PROCESS)
                processes.remove(process)
            else:
                room = min(room, limit - size)
        return room

    def _judge_locks(self, processes: Sequence[Process]) -> None:
        """Count the locks of some processes; kill the one that holds most when all hold too many."""
        if self._table.has_few_locks():
            return
        left = _LOCK_DESCRIPTORS
        for process in sorted(processes, key=lambda process: (process.pid <= self._last_counted, process.pid)):
            self._locks[_identity(process)] = self._table.locks(process, _LOCKS)
            self._last_counted = process.pid
            left -= self._table.descriptors(process)
            if left < 0:
                break
        present = {_identity(process): process for process in processes}
        self._locks = {identity: count for identity, count in self._locks.items() if identity in present}
        if sum(self._locks.values()) > _LOCKS:
            most = max(self._locks, key=lambda identity: self._locks[identity])
            self._kill(present[most], processes, Breach.MEMORY_SANDBOX)

    def _relieve(self, processes: Sequence[Process], sockets: int) -> int:
        """Kill the largest processes until the others fit; return what all of them had."""
        shared = self._shared.held(processes) if self._shared else {}
        deadline = time.monotonic() + _PATIENCE
        proportional = {
            process: self._table.proportional(process) if time.monotonic() < deadline else (self._bound_of(process), 0)
            for process in sorted(processes, key=lambda process: process.virtual)
        }
        descriptors = {process: self._table.descriptors(process) for process in processes}
        mapped = sum(shmem for _, shmem in proportional.values())
        used = sum(size for size, _ in proportional.values()) + sum(descriptors.values()) * _DESCRIPTOR + sockets
        used += max(0, sum(shared.values()) - mapped)  # what is mapped has been counted
        sizes = {
            process: size
            + shared.get(process.pid, 0)
            + descriptors[process] * (_DESCRIPTOR + sockets // (sum(descriptors.values()) or 1))
            for process, (size, _) in proportional.items()
        }
        excess = used - self._memory
        for process in sorted(processes, key=lambda process: sizes[process], reverse=True):
            if excess <= 0:
                break
            self._kill(process, processes, Breach.MEMORY_SANDBOX)
            excess -= sizes[process]
        return used

    def _bound_of(self, process: Process) -> int:
        return process.resident + self._table.most_overhead(process)

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


def _identity(process: Process) -> tuple[int, int]:
    return process.pid, process.start
