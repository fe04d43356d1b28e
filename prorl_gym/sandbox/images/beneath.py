"""Paths that cannot leave a directory, whatever symbolic links are in it: the kernel's ``openat2``, one thin wrapper.

An archive is hostile: it may bring a link and then a file "below" it. Resolved with the directory as root, the link
can only point into the directory, as it will when the directory has become the root of a sandbox.
"""

import ctypes
import errno
import os

_NR_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_directory(root: int, path: str) -> int:
    """Open a directory below ``root`` (a descriptor), resolved as if ``root`` were ``/``.

    Raises:
        OSError: there is none, or the kernel (before Linux 5.6) cannot do it.
    """
    how = _OpenHow(os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    name = os.fsencode(path) or b"."
    found = _libc.syscall(
        _NR_OPENAT2, root, ctypes.c_char_p(name), ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how))
    )
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return found


def make_directory(root: int, path: str) -> int:
    """Open a directory below ``root``, making it and those above it where they are missing.

    Raises:
        OSError: also ``ENOTDIR`` when something else is in the way.
    """
    try:
        return open_directory(root, path)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
    above, name = os.path.split(path)
    parent = make_directory(root, above)
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "a dangling link is in the way", path) from None
    finally:
        os.close(parent)
    return open_directory(root, path)
