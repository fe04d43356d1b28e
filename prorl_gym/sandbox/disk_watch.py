"""The size of a root that is kept on disk: counted now and then by the guest, and enforced when it is used up.

A full root behaves like a full disk as far as that can be had without one: no process can write to a file any more
(RLIMIT_FSIZE becomes 0; EFBIG stands in for ENOSPC, since payloads begin with SIGXFSZ ignored), everything can be read
and removed, and writing works again as soon as there is room. Who manages to fill it further (by memory maps, by making
directories, by raising its limit again) is killed.

Between two looks a sandbox may overshoot: by what it writes in the meantime, or while a large tree is being counted. A
reserve of the disk is nobody's: when less than that is free, every root on it counts as full.
"""

import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress

from prorl_gym.sandbox.breach import Breach
from prorl_gym.sandbox.census import Census, Usage
from prorl_gym.sandbox.guest.tree import Process, ProcessTable
from prorl_gym.sandbox.protocol import SandboxLimits

_QUICK = 0.1
_SLOW = 0.5
"""Seconds between two looks: past half of the budget and while it is full, and otherwise."""
_SHARE = 4
"""A walk is followed by a rest of so many times its own length, unless the budget may be used up."""
_LONGEST = 5.0
_PIECE, _URGENT_PIECE = 0.02, 0.1
"""Seconds of one piece of a walk: the guest does nothing else meanwhile."""
_SLACK_BYTES, _SLACK_FILES = 4 << 20, 1024
"""What a full root may still grow by until who does it is killed: removing takes some room, too."""
_RESERVE = 1 << 30
_RESERVE_SHARE = 20
"""Bytes of the disk that stay free, or this part of it where that is less."""


class DiskWatch:
    """Counts a root and keeps it within its size.

    Args:
        storage: descriptor of the directory that holds everything written to the root.
        limits: its budget in bytes and in files, and the size of one file while there is room.
        table: the process table.
        root: the guest's pid.
        tell: called with a child of the guest and its breach.
        announce: called with whether the root is full, whenever that changes.
    """

    def __init__(
        self,
        storage: int,
        limits: SandboxLimits,
        table: ProcessTable,
        root: int,
        tell: Callable[[int, Breach], None],
        announce: Callable[[bool], None],
    ) -> None:
        self._storage = storage
        self._size = limits.root_size
        self._files = limits.root_files
        self._file_size = limits.file_size
        self._table = table
        self._root = root
        self._tell = tell
        self._announce = announce
        self._census = Census(storage)
        self._in_memory = _memory_devices()
        self._began = 0.0
        self._used = Usage()
        self.full = False
        """Whether the root has no room left."""
        self._level: Usage | None = None
        self._due = 0.0

    def wait_ms(self, busy: bool) -> int | None:
        """Return the milliseconds until the next look; ``None`` while nothing runs that could write.

        Args:
            busy: something runs in the sandbox.
        """
        if not busy and not self.full:
            return None
        return max(0, int((self._due - time.monotonic()) * 1000) + 1)

    def look_if_due(self) -> None:
        """Look when it is time."""
        if time.monotonic() >= self._due:
            self.look()

    def look(self) -> None:
        """Count on; judge what is known: a part that is too much is enough."""
        now = time.monotonic()
        if not self._census.under_way:
            self._began = now
        complete = self._census.proceed(_URGENT_PIECE if self._urgent() else _PIECE)
        usage = self._census.usage
        if complete:
            self._add_nameless(usage)
            self._used = usage
            self._judge(usage)
            took = time.monotonic() - self._began
            rest = max(_QUICK, took) if self._urgent() else max(_SLOW, took * _SHARE)
            self._due = time.monotonic() + min(_LONGEST, rest)
            return
        if not self.full and self._is_over(usage):
            self._enter(usage)
        self._due = time.monotonic() + (0 if self._urgent() else _PIECE)

    def hold(self, pid: int) -> None:
        """Take note of a new child: while the root is full it may not write either."""
        if self.full:
            _set_file_size(pid, 0)

    def _urgent(self) -> bool:
        return self.full or self._used.bytes > self._size // 2 or self._used.files > self._files // 2

    def _add_nameless(self, usage: Usage) -> None:
        """Count the files that were removed while a process has them open, by the descriptors of all processes."""
        held: dict[tuple[int, int], int] = {}
        for process in self._table.descendants(self._root):
            held |= self._table.nameless_files(process.readable, self._in_memory)
        usage.bytes += sum(held.values())
        usage.files += len(held)

    def _judge(self, usage: Usage) -> None:
        """Judge a whole sum."""
        if not self._is_over(usage):
            if self.full:
                self._leave()
        elif not self.full:
            self._enter(usage)
        elif self._level is not None and self._level.is_exceeded(usage, _SLACK_BYTES, _SLACK_FILES):
            self._kill_all()
        else:
            self._limit_writing(0)
            self._level = self._level or usage

    def _is_over(self, usage: Usage) -> bool:
        too_much = usage.bytes >= self._size or usage.files >= self._files
        return too_much or usage.too_deep or self._disk_runs_out()

    def _enter(self, usage: Usage) -> None:
        self.full = True
        self._announce(True)
        if usage.files >= self._files:  # making files cannot be forbidden
            self._kill_all()
            return
        for process in self._limit_writing(0):
            self._tell_owner(process)

    def _leave(self) -> None:
        self.full, self._level = False, None
        self._announce(False)
        self._limit_writing(self._file_size)

    def _kill_all(self) -> None:
        self._level = None  # what is left is the new one
        for process in self._table.descendants(self._root):
            self._tell_owner(process)
            self._table.kill(process)

    def _tell_owner(self, process: Process) -> None:
        if process.parent == self._root:
            self._tell(process.pid, Breach.DISK)

    def _limit_writing(self, size: int) -> list[Process]:
        processes = self._table.descendants(self._root)
        for process in processes:
            _set_file_size(process.pid, size)
        return processes

    def _disk_runs_out(self) -> bool:
        found = os.fstatvfs(self._storage)
        reserve = min(_RESERVE, found.f_blocks * found.f_frsize // _RESERVE_SHARE)
        return found.f_bavail * found.f_frsize < reserve


def _memory_devices() -> set[int]:
    """Return the devices of files in memory: the watchdog and sizes of their own bound them."""
    memory_file = os.memfd_create("device")
    devices = {os.fstat(memory_file).st_dev}
    os.close(memory_file)
    for path in ("/dev", "/dev/shm"):
        with suppress(OSError):
            devices.add(os.stat(path).st_dev)
    return devices


def _set_file_size(pid: int, size: int) -> None:
    """Set the soft limit of a process's files. The hard one stays: raising that again would need the host's root."""
    try:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        wanted = size if hard == resource.RLIM_INFINITY else min(size, hard)
        if soft != wanted and (size == 0 or soft == 0):  # a narrower limit of one command stays
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (wanted, hard))
    except (ProcessLookupError, PermissionError):  # it ended; or an inner container's, which is killed if it goes on
        return
