"""Answers the system calls that the filter (``seccomp``) announces to the guest before they go on (seccomp_unotify(2)).

Every SIGKILL and SIGTERM that is sent inside is recorded: an end by one is then known to be the payload's. So is what
may have one sent by the kernel (a limit of CPU time, a parent's death, a timer, a tracer's end), and an exit code that
looks like one, except by the guest's own child: that is a shell of ours, which passes on the end of its command. A
kernel that cannot announce them (before Linux 5.9) leaves such ends unexplained, as they are seen from outside.

Shared memory that no process table shows is counted when it is made. A page of a memory file or of a shared anonymous
mapping stays in memory until the last descriptor, mapping and message in a socket that refers to the whole object is
gone. A program that unmaps all but one page, or sends the descriptor to itself and closes it, holds what neither its
resident size nor its descriptors show. So:

- ``memfd_create`` returns a file without a name in ``/dev/shm``, whose size holds for it however it is kept. Such a
  file has no seals. Where ``/dev/shm`` has no size of its own, no payload has the call.
- A shared anonymous mapping counts with the whole length it was made with for as long as any process has a page of it
  mapped: no process can have it otherwise. One that does not fit into the sandbox's memory any more is refused.

Where nothing is announced, payloads have no ``memfd_create``, and shared anonymous mappings that were unmapped are not
seen.
"""

import errno
import fcntl
import os
import re
import struct
import time
from collections.abc import Collection, Iterable
from itertools import product
from signal import SIGKILL, SIGTERM

from prorl_gym.sandbox.guest.process_table import Process, ProcessTable
from prorl_gym.sandbox.guest.seccomp import SignalTarget, call_name, sent_signals, signal_target

_SHM = "/dev/shm"
_MEASURE_SECONDS = 1.0
"""Seconds that looking for mappings may take; an object that was not come to counts as it did."""
_CHECK_FRACTION = 8
"""Mappings are not looked for while all that were ever made take less than this part of the sandbox's memory."""
_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) +/dev/zero \(deleted\)$", re.MULTILINE
)
_MFD_ALLOWED = 0x1B
"""Flags that ``memfd_create`` may have: all but huge pages."""
_PAGE = os.sysconf("SC_PAGE_SIZE")

_OF_OWN_PROCESS = frozenset({"timer_create", "mq_notify"})
_OF_ANY_PROCESS = frozenset({"ptrace"})
"""Calls by which the kernel may signal the caller, or another process."""

_RECEIVE, _ANSWER, _ADD_DESCRIPTOR = 0xC0502100, 0xC0182101, 0x40182103
"""SECCOMP_IOCTL_NOTIF_RECV, _SEND and _ADDFD."""
_CONTINUE, _ADD_AND_ANSWER = 1, 2
"""Flags of an answer, and of a descriptor that is added."""
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
"""struct seccomp_notif: id, pid, flags, number, architecture, instruction pointer, arguments."""
_RESPONSE = struct.Struct("=QqiI")
"""struct seccomp_notif_resp: id, value, error, flags."""
_DESCRIPTOR = struct.Struct("=QIIII")
"""struct seccomp_notif_addfd: id, flags, descriptor, its number there, its flags there."""


def _answer(listener: int, notification: int, *, error: int = 0, flags: int = 0) -> None:
    fcntl.ioctl(listener, _ANSWER, _RESPONSE.pack(notification, 0, -error, flags))


