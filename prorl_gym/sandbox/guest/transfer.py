"""One file operation, in a child of the guest that ends with it.

A payload can make any system call on its files slow: the kernel lets one writer of a file wait for another, for as long
as that one likes (``fallocate`` in many threads). Here it is one process of the same sandbox that waits.

To the child, a file's bytes come in packets. From it: ``DATA`` and bytes of the file or JSON rows of a listing, then
``DONE``, or ``FAILED`` and JSON: an errno and its words. A child that ends without either was killed.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import socket
import stat
from collections.abc import Mapping
from typing import Any

from prorl_gym.sandbox.guest.fork_exec import close_all_except

DATA, DONE, FAILED = b"+", b"=", b"!"

PACKET_BYTES = 64 << 10
"""Bytes of one packet, without the mark before them."""
_ENTRIES_PER_PACKET = 40
"""Entries of a directory in one packet: a name has up to 255 bytes, each of which JSON may spell in six."""
_MAX_ENTRIES = 100_000
_PROC_ROOT_INODE = 1
"""Inode of the top of a procfs."""
_SYS_OPENAT2 = 437  # the same number on every architecture (calls after 424 share one table)
_AT_FDCWD = -100
_RESOLVE_NO_MAGICLINKS = 0x02

_libc = ctypes.CDLL(None, use_errno=True)


class GuestFiles:
    """File operations of the guest.

    The guest is more privileged than what runs in the sandbox, so procfs is out of bounds here: it would hand out the
    guest's own environment, memory and descriptors.

    Args:
        workdir: relative paths start here.
        proc_fd: descriptor of a procfs that is refused (the one on /proc is, too).
    """

    def __init__(self, workdir: str, proc_fd: int) -> None:
        self._workdir = workdir
        self._refused_devices = {os.fstat(proc_fd).st_dev}
        try:
            if os.path.ismount("/proc"):
                self._refused_devices.add(os.stat("/proc").st_dev)
        except OSError:  # an image without /proc
            return

    def open_read(self, path: str) -> int:
        """Open a regular file. Raises ``OSError``: ``EISDIR``, ``EINVAL`` for what is no regular file, ..."""
        return self._check_regular(self._open(path, os.O_RDONLY), path)

    def open_write(self, path: str, mode: int | None) -> int:
        """Open a file for replacing, making it and its directories.

        Args:
            path: of the file; links are followed.
            mode: its permissions from now on; ``None``: those that it has, 644 for a new one.
        """
        path = os.path.join(self._workdir, path)
        try:
            fd = self._open(path, os.O_WRONLY)
        except FileNotFoundError:
            mode = 0o644 if mode is None else mode
            fd = self._create(path)
        fd = self._check_regular(fd, path)
        try:
            if mode is not None and mode & 0o7777 != stat.S_IMODE(os.fstat(fd).st_mode):
                os.fchmod(fd, mode & 0o7777)
            os.ftruncate(fd, 0)
        except OSError:
            os.close(fd)
            raise
        return fd

    def list_dir(self, path: str) -> list[tuple[str, str, int, int]]:
        """Return the entries of a directory as (name, kind, size, mode), sorted; in /proc, without this process."""
        directory = _open_without_magiclinks(os.path.join(self._workdir, path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._check_listable(directory, path)
            own = str(os.getpid()) if os.fstat(directory).st_dev in self._refused_devices else ""
            with os.scandir(directory) as entries:
                rows: list[tuple[str, str, int, int]] = []
                for entry in entries:
                    if len(rows) == _MAX_ENTRIES:
                        raise OSError(errno.EOVERFLOW, f"more than {_MAX_ENTRIES} entries", path)
                    if entry.name != own:
                        rows.append(_describe_entry(entry))
        finally:
            os.close(directory)
        rows.sort()
        return rows

    def _check_listable(self, directory: int, path: str) -> None:
        """Refuse what is below a process of procfs. The list of processes itself shows what payloads see anyway."""
        status = os.fstat(directory)
        if status.st_dev in self._refused_devices and status.st_ino != _PROC_ROOT_INODE:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def _create(self, path: str) -> int:
        try:
            return self._open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        except FileNotFoundError:
            self._make_parents(path)
            return self._open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def _open(self, path: str, flags: int, mode: int = 0) -> int:
        # Non-blocking and no controlling terminal: a FIFO or a device must not stop the guest or change it.
        try:
            return _open_without_magiclinks(
                os.path.join(self._workdir, path), flags | os.O_NONBLOCK | os.O_NOCTTY, mode
            )
        except OSError as error:
            if error.errno == errno.ENXIO:  # a FIFO without a reader, or a socket
                raise OSError(errno.EINVAL, "not a regular file", path) from None
            raise

    def _check_regular(self, fd: int, path: str) -> int:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_dev not in self._refused_devices:
            return fd
        os.close(fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise OSError(errno.EINVAL, "not a regular file", path)

    @staticmethod
    def _make_parents(path: str) -> None:
        missing: list[str] = []
        parent = os.path.dirname(path)
        while parent:
            try:
                fd = _open_without_magiclinks(parent, os.O_PATH | os.O_DIRECTORY)
            except FileNotFoundError:
                missing.append(os.path.basename(parent))
                parent = os.path.dirname(parent)
                continue
            try:
                for name in reversed(missing):
                    if name not in ("", ".", ".."):
                        try:
                            os.mkdir(name, 0o755, dir_fd=fd)
                        except FileExistsError:  # a dangling symlink, or another process was faster
                            pass
                    parent = os.path.join(parent, name)
                    os.close(fd)
                    fd = -1
                    fd = _open_without_magiclinks(parent, os.O_PATH | os.O_DIRECTORY)
            finally:
                if fd >= 0:
                    os.close(fd)
            return


def _describe_entry(entry: "os.DirEntry[str]") -> tuple[str, str, int, int]:
    name = os.fsdecode(entry.name)
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:  # it went away while we looked
        return name, "other", 0, 0
    kind = "other"
    for test, word in ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "symlink")):
        if test(status.st_mode):
            kind = word
    return name, kind, status.st_size, stat.S_IMODE(status.st_mode)


class _OpenHow(ctypes.Structure):
    _fields_ = [
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    ]


def _open_without_magiclinks(path: str, flags: int, mode: int = 0) -> int:
    """Open a path without following /proc's magic links, which can lead out of a root directory.

    Raises:
        OSError: as ``open``; ``ELOOP`` where a magic link was met.
    """
    how = _OpenHow(flags | os.O_CLOEXEC, mode, _RESOLVE_NO_MAGICLINKS)
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise OSError(errno.EINVAL, "path contains a NUL byte", path)
    while True:
        fd = _libc.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_long(_AT_FDCWD),
            ctypes.c_char_p(encoded),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code not in (errno.EINTR, errno.EAGAIN) or (flags & os.O_NONBLOCK and code == errno.EAGAIN):
            raise OSError(code, os.strerror(code), path)


def transfer(files: GuestFiles, request: Mapping[str, Any], connection: socket.socket, *, is_full: bool) -> None:
    """Do the operation and end this process, which is a fresh child of the guest.

    Args:
        files: opens paths.
        request: ``what`` (``read``, ``write`` or ``list``), ``path``; ``limit`` of a read; ``mode`` and ``size`` of a
            write.
        connection: the service's, of packets.
        is_full: no file may be written: the sandbox's disk is used up.
    """
    try:
        signal.set_wakeup_fd(-1)
        close_all_except(0, 1, 2, connection.fileno())  # the service must see the end of the guest when it ends
        try:
            _run_operation(files, request, connection, is_full=is_full)
        except OSError as error:
            _send_failure(connection, error.errno or errno.EIO, error.strerror or str(error))
        except Exception as error:  # the request makes no sense
            _send_failure(connection, errno.EINVAL, str(error)[:1000])
        else:
            connection.send(DONE, socket.MSG_NOSIGNAL)
    finally:  # also when the service hung up: an exception must not unwind into the guest's own loop
        os._exit(0)


def _run_operation(files: GuestFiles, request: Mapping[str, Any], connection: socket.socket, *, is_full: bool) -> None:
    path = request["path"]
    match request["what"]:
        case "read":
            _read(files.open_read(path), request["limit"], connection)
        case "write":
            if is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _write(files.open_write(path, request["mode"]), request["size"], connection)
        case "list":
            rows = files.list_dir(path)
            for start in range(0, len(rows), _ENTRIES_PER_PACKET):
                connection.send(
                    DATA + json.dumps(rows[start : start + _ENTRIES_PER_PACKET]).encode("ascii"), socket.MSG_NOSIGNAL
                )
        case other:
            raise ValueError(f"cannot {other} a file")


def _read(fd: int, limit: int, connection: socket.socket) -> None:
    """Send at most ``limit`` bytes, whatever size the file claims or grows to."""
    if os.fstat(fd).st_size > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes")
    while data := os.read(fd, PACKET_BYTES):
        limit -= len(data)
        if limit < 0:
            raise OSError(errno.EFBIG, "larger than the limit, and growing")
        connection.send(DATA + data, socket.MSG_NOSIGNAL)


def _write(fd: int, size: int, connection: socket.socket) -> None:
    while size > 0:
        data = memoryview(connection.recv(PACKET_BYTES))
        if not data:
            raise OSError(errno.ECANCELED, "the service gave up")
        size -= len(data)
        while data:
            try:
                data = data[os.write(fd, data) :]
            except OSError as error:
                # A root on disk is full now: every process of the sandbox may only write files of no size.
                if error.errno == errno.EFBIG and resource.getrlimit(resource.RLIMIT_FSIZE)[0] == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
                raise


def _send_failure(connection: socket.socket, code: int, words: str) -> None:
    connection.send(FAILED + json.dumps([code, words]).encode("ascii"), socket.MSG_NOSIGNAL)
