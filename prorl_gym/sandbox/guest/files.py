"""Opening and listing files as the sandbox sees them. Runs in a child of the guest; see ``transfer``."""

import errno
import os
import stat

from prorl_gym.sandbox.guest.kernel import open_inside

_MAX_ENTRIES = 100_000
_PROC_ROOT = 1
"""Inode of the top of a procfs."""


class Files:
    """File operations of the guest.

    The guest is more privileged than what runs in the sandbox, so procfs is out of bounds here: it would hand out the
    guest's own environment, memory and descriptors.

    Args:
        workdir: relative paths start here.
        proc_fd: descriptor of a procfs that is refused (the one on /proc is, too).
    """

    def __init__(self, workdir: str, proc_fd: int) -> None:
        self._workdir = workdir
        self._refused = {os.fstat(proc_fd).st_dev}
        try:
            if os.path.ismount("/proc"):
                self._refused.add(os.stat("/proc").st_dev)
        except OSError:  # an image without /proc
            return

    def open_read(self, path: str) -> int:
        """Open a regular file. Raises ``OSError``: ``EISDIR``, ``EINVAL`` for what is no regular file, ..."""
        return self._regular(self._open(path, os.O_RDONLY), path)

    def open_write(self, path: str, mode: int) -> int:
        """Open a file for replacing, making it and its directories; permissions are widened to ``mode``."""
        path = os.path.join(self._workdir, path)
        try:
            fd = self._open(path, os.O_WRONLY | os.O_CREAT, mode & 0o7777)
        except FileNotFoundError:
            self._make_parents(path)
            fd = self._open(path, os.O_WRONLY | os.O_CREAT, mode & 0o7777)
        fd = self._regular(fd, path)
        try:
            now = os.fstat(fd)
            wanted = stat.S_IMODE(now.st_mode) | (mode & 0o7777)
            if wanted != stat.S_IMODE(now.st_mode):
                os.fchmod(fd, wanted)
            os.ftruncate(fd, 0)
        except OSError:
            os.close(fd)
            raise
        return fd

    def list_dir(self, path: str) -> list[tuple[str, str, int, int]]:
        """Return the entries of a directory as (name, kind, size, mode), sorted; in /proc, without this process."""
        directory = open_inside(os.path.join(self._workdir, path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._must_be_listable(directory, path)
            own = str(os.getpid()) if os.fstat(directory).st_dev in self._refused else ""
            with os.scandir(directory) as entries:
                rows: list[tuple[str, str, int, int]] = []
                for entry in entries:
                    if len(rows) == _MAX_ENTRIES:
                        raise OSError(errno.EOVERFLOW, f"more than {_MAX_ENTRIES} entries", path)
                    if entry.name != own:
                        rows.append(_row(entry))
        finally:
            os.close(directory)
        rows.sort()
        return rows

    def _must_be_listable(self, directory: int, path: str) -> None:
        """Refuse what is below a process of procfs. The list of processes itself shows what payloads see anyway."""
        status = os.fstat(directory)
        if status.st_dev in self._refused and status.st_ino != _PROC_ROOT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def _open(self, path: str, flags: int, mode: int = 0) -> int:
        # Non-blocking and no controlling terminal: a FIFO or a device must not stop the guest or change it.
        try:
            return open_inside(os.path.join(self._workdir, path), flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a FIFO that nobody reads, or a socket
                raise OSError(errno.EINVAL, "not a regular file", path) from None
            raise

    def _regular(self, fd: int, path: str) -> int:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_dev not in self._refused:
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
                fd = open_inside(parent, os.O_PATH | os.O_DIRECTORY)
            except FileNotFoundError:
                missing.append(os.path.basename(parent))
                parent = os.path.dirname(parent)
                continue
            try:
                for name in reversed(missing):
                    if name not in ("", ".", ".."):
                        try:
                            os.mkdir(name, 0o755, dir_fd=fd)
                        except FileExistsError:  # a dangling symlink, or somebody was faster
                            pass
                    parent = os.path.join(parent, name)
                    os.close(fd)
                    fd = -1
                    fd = open_inside(parent, os.O_PATH | os.O_DIRECTORY)
            finally:
                if fd >= 0:
                    os.close(fd)
            return


def _row(entry: "os.DirEntry[str]") -> tuple[str, str, int, int]:
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
