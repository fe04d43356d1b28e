"""The size of a root that is kept on disk: counted now and then by the guest, and enforced when it is used up.

A full root behaves like a full disk as far as that can be had without one: no process can write to a file any more
(RLIMIT_FSIZE becomes 0; EFBIG stands in for ENOSPC, since payloads begin with SIGXFSZ ignored), everything can be read
and removed, and writing works again as soon as there is room. A process that fills it further (by memory maps, by
making directories, by raising its limit again) is killed.

Between two checks a sandbox may overshoot: by what it writes in that time, or while a large tree is being counted. When
less than a reserve of the disk is free, every root on it counts as full.
"""

import os
import resource
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from errno import ENAMETOOLONG

from prorl_gym.sandbox.guest.process_table import Process, ProcessTable
from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import SandboxLimits

_QUICK = 0.1
_SLOW = 0.5
"""Seconds between two checks: past half of the budget and while it is full, and otherwise."""
_REST_FACTOR = 4
"""A walk is followed by a rest of so many times its own length, unless the budget may be used up."""
_MAX_WAIT_SECONDS = 5.0
_SLICE_SECONDS, _URGENT_SLICE_SECONDS = 0.02, 0.1
"""Seconds of one piece of a walk, in which the guest does nothing else."""
_SLACK_BYTES, _SLACK_FILES = 4 << 20, 1024
"""How much a full root may still grow before its processes are killed: removing takes some room, too."""
_RESTORE_PASSES = 10
"""Passes over the processes when there is room again. One that forks before it is reached hands its child the limit of
a full root, which the next pass finds. Bounded, since a payload may set that limit again and again itself."""
_RESERVE = 1 << 30
_RESERVE_FRACTION = 20
"""Bytes of the disk that stay free, or this part of it where that is less."""
_BLOCK = 512
"""Unit of st_blocks, in bytes, whatever the file system."""
_ENTRIES_PER_CLOCK_CHECK = 64
"""Entries between two looks at the clock."""


@dataclass(slots=True)
class TreeUsage:
    """Size of a directory tree."""

    bytes: int = 0
    files: int = 0
    """Directories and whatever else has a name, hard links once."""
    is_too_deep: bool = False
    """Something lies so deep that it was not counted."""


