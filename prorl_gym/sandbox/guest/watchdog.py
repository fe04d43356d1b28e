"""The memory and the processes of a whole sandbox, sampled from inside: there need not be a cgroup.

Runs in the guest. One small file per process gives an upper bound: resident sizes count shared pages several
times, and the size of an address space bounds what the kernel takes to describe it. A sum within the budget is within
it for certain. Only beyond it are exact sizes read: proportional ones (PSS), page tables, mappings.

What belongs to no process counts as well: shared memory however it is kept (``seccomp_notifications``), the buffers of
sockets, and ``_DESCRIPTOR_BYTES`` bytes for each open descriptor. Locks on files have a bound of their own.

Policy: a process beyond what one may have is killed; then the largest, then the next, until the rest fits; the shell or
the session that started it lives on where it is not the hog itself. Between two checks a sandbox may overshoot: the
more room there is, the later the next check. Files on tmpfs are not counted here: ``root_size`` and ``shm_size`` bound
them.
"""

import socket
import struct
import time
from collections.abc import Callable, Sequence

from prorl_gym.sandbox.guest.process_table import Process, ProcessTable
from prorl_gym.sandbox.guest.seccomp_notifications import SharedMemoryAccount
from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import SandboxLimits

_SHORTEST, _IDLE, _LONGEST = 0.1, 0.5, 1.0
"""Seconds between two checks: at least, at least while nothing moves, and at most."""
_MAX_GROWTH_RATE = 4 << 30
"""Bytes that a sandbox is expected to touch in a second at most."""
_GRACE_SECONDS = 1.0
"""Seconds in which a process that was killed should have given its memory back; until then no other dies for it."""
_MAX_LOCKS = 16384
"""Record locks of all processes together: each is kernel memory, whose number nothing else bounds."""
_LOCK_DESCRIPTORS_PER_CHECK = 256
"""Descriptors whose locks are counted in one check; the next goes on with the next process."""
_DESCRIPTOR_BYTES = 4096
"""Bytes that an open descriptor counts for: half of a pipe (two pages and the pipe) or a socket."""

_SOCK_DIAG = 4
"""NETLINK_SOCK_DIAG"""
_BY_FAMILY = 20
"""SOCK_DIAG_BY_FAMILY"""
_REQUEST, _DUMP = 1, 0x300
_DONE, _ERROR = 3, 2
_SHOW_MEMORY = 0x20
"""UDIAG_SHOW_MEMINFO"""
_EVERY_STATE = 0xFFFFFFFF
_UNIX_MEMORY, _INET_MEMORY = 5, 7
"""Attributes with a struct sk_meminfo: UNIX_DIAG_MEMINFO and INET_DIAG_SKMEMINFO."""
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_MEMORY = struct.Struct("=8I")
"""struct sk_meminfo: received, its bound, sent, its bound, set aside, waiting to be sent, options, backlog."""
_RECEIVE = 1 << 18
_SOCKETS_USED = b"sockets: used "


