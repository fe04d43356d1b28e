"""One file operation, in a child of the guest that ends with it.

A payload can make any system call on its files slow: the kernel lets one writer of a file wait for another, for as long
as that one likes (``fallocate`` in many threads). Here it is one process of the same sandbox that waits.

To the child, a file's bytes come in packets. From it: ``DATA`` and bytes of the file or JSON rows of a listing, then
``DONE``, or ``FAILED`` and JSON: an errno and its words. A child that ends without either was killed.
"""

import errno
import json
import os
import resource
import signal
import socket
import stat
from collections.abc import Mapping
from typing import Any

from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.guest.fork_exec import close_all_except

DATA, DONE, FAILED = b"+", b"=", b"!"

PACKET_BYTES = 64 << 10
"""Bytes of one packet, without the mark before them."""
_ENTRIES_PER_PACKET = 40
"""Entries of a directory in one packet: a name has up to 255 bytes, each of which JSON may spell in six."""
_MAX_ENTRIES = 100_000
_PROC_ROOT_INODE = 1
"""Inode of the top of a procfs."""
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


class GuestFiles:
    """File operations of the guest; relative paths start at ``workdir``.

    The guest is more privileged than what runs in the sandbox, so procfs (``proc_fd``'s, and the one on /proc) is out
    of bounds here: it would hand out the guest's own environment, memory and descriptors.
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
        """Open a file for replacing, making it and its directories; links are followed.

        ``mode``: its permissions from now on; ``None``: those that it has, 644 for a new one.
        """
        path = os.path.join(self._workdir, path)
        try:
            fd = self._open(path, os.O_WRONLY)
        except FileNotFoundError:
            mode = 0o644 if mode is None else mode
            try:
                fd = self._open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            except FileNotFoundError:
                self._make_parents(path)
                fd = self._open(path, os.O_WRONLY | os.O_CREAT, 0o600)
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
            status = os.fstat(directory)
            is_procfs = status.st_dev in self._refused_devices
            if is_procfs and status.st_ino != _PROC_ROOT_INODE:  # the list of processes shows what payloads see anyway
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            own = str(os.getpid()) if is_procfs else ""
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
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "other")
    return name, kind, status.st_size, stat.S_IMODE(status.st_mode)


def _open_without_magiclinks(path: str, flags: int, mode: int = 0) -> int:
    """Open a path without following /proc's magic links (``ELOOP``), which can lead out of a root directory."""
    if "\0" in path:
        raise OSError(errno.EINVAL, "path contains a NUL byte", path)
    while True:
        try:
            return syscalls.openat2(path, flags, mode=mode, resolve=syscalls.RESOLVE_NO_MAGICLINKS)
        except OSError as error:
            may_retry = error.errno == errno.EINTR or (error.errno == errno.EAGAIN and not flags & os.O_NONBLOCK)
            if not may_retry:
                raise OSError(error.errno, error.strerror, path) from None


def transfer(files: GuestFiles, request: Mapping[str, Any], connection: socket.socket, *, is_full: bool) -> None:
    """Do the operation and end this process, which is a fresh child of the guest.

    ``request`` has ``what`` (``read``, ``write`` or ``list``), ``path``, ``limit`` of a read, ``mode`` and ``size`` of
    a write. ``is_full``: no file may be written, since the sandbox's disk is used up.
    """
    try:
        signal.set_wakeup_fd(-1)
        close_all_except(0, 1, 2, connection.fileno())  # the service must see the end of the guest when it ends
        end = DONE
        try:
            _run_operation(files, request, connection, is_full=is_full)
        except OSError as error:
            end = FAILED + json.dumps([error.errno or errno.EIO, error.strerror or str(error)]).encode("ascii")
        except Exception as error:  # the request makes no sense
            end = FAILED + json.dumps([errno.EINVAL, str(error)[:1000]]).encode("ascii")
        connection.send(end, socket.MSG_NOSIGNAL)
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