class TreeWalker:
    """Measures a directory tree, a piece at a time, again and again.

    The tree is hostile and changes during the walk. Only one directory is open at a time, and a path that is longer
    than the kernel takes (which no honest build makes) is reported instead of followed.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._walk: Iterator[None] | None = None
        self.started = 0.0
        """Monotonic time at which the last walk began."""
        self.usage = TreeUsage()
        """Sums of the walk so far."""

    def advance(self, seconds: float) -> bool:
        """Walk on for about so long; whether the walk is complete, so that ``usage`` is the whole."""
        deadline = time.monotonic() + seconds
        if self._walk is None:
            self.started = time.monotonic()
            self.usage = TreeUsage()
            self._walk = self._count(self.usage)
        for _ in self._walk:
            if time.monotonic() >= deadline:
                return False
        self._walk = None
        return True

    def _count(self, usage: TreeUsage) -> Iterator[None]:
        linked: set[int] = set()
        waiting = ["."]
        seen = 0
        while waiting:
            path = waiting.pop()
            seen += 1
            try:
                directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._top)
            except OSError as error:  # gone, or something else by now
                usage.is_too_deep |= error.errno == ENAMETOOLONG
                continue
            try:
                with os.scandir(directory) as entries:
                    for entry in entries:
                        self._add(entry, usage, linked, waiting, path)
                        seen += 1
                        if seen % _ENTRIES_PER_CLOCK_CHECK == 0:
                            yield
            finally:
                os.close(directory)
            if seen % _ENTRIES_PER_CLOCK_CHECK == 0:
                yield

    @staticmethod
    def _add(entry: "os.DirEntry[str]", usage: TreeUsage, linked: set[int], waiting: list[str], parent: str) -> None:
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:
            return
        if stat.S_ISDIR(found.st_mode):
            waiting.append(f"{parent}/{entry.name}")
        elif found.st_nlink > 1:
            if found.st_ino in linked:
                return
            linked.add(found.st_ino)
        usage.files += 1
        usage.bytes += found.st_blocks * _BLOCK


class DiskWatch:
    """Counts a root and keeps it within its size.

    ``storage_fd`` holds everything written to the root. ``on_breach`` is called with a child of the guest and its
    breach, ``on_full_change`` with whether the root is full, whenever that changes.
    """

    def __init__(
        self,
        storage_fd: int,
        limits: SandboxLimits,
        table: ProcessTable,
        guest_pid: int,
        on_breach: Callable[[int, Breach], None],
        on_full_change: Callable[[bool], None],
    ) -> None:
        self._storage = storage_fd
        self._size = limits.root_size
        self._files = limits.root_inodes
        self._file_size = limits.file_size
        self._table = table
        self._guest_pid = guest_pid
        self._on_breach = on_breach
        self._on_full_change = on_full_change
        self._walker = TreeWalker(storage_fd)
        self._excluded_devices = _memory_devices()
        self._used = TreeUsage()
        self.is_full = False
        """Whether the root has no room left."""
        self._usage_when_full: TreeUsage | None = None
        self._due = 0.0

    def next_check_ms(self, is_running: bool) -> int | None:
        """Return the milliseconds until the next check; ``None`` while nothing runs that could write."""
        if not is_running and not self.is_full:
            return None
        return max(0, int((self._due - time.monotonic()) * 1000) + 1)

    def check_if_due(self) -> None:
        if time.monotonic() >= self._due:
            self.check()

    def check(self) -> None:
        """Continue the walk and enforce the budget; a partial sum that exceeds it is enough."""
        complete = self._walker.advance(_URGENT_SLICE_SECONDS if self._is_urgent() else _SLICE_SECONDS)
        usage = self._walker.usage
        if complete:
            held: dict[tuple[int, int], int] = {}  # files that were removed while a process has them open
            for process in self._table.descendants(self._guest_pid):
                held |= self._table.unlinked_files(process.procfs_id, self._excluded_devices)
            usage.bytes += sum(held.values())
            usage.files += len(held)
            self._used = usage
            self._enforce(usage)
            took = time.monotonic() - self._walker.started
            rest = max(_QUICK, took) if self._is_urgent() else max(_SLOW, took * _REST_FACTOR)
            self._due = time.monotonic() + min(_MAX_WAIT_SECONDS, rest)
            return
        if not self.is_full and self._is_over(usage):
            self._enter_full(usage)
        self._due = time.monotonic() + (0 if self._is_urgent() else _SLICE_SECONDS)

    def limit_new_child(self, pid: int) -> None:
        """Forbid a new child (0: this process) to write while the root is full. Call before payload code runs in it."""
        if self.is_full:
            _set_file_size_limit(pid, 0)

    def _is_urgent(self) -> bool:
        return self.is_full or self._used.bytes > self._size // 2 or self._used.files > self._files // 2

    def _enforce(self, usage: TreeUsage) -> None:
        if not self._is_over(usage):
            if self.is_full:
                self._leave_full()
        elif not self.is_full:
            self._enter_full(usage)
        elif (full := self._usage_when_full) is not None and (
            usage.bytes > full.bytes + _SLACK_BYTES or usage.files > full.files + _SLACK_FILES
        ):
            self._kill_all()
        else:
            self._forbid_writing()
            self._usage_when_full = self._usage_when_full or usage

    def _is_over(self, usage: TreeUsage) -> bool:
        if usage.bytes >= self._size or usage.files >= self._files or usage.is_too_deep:
            return True
        disk = os.fstatvfs(self._storage)
        reserve = min(_RESERVE, disk.f_blocks * disk.f_frsize // _RESERVE_FRACTION)
        return disk.f_bavail * disk.f_frsize < reserve

    def _enter_full(self, usage: TreeUsage) -> None:
        self.is_full = True
        self._on_full_change(True)
        if usage.files >= self._files:  # making files cannot be forbidden
            self._kill_all()
            return
        for process in self._forbid_writing():
            self._report_breach(process)

    def _leave_full(self) -> None:
        self.is_full, self._usage_when_full = False, None
        self._on_full_change(False)
        for _ in range(_RESTORE_PASSES):
            processes = self._table.descendants(self._guest_pid)
            if not any([_set_file_size_limit(process.pid, self._file_size) for process in processes]):
                break  # none was forbidden to write any more

    def _kill_all(self) -> None:
        self._usage_when_full = None  # what is left is the new one
        for process in self._table.descendants(self._guest_pid):
            self._report_breach(process)
            self._table.kill(process)

    def _report_breach(self, process: Process) -> None:
        if process.parent == self._guest_pid:
            self._on_breach(process.pid, Breach.DISK)

    def _forbid_writing(self) -> list[Process]:
        """Forbid all processes to write, and return them. The next check finds children that are forked meanwhile."""
        processes = self._table.descendants(self._guest_pid)
        for process in processes:
            _set_file_size_limit(process.pid, 0)
        return processes


def _memory_devices() -> set[int]:
    """Return the devices of files in memory: the watchdog and sizes of their own bound them."""
    memory_file = os.memfd_create("device")
    devices = {os.fstat(memory_file).st_dev}
    os.close(memory_file)
    for path in ("/dev", "/dev/shm"):
        with suppress(OSError):
            devices.add(os.stat(path).st_dev)
    return devices


def _set_file_size_limit(pid: int, size: int) -> bool:
    """Set the soft limit of a process's files; whether that changes it.

    The hard one stays: raising that again would need the host's root.
    """
    try:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        wanted = size if hard == resource.RLIM_INFINITY else min(size, hard)
        if soft == wanted or (size != 0 and soft != 0):  # a narrower limit of one command stays
            return False
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (wanted, hard))
    except (ProcessLookupError, PermissionError):  # it ended; or an inner container's, which is killed if it goes on
        return False
    return True
