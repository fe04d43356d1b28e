"""Finding and killing a process tree, by parent links and start times; never by name."""

import os
import re
import select
import signal
import stat
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

_KILL_SECONDS = 3.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_KILOBYTES = re.compile(rb"^(\w+):\s+(\d+) kB", re.MULTILINE)
_MAPPING_BYTES = 256
"""Bytes that the kernel takes to note one mapping (``vm_area_struct``, and its place in the tree of them)."""
_DEFAULT_MAX_MAPPINGS = 65530
"""Mappings that a process may have, where the host does not show its setting."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    start_ticks: int
    """Clock ticks since boot."""
    is_alive: bool
    """Not a zombie."""
    threads: int
    resident: int
    """Bytes in memory; shared pages count in every process."""
    virtual: int = 0
    """Bytes of address space, reserved or in use."""
    live_thread: int = 0
    """A living thread, where the first one has ended while others go on: nothing can be read through the first."""
    is_stopped: bool = False
    """By SIGSTOP or the like, or by a tracer."""

    @property
    def procfs_id(self) -> int:
        """Number under which the process's files in procfs can be read."""
        return self.live_thread or self.pid


class ProcessTable:
    """Reads a procfs through a descriptor, whatever is mounted on /proc.

    The procfs must show this process's own pid namespace. ``orphan_parent``: pid that orphans of this process's tree
    are given to, if that is another one; they count as children of this process.
    """

    def __init__(self, proc_fd: int, orphan_parent: int | None = None) -> None:
        self._own_pid = os.getpid()
        self.adopted: set[int] = set()
        """Processes whose parent is outside of this pid namespace, and that count as children of this process."""
        self._orphan_parent = orphan_parent
        self.proc_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc_fd)
        self._max_mappings = int(self.read("sys/vm/max_map_count") or _DEFAULT_MAX_MAPPINGS)

    def find(self, pid: int) -> Process | None:
        fields = self._stat(f"{pid}")
        if fields is None:
            return None
        threads, start = int(fields[17]), int(fields[19])
        alive, thread = _is_alive(fields), 0
        if not alive and threads > 1:  # its first thread has ended, and what it did goes on in the others
            for name in self._list_names(f"{pid}/task"):
                other = self._stat(name)
                if other is not None and _is_alive(other):
                    fields, alive, thread = [*other[:1], *fields[1:20], *other[20:]], True, int(name)
                    break
        stopped = fields[0] in (b"T", b"t")
        resident, virtual = int(fields[21]) * _PAGE, int(fields[20])
        is_own = int(fields[1]) == self._orphan_parent or pid in self.adopted
        parent = self._own_pid if is_own else int(fields[1])
        return Process(pid, parent, start, alive, threads, resident, virtual, thread, stopped)

    def read_cpu_seconds(self, pid: int) -> float:
        """Return the CPU time of a process, also of one that has ended and is not reaped; 0: it is gone."""
        fields = self._stat(f"{pid}")
        return 0.0 if fields is None else (int(fields[11]) + int(fields[12])) / _TICKS

    def exists(self, thread: int) -> bool:
        try:
            os.stat(f"{thread}", dir_fd=self.proc_fd)
        except OSError:
            return False
        return True

    def read_file(self, process: Process, name: str) -> bytes | None:
        """Return a file of a process: empty when it has ended, ``None`` when this process may not read it."""
        try:
            fd = os.open(f"{process.procfs_id}/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc_fd)
            try:
                return b"".join(iter(lambda: os.read(fd, _CHUNK), b""))
            finally:
                os.close(fd)
        except PermissionError:
            return None
        except OSError:
            return b""

    def _stat(self, name: str) -> list[bytes] | None:
        """Return the fields of ``stat`` from the state on."""
        line = self.read(f"{name}/stat")
        return line[line.rindex(b")") + 2 :].split() if line else None  # the name before it may contain anything

    def _list_names(self, path: str) -> list[str]:
        """Return the entries of a directory of procfs; none when its process has ended or may not be read."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.proc_fd)
            try:
                return os.listdir(fd)
            finally:
                os.close(fd)
        except OSError:
            return []

    def read_inner_pid(self, pid: int) -> int:
        """Return a process's pid in its innermost pid namespace, the one of the payloads; 0: unknown."""
        return int((self._field(pid, "status", b"NSpid:") or b"0").split()[-1])

    def read_pidfd_target(self, pid: int, descriptor: int) -> int:
        """Return the pid, in the payloads' namespace, behind a pidfd of a process; 0: unknown."""
        return int((self._field(pid, f"fdinfo/{descriptor}", b"NSpid:") or b"0").split()[-1])

    def read_process_group(self, pid: int) -> int:
        """Return a process's group; 0: unknown, or one that is not seen here."""
        fields = self._stat(f"{pid}")
        return int(fields[2]) if fields else 0

    def _field(self, pid: int, file: str, name: bytes) -> bytes:
        lines = self.read(f"{pid}/{file}").splitlines()
        return next((line.removeprefix(name) for line in lines if line.startswith(name)), b"")

    def read(self, path: str) -> bytes:
        """Return the first 8 kB of a file of the procfs; empty when there is none, or it may not be read."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.proc_fd)
            try:
                return os.read(fd, 8192)
            finally:
                os.close(fd)
        except OSError:
            return b""

    def children(self, parent: int) -> list[Process]:
        found = [self.find(int(name)) for name in os.listdir(self.proc_fd) if name.isdigit()]
        return [process for process in found if process and process.parent == parent and process.is_alive]

    def read_pss(self, process: Process) -> tuple[int, int]:
        """Return a process's bytes with shared pages shared out (PSS), and those of them that are shmem.

        Where the kernel does not show them, the resident size is used. The kernel walks the whole address space
        for it: milliseconds for a large process.
        """
        text = self.read_file(process, "smaps_rollup")
        found = _kilobytes(text or b"")
        size = process.resident if text is None else found.get(b"Pss", 0) + found.get(b"SwapPss", 0)
        return size + self._overhead(process, _kilobytes(self.read_file(process, "status") or b"")), found.get(
            b"Pss_Shmem", 0
        )

    def read_unreclaimable(self, process: Process) -> int:
        """Return a process's bytes in memory and in swap without the pages of files, which the kernel can take back."""
        found = _kilobytes(self.read_file(process, "status") or b"")
        size = sum(found.get(name, 0) for name in (b"RssAnon", b"RssShmem", b"VmSwap"))
        return size + self._overhead(process, found)

    def estimate_max_overhead(self, process: Process) -> int:
        """Return an upper bound, in bytes, of a process's page tables and mappings, from its address space alone."""
        return process.virtual // 512 + min(process.virtual // _PAGE, self._max_mappings) * _MAPPING_BYTES

    def _overhead(self, process: Process, status: Mapping[bytes, int]) -> int:
        areas = min(process.virtual // _PAGE, self._max_mappings)
        if areas * _MAPPING_BYTES > _CHUNK and (text := self.read_file(process, "maps")) is not None:
            areas = text.count(b"\n")
        return status.get(b"VmPTE", 0) + areas * _MAPPING_BYTES

    def count_descriptors(self, process: Process) -> int:
        path = f"{process.procfs_id}/fd"
        try:
            return os.stat(path, dir_fd=self.proc_fd).st_size or len(self._stat_descriptors(process.procfs_id))
        except OSError:
            return 0

    def count_locks(self, process: Process, limit: int) -> int:
        """Count the record locks that a process holds on files; stops counting beyond ``limit``."""
        found: dict[bytes, int] = {}
        for name in self._list_names(f"{process.procfs_id}/fdinfo"):
            text = self.read_file(process, f"fdinfo/{name}") or b""
            if count := text.count(b"\nlock:"):
                found[text.partition(b"ino:")[2].partition(b"\n")[0]] = count  # several descriptors show the same ones
                if sum(found.values()) > limit:
                    break
        return sum(found.values())

    def unlinked_files(self, pid: int, excluded_devices: Collection[int]) -> dict[tuple[int, int], int]:
        """Return the regular files that a process has open and that have no name any more: (device, inode) -> bytes."""
        return {
            (status.st_dev, status.st_ino): status.st_blocks * 512
            for status in self._stat_descriptors(pid)
            if status.st_nlink == 0 and stat.S_ISREG(status.st_mode) and status.st_dev not in excluded_devices
        }

    def _stat_descriptors(self, pid: int) -> list[os.stat_result]:
        found: list[os.stat_result] = []
        for name in self._list_names(f"{pid}/fd"):
            with suppress(OSError):  # closed since
                found.append(os.stat(f"{pid}/fd/{name}", dir_fd=self.proc_fd))
        return found

    def descendants(self, root: int) -> list[Process]:
        """Return the living descendants of ``root``, without itself."""
        children: dict[int, list[Process]] = {}
        for name in os.listdir(self.proc_fd):
            if name.isdigit() and (process := self.find(int(name))):
                children.setdefault(process.parent, []).append(process)
        found: list[Process] = []
        level = [root]
        while level:
            level = [child for parent in level for child in children.get(parent, ())]
            found += [process for process in level if process.is_alive]
            level = [process.pid for process in level]
        return found

    def kill(self, target: Process) -> None:
        """SIGKILL exactly this process: the descriptor pins it, the start time proves its identity."""
        try:
            pidfd = os.pidfd_open(target.pid)
        except OSError:
            return
        try:
            now = self.find(target.pid)
            if now is not None and now.start_ticks == target.start_ticks:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended by itself
        finally:
            os.close(pidfd)

    def kill_descendants(self, root: int, started_since: int = 0, excluded: Collection[int] = ()) -> bool:
        """Kill until no living descendant of ``root`` that started at tick ``started_since`` or later is left.

        Processes that fork while we look are caught by the next round; the time is bounded. ``root`` and ``excluded``
        live on. Returns whether the tree is gone.
        """
        deadline = time.monotonic() + _KILL_SECONDS
        killed: set[tuple[int, int]] = set()
        while time.monotonic() < deadline:
            found = self.descendants(root)
            victims = [
                process for process in found if process.start_ticks >= started_since and process.pid not in excluded
            ]
            if not victims:
                return True
            fresh = [process for process in victims if (process.pid, process.start_ticks) not in killed]
            for process in fresh:
                self.kill(process)
                killed.add((process.pid, process.start_ticks))
            if not fresh:  # giving back the memory of a large process takes the kernel a while
                _wait_for_end(victims[0].pid, deadline - time.monotonic())
        return False


def _is_alive(fields: Sequence[bytes]) -> bool:
    return fields[0] not in (b"Z", b"X")


def _kilobytes(text: bytes) -> dict[bytes, int]:
    """Return the bytes that lines such as ``VmPTE: 40 kB`` name."""
    return {name: int(value) * 1024 for name, value in _KILOBYTES.findall(text)}


def _wait_for_end(pid: int, seconds: float) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(max(0, seconds) * 1000)
    finally:
        os.close(pidfd)