class SharedMemoryAccount:
    """The shared memory objects of one sandbox.

    ``memory``: most bytes of all of them together; ``shm_size``: size that ``/dev/shm`` should have.
    """

    def __init__(self, table: ProcessTable, guest_pid: int, memory: int, shm_size: int) -> None:
        self._table = table
        self._guest_pid = guest_pid
        self._memory = memory
        self._shm_fd = _open_sized_shm(shm_size)
        memory_file = os.memfd_create("device")
        self._device = os.fstat(memory_file).st_dev
        os.close(memory_file)
        self._lengths: dict[int, int] = {}
        self._pending_mappings: list[tuple[int, int]] = []
        """Thread and length of mappings that were allowed and of which nothing has been seen yet."""
        self._max_length = 0
        self._total_created = 0

    @property
    def max_bytes(self) -> int:
        """Upper bound of the bytes that shared anonymous mappings hold."""
        return sum(self._lengths.values()) + sum(length for _, length in self._pending_mappings)

    def bytes_by_process(self, processes: Iterable[Process]) -> dict[int, int]:
        """Return the bytes of shared anonymous mappings by the pid of a process that has them; each counts once."""
        if self._total_created <= self._memory // _CHECK_FRACTION:
            return {}
        holders = self._measure_mappings(processes)
        held: dict[int, int] = {}
        for inode, length in self._lengths.items():
            if (pid := holders.get(inode)) is not None:
                held[pid] = held.get(pid, 0) + length
        return held

    def make_memory_file(self, listener: int, notification: int, flags: int) -> None:
        """Make a file and put its descriptor into the calling process, as the result of its ``memfd_create``."""
        error = errno.EINVAL if flags & ~_MFD_ALLOWED else errno.ENOSYS
        if self._shm_fd is not None and not flags & ~_MFD_ALLOWED:
            close_on_exec = os.O_CLOEXEC if flags & os.MFD_CLOEXEC else 0
            try:
                file = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o777, dir_fd=self._shm_fd)
                try:
                    given = _DESCRIPTOR.pack(notification, _ADD_AND_ANSWER, file, 0, close_on_exec)
                    fcntl.ioctl(listener, _ADD_DESCRIPTOR, given)
                    return
                finally:
                    os.close(file)
            except OSError as failure:  # EINVAL: Linux before 5.14 cannot do both at once
                error = errno.ENOSYS if failure.errno == errno.EINVAL else failure.errno or errno.EIO
        _answer(listener, notification, error=error)

    def may_map(self, thread: int, length: int) -> bool:
        length = -(-length // _PAGE) * _PAGE
        if self._pending_mappings or self.max_bytes + length > self._memory:
            self._measure_mappings(self._table.descendants(self._guest_pid), done=thread)
        if self.max_bytes + length > self._memory:
            return False
        self._pending_mappings.append((thread, length))
        self._max_length = max(self._max_length, length)
        self._total_created += length
        return True

    def _measure_mappings(self, processes: Iterable[Process], done: int = 0) -> dict[int, int]:
        """Find out which objects there are and how long each is; forget those that are gone.

        An object whose length is not known for certain counts with the largest that is possible. ``processes`` are all
        of the sandbox; ``done`` is a thread that has come back from the calls it was allowed to make. Returns the pid
        of a process that has it mapped, by object.
        """
        threads = [thread for thread, _ in self._pending_mappings]
        ended = {thread for thread in threads if thread == done or not self._table.exists(thread)}
        mapped: dict[int, int] = {}
        extents: dict[int, int] = {}
        complete = True
        deadline = time.monotonic() + _MEASURE_SECONDS
        for process in sorted(processes, key=lambda process: process.virtual):
            if time.monotonic() > deadline:
                complete = False
                break
            text = self._table.read_file(process, "maps")
            complete = complete and text is not None
            for start, end, offset, major, minor, inode in _MAPPING.findall(text or b""):
                if os.makedev(int(major, 16), int(minor, 16)) == self._device:
                    mapped.setdefault(int(inode), process.pid)
                    extent = int(offset, 16) + int(end, 16) - int(start, 16)
                    extents[int(inode)] = max(extents.get(int(inode), 0), extent)
        fresh = mapped.keys() - self._lengths.keys()
        if complete:
            self._lengths = {inode: length for inode, length in self._lengths.items() if inode in mapped}
        longest = max((length for _, length in self._pending_mappings), default=self._max_length)
        self._lengths |= {inode: max(longest, extents[inode]) for inode in fresh}
        if len(fresh) == len(self._pending_mappings):
            self._pending_mappings.clear()
        elif complete:
            self._pending_mappings = [pending for pending in self._pending_mappings if pending[0] not in ended]
        return mapped


def _open_sized_shm(shm_size: int) -> int | None:
    """Return a descriptor of ``/dev/shm`` where it is a file system of no more than this size."""
    try:
        found = os.statvfs(_SHM)
        if found.f_blocks == 0 or found.f_blocks * found.f_frsize > -(-shm_size // _PAGE) * _PAGE:
            return None
        return os.open(_SHM, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None


class KillMonitor:
    """Records which of the guest's children were sent SIGKILL or SIGTERM, and which sent one."""

    def __init__(
        self, table: ProcessTable, children: Collection[int], shared_memory: SharedMemoryAccount | None = None
    ) -> None:
        self._table = table
        self._children = children
        self._shared_memory = shared_memory
        self.filtered: set[int] = set()
        """Children that have such a filter."""
        self._struck: set[tuple[int, int]] = set()
        """Children that a signal was sent to from inside, or on request, each with that signal."""
        self._senders: set[tuple[int, int]] = set()

    def handle_notification(self, listener: int) -> None:
        """Answer one notification; a signal is sent once it is recorded."""
        notice = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, notice)
            number, thread, _, call, architecture, _, *arguments = _NOTIFICATION.unpack(notice)
            name = call_name(architecture, call)
            signals = sent_signals(name, arguments)
            if (target := signal_target(name)) is not None:
                self._record_signal(thread, target, arguments[0], signals[0])
            elif name == "memfd_create" and self._shared_memory is not None:
                return self._shared_memory.make_memory_file(listener, number, arguments[1])
            elif name == "mmap" and self._shared_memory is not None:
                if not self._shared_memory.may_map(thread, arguments[1]):
                    return _answer(listener, number, error=errno.ENOMEM)
            elif name in _OF_ANY_PROCESS or (owner := self._top_level_child(thread)) is None:
                self._add(self._struck, self._children, signals)
                self._add(self._senders, self._children, signals)
            elif name in _OF_OWN_PROCESS or owner != thread:
                self._add(self._struck, [owner] if name in _OF_OWN_PROCESS else [], signals)
                self._add(self._senders, [owner], signals)
            _answer(listener, number, flags=_CONTINUE)
        except OSError:  # the caller has ended, or was interrupted and calls again
            return

    def record_kill(self, child: int) -> None:
        """Record that the guest sends a child SIGKILL on request."""
        self._struck.add((child, SIGKILL))

    def remove_child(self, child: int, status: int) -> tuple[bool | None, bool | None]:
        """Return whether the signal that a child ended with was sent to it, and by anything below it.

        ``status``: its exit code, or minus the signal. ``None``: not known.
        """
        watched, signal = child in self.filtered, SIGTERM if status in (-SIGTERM, 128 + SIGTERM) else SIGKILL
        struck, sent = (child, signal) in self._struck, (child, signal) in self._senders
        self.filtered.discard(child)
        for pairs in (self._struck, self._senders):
            pairs -= {(child, SIGKILL), (child, SIGTERM)}
        return (struck, sent) if watched else (struck or None, None)

    @staticmethod
    def _add(pairs: set[tuple[int, int]], children: Iterable[int], signals: Iterable[int]) -> None:
        pairs |= set(product(children, signals))

    def _record_signal(self, sender: int, target: SignalTarget, argument: int, signal: int) -> None:
        owner = self._top_level_child(sender)
        self._add(self._senders, self._children if owner is None else [owner], [signal])
        number = struct.unpack("=i", struct.pack("=I", argument & 0xFFFFFFFF))[0]
        if target == "descriptor":
            number = self._table.read_pidfd_target(sender, number)
        if number == 0 and target == "process":
            group = self._table.read_process_group(sender)
            struck = [child for child in self._children if child == group]
        elif number in (0, -1):  # to all, or to an unknown target
            struck = list(self._children)
        else:
            struck = [child for child in self._children if self._table.read_inner_pid(child) == abs(number)]
            if target == "thread" and owner is not None:  # one of its own, mostly
                struck.append(owner)
        self._add(self._struck, struck, [signal])

    def _top_level_child(self, pid: int) -> int | None:
        while pid not in self._children:
            process = self._table.find(pid)
            if process is None or process.parent <= 0:
                return None
            pid = process.parent
        return pid
