"""Shared memory that no process table shows: the guest is notified when it is made (seccomp_unotify(2)).

A page of a memory file or of a shared anonymous mapping stays in memory until the last descriptor, mapping and message
in a socket that refers to the whole object is gone. A program that unmaps all but one page, or sends the descriptor to
itself and closes it, holds what neither its resident size nor its descriptors show. So:

- ``memfd_create`` returns a file without a name in ``/dev/shm``, whose size holds for it however it is kept. Such a
  file has no seals. Where ``/dev/shm`` has no size of its own, no payload has the call.
- A shared anonymous mapping counts with the whole length it was made with for as long as any process has a page of it
  mapped: no process can have it otherwise. One that does not fit into the sandbox's memory any more is refused.

The filter of calls asks (``seccomp``). Kernels before Linux 5.9 do not: payloads have no ``memfd_create`` there, and
shared anonymous mappings that were unmapped are not seen.
"""

import errno
import fcntl
import os
import re
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prorl_gym.sandbox.guest.process_table import Process, ProcessTable

_SHM = "/dev/shm"
_MEASURE_SECONDS = 1.0
"""Seconds that looking for mappings may take; an object that was not come to counts as it did."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ANSWER = struct.Struct("=QqiI")
_DESCRIPTOR = struct.Struct("=QIIII")
_SEND, _ADD = 0xC0182101, 0x40182103
_CONTINUE = 1
_ADD_AND_SEND = 2
_MFD_ALLOWED = 0x1B
"""Flags that ``memfd_create`` may have: all but huge pages."""
_CHECK_FRACTION = 8
"""What was ever made is not looked for while it is less than this part of the sandbox's memory."""
_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) (\S+) (\d+) +/dev/zero \(deleted\)$", re.MULTILINE)


@dataclass(slots=True)
class _PendingMapping:
    """A shared mapping that a thread was allowed to make, and of which nothing has been seen yet."""

    thread: int
    length: int


class SharedMemoryAccount:
    """The shared memory objects of one sandbox.

    Args:
        table: the process table.
        guest_pid: the guest's pid.
        memory: most bytes of all of them together.
        shm_size: size that ``/dev/shm`` should have.
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
        self._pending_mappings: list[_PendingMapping] = []
        self._max_length = 0
        self._total_created = 0

    def answer_notification(
        self, listener: int, notification_id: int, thread: int, *, is_mmap: bool, arguments: Sequence[int]
    ) -> None:
        """Answer a question about ``mmap`` or ``memfd_create``.

        Args:
            listener: where it arrived.
            notification_id: its number.
            thread: the caller.
            is_mmap: it is about ``mmap``.
            arguments: the arguments of the call.

        Raises:
            OSError: the caller has ended, or was interrupted and calls again.
        """
        if is_mmap:
            error, flags = (0, _CONTINUE) if self.may_map(thread, arguments[1]) else (-errno.ENOMEM, 0)
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(notification_id, 0, error, flags))
        else:
            self._install_memory_file(listener, notification_id, arguments[1])

    @property
    def max_bytes(self) -> int:
        """Bytes that shared anonymous mappings hold at most."""
        return sum(self._lengths.values()) + sum(creation.length for creation in self._pending_mappings)

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

    def _install_memory_file(self, listener: int, question: int, flags: int) -> None:
        """Make a file and put its descriptor into the calling process, as the result."""
        error = errno.EINVAL if flags & ~_MFD_ALLOWED else errno.ENOSYS
        if self._shm_fd is not None and not flags & ~_MFD_ALLOWED:
            close_on_exec = os.O_CLOEXEC if flags & os.MFD_CLOEXEC else 0
            try:
                file = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o777, dir_fd=self._shm_fd)
                try:
                    given = _DESCRIPTOR.pack(question, _ADD_AND_SEND, file, 0, close_on_exec)
                    fcntl.ioctl(listener, _ADD, given)
                    return
                finally:
                    os.close(file)
            except OSError as failure:  # EINVAL: Linux before 5.14 cannot do both at once
                error = errno.ENOSYS if failure.errno == errno.EINVAL else failure.errno or errno.EIO
        fcntl.ioctl(listener, _SEND, _ANSWER.pack(question, 0, -error, 0))

    def may_map(self, thread: int, length: int) -> bool:
        """Whether a mapping of this length may be made."""
        length = -(-length // _PAGE) * _PAGE
        if self._pending_mappings or self.max_bytes + length > self._memory:
            self._measure_mappings(self._table.descendants(self._guest_pid), done=thread)
        if self.max_bytes + length > self._memory:
            return False
        self._pending_mappings.append(_PendingMapping(thread, length))
        self._max_length = max(self._max_length, length)
        self._total_created += length
        return True

    def _measure_mappings(self, processes: Iterable[Process], done: int = 0) -> dict[int, int]:
        """Find out which objects there are and how long each is; forget those that are gone.

        Whose length is not known for certain counts with the largest that is possible.

        Args:
            processes: all of the sandbox.
            done: a thread that has come back from the calls it was allowed to make.

        Returns:
            The pid of a process that has it mapped, by object.
        """
        threads = [creation.thread for creation in self._pending_mappings]
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
            for start, end, offset, device, inode in _MAPPING.findall(text or b""):
                if _device(device) == self._device:
                    mapped.setdefault(int(inode), process.pid)
                    extent = int(offset, 16) + int(end, 16) - int(start, 16)
                    extents[int(inode)] = max(extents.get(int(inode), 0), extent)
        fresh = mapped.keys() - self._lengths.keys()
        if complete:
            self._lengths = {inode: length for inode, length in self._lengths.items() if inode in mapped}
        longest = max((creation.length for creation in self._pending_mappings), default=self._max_length)
        self._lengths |= {inode: max(longest, extents[inode]) for inode in fresh}
        if len(fresh) == len(self._pending_mappings):
            self._pending_mappings.clear()
        elif complete:
            self._pending_mappings = [creation for creation in self._pending_mappings if creation.thread not in ended]
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


def _device(text: bytes) -> int:
    major, _, minor = text.partition(b":")
    return os.makedev(int(major, 16), int(minor, 16))
