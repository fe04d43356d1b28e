"""The two system calls that the guest needs and Python lacks."""

import ctypes
import errno
import os

_PR_SET_CHILD_SUBREAPER = 36
_SYS_OPENAT2 = 437  # the same number on every architecture (calls after 424 share one table)
_AT_FDCWD = -100
_RESOLVE_NO_MAGICLINKS = 0x02

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = [
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    ]


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that double-forked processes stay in this process's tree.

    Raises:
        OSError: the kernel refused.
    """
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def open_inside(path: str, flags: int, mode: int = 0) -> int:
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