class Watchdog:
    """Samples the processes below the guest. Sizes in bytes.

    ``limits.processes``: forking fails with so many; 0: not limited here. ``on_breach`` is called with a child of the
    guest and its breach, before anything is killed. ``measure_seconds`` bounds the reading of exact sizes in one check;
    processes left then count with their bounds.
    """

    def __init__(
        self,
        table: ProcessTable,
        guest_pid: int,
        limits: SandboxLimits,
        *,
        shared_memory: SharedMemoryAccount | None,
        socket_memory: Callable[[], int],
        on_breach: Callable[[int, Breach], None],
        measure_seconds: float = 1.0,
    ) -> None:
        self._measure_seconds = measure_seconds
        self._table = table
        self._guest_pid = guest_pid
        self._memory = limits.total_memory
        self._process_memory = limits.memory
        self._processes = limits.processes
        self._shared_memory = shared_memory
        self._socket_memory = socket_memory
        self._on_breach = on_breach
        self._child_limits: dict[int, int] = {}
        self._killed: dict[tuple[int, int], float] = {}
        self._locks: dict[tuple[int, int], int] = {}
        self._last_counted = 0
        self._used = 0
        self._process_count = 0
        self._due = time.monotonic()

    def next_check_ms(self, has_children: bool) -> int | None:
        """Return the milliseconds until the next check; ``None`` while there is nothing to check.

        ``has_children``: of the guest's own; orphans are known from the last check.
        """
        if not has_children and not self._process_count:
            self._due = time.monotonic() + _SHORTEST  # so that the first check comes soon after the first child
            return None
        return max(0, int((self._due - time.monotonic()) * 1000) + 1)

    def limit_child_memory(self, child: int, memory: int) -> None:
        """Give each process below a child of the guest less memory than the sandbox's processes have."""
        self._child_limits[child] = memory
        self._due = min(self._due, time.monotonic() + _SHORTEST)

    def remove_child(self, child: int) -> None:
        """Forget a child that has ended; its number may become another's."""
        self._child_limits.pop(child, None)

    def check_if_due(self) -> None:
        if time.monotonic() >= self._due:
            self.check()

    def check(self) -> None:
        processes = self._table.descendants(self._guest_pid)
        threads = sum(process.threads for process in processes)
        # Forks fail now, or are about to: some threads of our own count as well, and a check takes time.
        if self._processes > 0 and threads >= max(2, self._processes - 2 - self._processes // 16):
            youngest = max(processes, key=lambda process: process.start_ticks)  # belongs to the child that is forking
            self._on_breach(self._top_level_child(youngest, processes), Breach.PROCESSES)
        self._process_count = len(processes)
        present = {_identity(process) for process in processes}
        self._killed = {killed: when for killed, when in self._killed.items() if killed in present}
        dying = any(time.monotonic() - when < _GRACE_SECONDS for when in self._killed.values())
        processes = [process for process in processes if _identity(process) not in self._killed]
        room = self._kill_oversized(processes)
        sockets = self._socket_memory()
        used = sockets + (self._shared_memory.max_bytes if self._shared_memory else 0)
        used += sum(
            process.resident + self._table.count_descriptors(process) * _DESCRIPTOR_BYTES for process in processes
        )
        most = used + sum(self._table.estimate_max_overhead(process) for process in processes)
        if most > self._memory and not dying:
            used = self._kill_largest(processes, sockets)
        self._check_locks(processes)
        shortest = _IDLE if used == self._used else _SHORTEST
        self._used = used
        self._due = time.monotonic() + min(_LONGEST, max(shortest, min(room, self._memory - used) / _MAX_GROWTH_RATE))

    def _kill(self, process: Process, processes: Sequence[Process], breach: Breach) -> None:
        self._on_breach(self._top_level_child(process, processes), breach)
        self._killed[_identity(process)] = time.monotonic()
        self._table.kill(process)

    def _kill_oversized(self, processes: list[Process]) -> int:
        """Kill and drop processes that are too large by themselves; return the bytes that any other may still take."""
        room = self._memory
        deadline = time.monotonic() + self._measure_seconds
        for process in list(processes):
            limit = self._limit_of(process, processes)
            size = self._upper_bound(process)
            if (
                size > limit
                and time.monotonic() < deadline
                and (size := self._table.read_unreclaimable(process)) > limit
            ):
                self._kill(process, processes, Breach.MEMORY_PROCESS)
                processes.remove(process)
            else:
                room = min(room, limit - size)
        return room

    def _check_locks(self, processes: Sequence[Process]) -> None:
        """Count the locks of some processes; kill the one that holds most when all hold too many."""
        left = _LOCK_DESCRIPTORS_PER_CHECK
        for process in sorted(processes, key=lambda process: (process.pid <= self._last_counted, process.pid)):
            self._locks[_identity(process)] = self._table.count_locks(process, _MAX_LOCKS)
            self._last_counted = process.pid
            left -= self._table.count_descriptors(process)
            if left < 0:
                break
        present = {_identity(process): process for process in processes}
        self._locks = {identity: count for identity, count in self._locks.items() if identity in present}
        if sum(self._locks.values()) > _MAX_LOCKS:
            most = max(self._locks, key=lambda identity: self._locks[identity])
            self._kill(present[most], processes, Breach.MEMORY_SANDBOX)

    def _kill_largest(self, processes: Sequence[Process], sockets: int) -> int:
        """Kill the largest processes until the others fit; return what all of them had."""
        shared = self._shared_memory.bytes_by_process(processes) if self._shared_memory else {}
        deadline = time.monotonic() + self._measure_seconds
        proportional = {
            process: self._table.read_pss(process) if time.monotonic() < deadline else (self._upper_bound(process), 0)
            for process in sorted(processes, key=lambda process: process.virtual)
        }
        descriptors = {process: self._table.count_descriptors(process) for process in processes}
        mapped = sum(shmem for _, shmem in proportional.values())
        used = sum(size for size, _ in proportional.values()) + sum(descriptors.values()) * _DESCRIPTOR_BYTES + sockets
        used += max(0, sum(shared.values()) - mapped)  # what is mapped has been counted
        sizes = {
            process: size
            + shared.get(process.pid, 0)
            + descriptors[process] * (_DESCRIPTOR_BYTES + sockets // (sum(descriptors.values()) or 1))
            for process, (size, _) in proportional.items()
        }
        excess = used - self._memory
        for process in sorted(processes, key=lambda process: sizes[process], reverse=True):
            if excess <= 0:
                break
            # One that grows fast exceeds both limits between two reads: its own names the cause.
            is_oversized = self._table.read_unreclaimable(process) > self._limit_of(process, processes)
            self._kill(process, processes, Breach.MEMORY_PROCESS if is_oversized else Breach.MEMORY_SANDBOX)
            excess -= sizes[process]
        return used

    def _limit_of(self, process: Process, processes: Sequence[Process]) -> int:
        owner = self._top_level_child(process, processes) if self._child_limits else 0
        return self._child_limits.get(owner, self._process_memory)

    def _upper_bound(self, process: Process) -> int:
        return process.resident + self._table.estimate_max_overhead(process)

    def _top_level_child(self, process: Process, processes: Sequence[Process]) -> int:
        by_pid = {other.pid: other for other in processes}
        while process.parent != self._guest_pid and process.parent in by_pid:
            process = by_pid[process.parent]
        return process.pid


def _identity(process: Process) -> tuple[int, int]:
    return process.pid, process.start_ticks


class SocketMemory:
    """Queries the kernel for the bytes of all sockets. A family that it cannot report counts nothing.

    Most sandboxes have no sockets: then one line of ``/proc/net/sockstat``, which counts those in flight too, is all
    that is read.
    """

    def __init__(self, table: ProcessTable) -> None:
        self._table = table
        self._socket: socket.socket | None = None
        self._baseline = self._count_sockets()
        # Families whose query the kernel refuses are not queried again.
        unix = struct.pack("=BBHIII8s", socket.AF_UNIX, 0, 0, _EVERY_STATE, 0, _SHOW_MEMORY, b"\xff" * 8)
        self._queries = [(unix, 16, _UNIX_MEMORY)]
        for family in (socket.AF_INET, socket.AF_INET6):
            for protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP):
                inet = struct.pack("=BBBxI48s", family, protocol, 1 << (_INET_MEMORY - 1), _EVERY_STATE, bytes(48))
                self._queries.append((inet, 72, _INET_MEMORY))

    def __call__(self) -> int:
        if self._baseline is not None and self._count_sockets() == self._baseline + (self._socket is not None):
            return 0
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG)
                self._socket.settimeout(1)
            found = 0
            for question in list(self._queries):
                amount = self._query(*question)
                if amount is None:
                    self._queries.remove(question)
                else:
                    found += amount
            return found
        except OSError:  # an answer that was cut, or none at all: the next check queries again
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            return 0

    def _count_sockets(self) -> int | None:
        """Return the number of sockets in this network namespace, where the kernel shows it."""
        line = self._table.read("self/net/sockstat").partition(b"\n")[0]
        return int(line[len(_SOCKETS_USED) :]) if line.startswith(_SOCKETS_USED) else None

    def _query(self, body: bytes, skipped: int, wanted: int) -> int | None:
        assert self._socket is not None
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST | _DUMP, 0, 0) + body)
        found = 0
        while True:
            data = self._socket.recv(_RECEIVE)
            at = 0
            while at + _HEADER.size <= len(data):
                length, kind, *_ = _HEADER.unpack_from(data, at)
                if kind == _DONE:
                    return found
                if kind == _ERROR:
                    return None
                found += _read_memory(data[at + _HEADER.size + skipped : at + length], wanted)
                at += -(-length // 4) * 4


def _read_memory(attributes: bytes, wanted: int) -> int:
    at = 0
    while at + _ATTRIBUTE.size <= len(attributes):
        length, kind = _ATTRIBUTE.unpack_from(attributes, at)
        if kind == wanted:
            received, _, sent, _, set_aside, waiting, options, backlog = _MEMORY.unpack_from(attributes, at + 4)
            return received + max(sent, waiting) + set_aside + options + backlog
        at += max(4, -(-length // 4) * 4)
    return 0
