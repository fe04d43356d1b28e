"""Shared memory that no look at processes finds: the guest is asked when it is made (seccomp_unotify(2)).

A page of a memory file or of a shared anonymous mapping stays in memory until the last descriptor, mapping and message
in a socket that refers to the whole object is gone. A program that unmaps all but one page, or sends the descriptor to
itself and closes it, holds what neither its resident size nor its descriptors show. So:

- ``memfd_create`` returns a file without a name in ``/dev/shm``, whose size holds for it however it is kept. Such a
  file has no seals. Where ``/dev/shm`` has no size of its own, no payload has the call.
- A shared anonymous mapping counts with the whole length it was made with for as long as any process has a page of it
  mapped: nobody can have it otherwise. One that does not fit into the sandbox's memory any more is refused.

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

from prorl_gym.sandbox.guest.tree import Process, ProcessTable

_SHM = "/dev/shm"
_PATIENCE = 1.0
"""Seconds that looking for mappings may take; an object that was not come to counts as it did."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ANSWER = struct.Struct("=QqiI")
_DESCRIPTOR = struct.Struct("=QIIII")
_SEND, _ADD = 0xC0182101, 0x40182103
_CONTINUE = 1
_ADD_AND_SEND = 2
_MFD_KNOWN = 0x1B
"""What ``memfd_create`` may be asked for: all but huge pages."""
_SHARE = 8
"""What was ever made is not looked for while it is less than this part of the sandbox's memory."""
_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) (\S+) (\d+) +/dev/zero \(deleted\)$", re.MULTILINE)


@dataclass(slots=True)
class _Creation:
    """A shared mapping that a thread was allowed to make, and of which nothing has been seen yet."""

    thread: int
    length: int


class SharedMemory:
    """The shared memory objects of one sandbox.

    Args:
        table: the process table.
        root: the guest's pid.
        memory: most bytes of all of them together.
        shm_size: size that ``/dev/shm`` should have.
    """

    def __init__(self, table: ProcessTable, root: int, memory: int, shm_size: int) -> None:
        self._table = table
        self._root = root
        self._memory = memory
        self._files = _open_bounded(shm_size)
        memory_file = os.memfd_create("device")
        self._device = os.fstat(memory_file).st_dev
        os.close(memory_file)
        self._lengths: dict[int, int] = {}
        self._creations: list[_Creation] = []
        self._longest = 0
        self._total = 0

    def answer(self, listener: int, question: int, thread: int, *, makes_mapping: bool, call: Sequence[int]) -> None:
        """Answer a question about ``mmap`` or ``memfd_create``.

        Args:
            listener: where it arrived.
            question: its number.
            thread: who asks.
            makes_mapping: it is about ``mmap``.
            call: the arguments of the call.

        Raises:
            OSError: who asked has ended, or was interrupted and asks again.
        """
        if makes_mapping:
            error, flags = (0, _CONTINUE) if self._admit(thread, call[1]) else (-errno.ENOMEM, 0)
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(question, 0, error, flags))
        else:
            self._give_file(listener, question, call[1])

    @property
    def most(self) -> int:
        """Bytes that shared anonymous mappings hold at most."""
        return sum(self._lengths.values()) + sum(creation.length for creation in self._creations)

    def held(self, processes: Iterable[Process]) -> dict[int, int]:
        """Return the bytes of shared anonymous mappings by the pid of a process that has them; each counts once."""
        if self._total <= self._memory // _SHARE:
            return {}
        holders = self._identify(processes)
        held: dict[int, int] = {}
        for inode, length in self._lengths.items():
            if (pid := holders.get(inode)) is not None:
                held[pid] = held.get(pid, 0) + length
        return held

    def _give_file(self, listener: int, question: int, flags: int) -> None:
        """Make a file and put its descriptor into the process that asked, as the answer."""
        error = errno.EINVAL if flags & ~_MFD_KNOWN else errno.ENOSYS
        if self._files is not None and not flags & ~_MFD_KNOWN:
            close_on_exec = os.O_CLOEXEC if flags & os.MFD_CLOEXEC else 0
            try:
                file = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o777, dir_fd=self._files)
                try:
                    given = _DESCRIPTOR.pack(question, _ADD_AND_SEND, file, 0, close_on_exec)
                    fcntl.ioctl(listener, _ADD, given)
                    return
                finally:
                    os.close(file)
            except OSError as failure:  # EINVAL: Linux before 5.14 cannot do both at once
                error = errno.ENOSYS if failure.errno == errno.EINVAL else failure.errno or errno.EIO
        fcntl.ioctl(listener, _SEND, _ANSWER.pack(question, 0, -error, 0))

    def _admit(self, thread: int, length: int) -> bool:
        """Whether a mapping of this length may be made."""
        length = -(-length // _PAGE) * _PAGE
        if self._creations or self.most + length > self._memory:
            self._identify(self._table.descendants(self._root), done=thread)
        if self.most + length > self._memory:
            return False
        self._creations.append(_Creation(thread, length))
        self._longest = max(self._longest, length)
        self._total += length
        return True

    def _identify(self, processes: Iterable[Process], done: int = 0) -> dict[int, int]:
        """Find out which objects there are and how long each is; forget those that are gone.

        Whose length is not known for certain counts with the largest that is possible.

        Args:
            processes: all of the sandbox.
            done: a thread that has come back from the calls it was allowed to make.

        Returns:
            The pid of a process that has it mapped, by object.
        """
        threads = [creation.thread for creation in self._creations]
        ended = {thread for thread in threads if thread == done or not self._table.exists(thread)}
        mapped: dict[int, int] = {}
        extents: dict[int, int] = {}
        complete = True
        deadline = time.monotonic() + _PATIENCE
        for process in sorted(processes, key=lambda process: process.virtual):
            if time.monotonic() > deadline:
                complete = False
                break
            text = self._table.read(process, "maps")
            complete = complete and text is not None
            for start, end, offset, device, inode in _MAPPING.findall(text or b""):
                if _device(device) == self._device:
                    mapped.setdefault(int(inode), process.pid)
                    extent = int(offset, 16) + int(end, 16) - int(start, 16)
                    extents[int(inode)] = max(extents.get(int(inode), 0), extent)
        fresh = mapped.keys() - self._lengths.keys()
        if complete:
            self._lengths = {inode: length for inode, length in self._lengths.items() if inode in mapped}
        longest = max((creation.length for creation in self._creations), default=self._longest)
        self._lengths |= {inode: max(longest, extents[inode]) for inode in fresh}
        if len(fresh) == len(self._creations):
            self._creations.clear()
        elif complete:
            self._creations = [creation for creation in self._creations if creation.thread not in ended]
        return mapped


def _open_bounded(shm_size: int) -> int | None:
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
