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

_SECONDS = 3.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_KILOBYTES = re.compile(rb"^(\w+):\s+(\d+) kB", re.MULTILINE)
_AREA = 256
"""Bytes that the kernel takes to note one mapping (``vm_area_struct``, and its place in the tree of them)."""
_FEW_LOCKS = 1 << 15
"""Bytes of ``/proc/locks``, which has some 60 for each lock."""
_AREAS = 65530
"""Mappings that a process may have, where the host does not say."""
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    start: int
    """Clock ticks since boot."""
    alive: bool
    """Not a zombie."""
    threads: int
    resident: int
    """Bytes in memory; shared pages count in every process."""
    virtual: int = 0
    """Bytes of address space, reserved or in use."""
    thread: int = 0
    """A living thread, where the first one has ended while others go on: nothing can be read through the first."""

    @property
    def readable(self) -> int:
        """Number under which the process's files in procfs can be read."""
        return self.thread or self.pid

    stopped: bool = False
    """By SIGSTOP or the like, or by a tracer."""


class ProcessTable:
    """Reads a procfs through a descriptor, whatever is mounted on /proc.

    Args:
        proc_fd: descriptor of a procfs that shows this process's own pid namespace.
        adopter: pid that orphans of this process's tree are given to, if that is another one. They count as children
            of this process.
    """

    def __init__(self, proc_fd: int, adopter: int | None = None) -> None:
        self._own = os.getpid()
        self._adopter = adopter
        self._fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc_fd)
        self._areas = self._most_areas()

    def look(self, pid: int) -> Process | None:
        """Return one process, or ``None`` when there is none of that number."""
        fields = self._stat(f"{pid}")
        if fields is None:
            return None
        threads, start = int(fields[17]), int(fields[19])
        alive, thread = _is_alive(fields), 0
        if not alive and threads > 1:  # its first thread has ended, and what it did goes on in the others
            for name in self._names(f"{pid}/task"):
                other = self._stat(name)
                if other is not None and _is_alive(other):
                    fields, alive, thread = [*other[:1], *fields[1:20], *other[20:]], True, int(name)
                    break
        stopped = fields[0] in (b"T", b"t")
        resident, virtual = int(fields[21]) * _PAGE, int(fields[20])
        parent = self._own if int(fields[1]) == self._adopter else int(fields[1])
        return Process(pid, parent, start, alive, threads, resident, virtual, thread, stopped)

    def exists(self, thread: int) -> bool:
        """Whether there is a process or thread of this number."""
        try:
            os.stat(f"{thread}", dir_fd=self._fd)
        except OSError:
            return False
        return True

    def read(self, process: Process, name: str) -> bytes | None:
        """Return a file of a process: empty when it has ended, ``None`` when this process may not read it."""
        try:
            fd = os.open(f"{process.readable}/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        except PermissionError:
            return None
        except OSError:
            return b""
        try:
            pieces: list[bytes] = []
            while piece := os.read(fd, _PIECE):
                pieces.append(piece)
            return b"".join(pieces)
        except PermissionError:
            return None
        except OSError:  # it ended between open and read
            return b""
        finally:
            os.close(fd)

    def _most_areas(self) -> int:
        with suppress(OSError, ValueError):
            fd = os.open("sys/vm/max_map_count", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                return int(os.read(fd, 64))
            finally:
                os.close(fd)
        return _AREAS

    def _stat(self, name: str) -> list[bytes] | None:
        """Return the fields of ``stat`` from the state on."""
        line = self._read(f"{name}/stat")
        return line[line.rindex(b")") + 2 :].split() if line else None  # the name before it may contain anything

    def _names(self, path: str) -> list[str]:
        """Return the entries of a directory of procfs; none when its process has ended or may not be read."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return []
        try:
            return os.listdir(fd)
        except OSError:
            return []
        finally:
            os.close(fd)

    def number_inside(self, pid: int) -> int:
        """Return a process's pid in the innermost namespace that it is in: the one that payloads know; 0: unknown."""
        return int((self._field(pid, "status", b"NSpid:") or b"0").split()[-1])

    def process_behind(self, pid: int, descriptor: int) -> int:
        """Return the pid, as payloads know it, behind a pidfd of a process; 0: unknown."""
        return int((self._field(pid, f"fdinfo/{descriptor}", b"NSpid:") or b"0").split()[-1])

    def group(self, pid: int) -> int:
        """Return a process's group; 0: unknown, or one that is not seen here."""
        line = self._read(f"{pid}/stat")
        return int(line[line.rindex(b")") + 2 :].split()[2]) if line else 0

    def _field(self, pid: int, file: str, name: bytes) -> bytes:
        lines = self._read(f"{pid}/{file}").splitlines()
        return next((line.removeprefix(name) for line in lines if line.startswith(name)), b"")

    def _read(self, path: str) -> bytes:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return b""
        try:
            return os.read(fd, 8192)
        except OSError:  # it ended between open and read
            return b""
        finally:
            os.close(fd)

    def children(self, parent: int) -> list[Process]:
        """Return the living children of a process."""
        found = [self.look(int(name)) for name in os.listdir(self._fd) if name.isdigit()]
        return [process for process in found if process and process.parent == parent and process.alive]

    def proportional(self, process: Process) -> tuple[int, int]:
        """Return a process's bytes with shared pages shared out (PSS), and those of them that are shmem.

        Where the kernel does not show them, the resident size stands in. The kernel walks the whole address space
        for it: milliseconds for a large process.
        """
        text = self.read(process, "smaps_rollup")
        found = _kilobytes(text or b"")
        size = process.resident if text is None else found.get(b"Pss", 0) + found.get(b"SwapPss", 0)
        return size + self._overhead(process, _kilobytes(self.read(process, "status") or b"")), found.get(
            b"Pss_Shmem", 0
        )

    def own(self, process: Process) -> int:
        """Return a process's bytes in memory and in swap without the pages of files, which the kernel can take back."""
        found = _kilobytes(self.read(process, "status") or b"")
        size = sum(found.get(name, 0) for name in (b"RssAnon", b"RssShmem", b"VmSwap"))
        return size + self._overhead(process, found)

    def most_overhead(self, process: Process) -> int:
        """Return a bound of what the kernel takes to know where a process's memory is, from its address space alone."""
        return process.virtual // 512 + min(process.virtual // _PAGE, self._areas) * _AREA

    def _overhead(self, process: Process, status: Mapping[bytes, int]) -> int:
        """Return the bytes of page tables, and of the notes about mappings."""
        areas = min(process.virtual // _PAGE, self._areas)
        if areas * _AREA > _PIECE and (text := self.read(process, "maps")) is not None:
            areas = text.count(b"\n")
        return status.get(b"VmPTE", 0) + areas * _AREA

    def descriptors(self, process: Process) -> int:
        """Return how many descriptors a process has open."""
        path = f"{process.readable}/fd"
        try:
            return os.stat(path, dir_fd=self._fd).st_size or len(self._descriptors(process.readable))
        except OSError:
            return 0

    def has_few_locks(self) -> bool:
        """Whether all locks on files that can be seen from here, OFD locks of the whole host among them, are few."""
        left = _FEW_LOCKS
        try:
            fd = os.open("locks", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return False
        try:
            while left > 0 and (piece := os.read(fd, left)):
                left -= len(piece)
        finally:
            os.close(fd)
        return left > 0

    def locks(self, process: Process, most: int) -> int:
        """Count the record locks that a process holds on files; stops counting beyond ``most``."""
        found: dict[bytes, int] = {}
        for name in self._names(f"{process.readable}/fdinfo"):
            text = self.read(process, f"fdinfo/{name}") or b""
            if count := text.count(b"\nlock:"):
                found[text.partition(b"ino:")[2].partition(b"\n")[0]] = count  # several descriptors show the same ones
                if sum(found.values()) > most:
                    break
        return sum(found.values())

    def nameless_files(self, pid: int, elsewhere: Collection[int]) -> dict[tuple[int, int], int]:
        """Return the regular files that a process has open and that have no name any more: (device, inode) -> bytes.

        Args:
            pid: the process.
            elsewhere: devices whose files do not count.
        """
        return {
            (status.st_dev, status.st_ino): status.st_blocks * 512
            for status in self._descriptors(pid)
            if status.st_nlink == 0 and stat.S_ISREG(status.st_mode) and status.st_dev not in elsewhere
        }

    def _descriptors(self, pid: int) -> list[os.stat_result]:
        """Return what is behind the descriptors of a process, or of a thread."""
        found: list[os.stat_result] = []
        try:
            fd = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return found
        try:
            names = os.listdir(fd)
            for name in names:
                with suppress(OSError):  # closed meanwhile
                    found.append(os.stat(name, dir_fd=fd))
        except OSError:  # it ended between open and list
            return found
        finally:
            os.close(fd)
        return found

    def descendants(self, root: int) -> list[Process]:
        """Return the living descendants of ``root``, without itself."""
        children: dict[int, list[Process]] = {}
        for name in os.listdir(self._fd):
            if name.isdigit() and (process := self.look(int(name))):
                children.setdefault(process.parent, []).append(process)
        found: list[Process] = []
        level = [root]
        while level:
            level = [child for parent in level for child in children.get(parent, ())]
            found += [process for process in level if process.alive]
            level = [process.pid for process in level]
        return found

    def kill(self, target: Process) -> None:
        """SIGKILL exactly this process: the descriptor pins it, the start time proves that it is the one meant."""
        try:
            pidfd = os.pidfd_open(target.pid)
        except OSError:
            return
        try:
            now = self.look(target.pid)
            if now is not None and now.start == target.start:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended by itself
        finally:
            os.close(pidfd)

    def kill_descendants(self, root: int, since: int = 0, spared: Collection[int] = ()) -> bool:
        """Kill until no living descendant of ``root`` that started at tick ``since`` or later is left.

        Processes that fork while we look are caught by the next round; the time is bounded.

        Args:
            root: pid; it lives on.
            since: in clock ticks since boot.
            spared: pids that live on, too.

        Returns:
            Whether the tree is gone.
        """
        deadline = time.monotonic() + _SECONDS
        killed: set[tuple[int, int]] = set()
        while time.monotonic() < deadline:
            found = self.descendants(root)
            victims = [process for process in found if process.start >= since and process.pid not in spared]
            if not victims:
                return True
            fresh = [process for process in victims if (process.pid, process.start) not in killed]
            for process in fresh:
                self.kill(process)
                killed.add((process.pid, process.start))
            if not fresh:  # giving back the memory of a large process takes the kernel a while
                _wait_for_end(victims[0].pid, deadline - time.monotonic())
        return False


def _is_alive(fields: Sequence[bytes]) -> bool:
    return fields[0] not in (b"Z", b"X")


def _kilobytes(text: bytes) -> dict[bytes, int]:
    """Return the bytes that lines such as ``VmPTE: 40 kB`` name."""
    return {name: int(value) * 1024 for name, value in _KILOBYTES.findall(text)}


def _wait_for_end(pid: int, seconds: float) -> None:
    """Wait until a process that was killed is dead, but not for long."""
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
