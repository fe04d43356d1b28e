"""Finding and killing a process tree, by parent links and start times; never by name."""

import os
import re
import select
import signal
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

_SECONDS = 3.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PSS = re.compile(rb"^(Pss|Pss_Shmem):\s+(\d+) kB", re.MULTILINE)


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

    def look(self, pid: int) -> Process | None:
        """Return one process, or ``None`` when there is none of that number."""
        line = self._read(f"{pid}/stat")
        if not line:
            return None
        fields = line[line.rindex(b")") + 2 :].split()  # the name before it may contain anything
        alive, stopped = fields[0] not in (b"Z", b"X"), fields[0] in (b"T", b"t")
        memory = int(fields[21]) * _PAGE
        parent = self._own if int(fields[1]) == self._adopter else int(fields[1])
        return Process(pid, parent, int(fields[19]), alive, int(fields[17]), memory, stopped)

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
        """Return a process's bytes in memory with shared pages shared out (PSS), and those of them that are shmem.

        Where the kernel does not show them, the resident size stands in. The kernel walks the whole address space
        for it: milliseconds for a large process.
        """
        try:
            fd = os.open(f"{process.pid}/smaps_rollup", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return process.resident, 0
        try:
            text = os.read(fd, 4096)
        except OSError:  # it ended, or it has no memory any more
            return 0, 0
        finally:
            os.close(fd)
        found = dict(_PSS.findall(text))
        return int(found.get(b"Pss", 0)) * 1024, int(found.get(b"Pss_Shmem", 0)) * 1024

    def open_files(self, pid: int, device: int) -> tuple[int, dict[int, int]]:
        """Look at a process's descriptors: how many there are, and the files on one device (inode -> bytes)."""
        count, found = self._descriptors(pid)
        return count, {status.st_ino: status.st_blocks * 512 for status in found if status.st_dev == device}

    def nameless_files(self, pid: int, elsewhere: Collection[int]) -> dict[tuple[int, int], int]:
        """Return the regular files that a process has open and that have no name any more: (device, inode) -> bytes.

        Args:
            pid: the process.
            elsewhere: devices whose files do not count.
        """
        return {
            (status.st_dev, status.st_ino): status.st_blocks * 512
            for status in self._descriptors(pid)[1]
            if status.st_nlink == 0 and stat.S_ISREG(status.st_mode) and status.st_dev not in elsewhere
        }

    def _descriptors(self, pid: int) -> tuple[int, list[os.stat_result]]:
        """Return how many descriptors a process has, and what is behind those that stay open meanwhile."""
        found: list[os.stat_result] = []
        try:
            fd = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return 0, found
        try:
            names = os.listdir(fd)
            for name in names:
                with suppress(OSError):  # closed meanwhile
                    found.append(os.stat(name, dir_fd=fd))
        except OSError:  # it ended between open and list
            return 0, found
        finally:
            os.close(fd)
        return len(names), found

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
