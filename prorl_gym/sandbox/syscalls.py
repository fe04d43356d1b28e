"""The system calls that Python does not offer on every supported version: a thin, typed wrapper over libc.

Every function raises ``OSError`` with the call's name and arguments. Nothing here depends on sandboxes.
"""

import ctypes
import errno
import fcntl
import os
import platform
import signal
import socket
import struct
from collections.abc import Iterable
from functools import cache
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_NOATIME = 1024
MS_NODIRATIME = 2048
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_RELATIME = 1 << 21
_MNT_DETACH = 2

MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
MOUNT_ATTR_NODEV = 4
MOUNT_ATTR_NOEXEC = 8

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_OPEN_TREE_CLOEXEC = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_KEYCTL_JOIN_SESSION_KEYRING = 1

# Calls added since Linux 5.1 have one number on every architecture; older ones do not.
_NR_OPEN_TREE = 428
_NR_MOVE_MOUNT = 429
_NR_MOUNT_SETATTR = 442
_NR_CLONE3 = 435
_NR_OPENAT2 = 437
_CLONE_INTO_CGROUP = 1 << 33
_NR_SECCOMP = {"x86_64": 317, "aarch64": 277, "riscv64": 277}
_SECCOMP_SET_MODE_FILTER = 1
_SECCOMP_FILTER_FLAG_SPEC_ALLOW = 4
_SECCOMP_FILTER_FLAG_NEW_LISTENER = 8
_NR_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
_libc_with_gil = ctypes.PyDLL(None, use_errno=True)
"""libc, called without letting go of the interpreter's lock: for calls that return twice."""
_libc_with_gil.syscall.restype = ctypes.c_long


def _checked(result: int, name: str, *arguments: object) -> int:
    """Turn libc's -1 into an ``OSError`` that names the call."""
    if result != -1:
        return result
    number = ctypes.get_errno()
    shown = ", ".join(str(argument) for argument in arguments)
    raise OSError(number, os.strerror(number), f"{name}({shown})")


def _path(path: str | None) -> bytes | None:
    return None if path is None else os.fsencode(path)


def _syscall(number: int, *arguments: Any) -> int:
    """Make a call that libc has no function for; integers are passed as the kernel takes them, 64 bits wide."""
    wide = (ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments)
    return _libc.syscall(ctypes.c_long(number), *wide)


class _CloneArguments(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack"),
            *("stack_size", "tls", "set_tid", "set_tid_size", "cgroup"),
        )
    )


def fork_into(namespaces: int = 0, cgroup: int | None = None) -> int:
    """Fork, as ``os.fork`` does, with the child born in new namespaces (``CLONE_NEW*``) and in a cgroup (Linux 5.7).

    ``cgroup`` is a descriptor of its directory: moving a process into a cgroup costs up to 30 ms, this nothing. The
    process must have one thread. The child must not call ``raise``: libc still holds the parent's thread id. Its own
    children are not affected.
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _clone(namespaces, cgroup)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _checked(pid, "clone3", hex(namespaces))


def fork_without_hooks(cgroup: int | None = None) -> int:
    """Fork without the hooks of ``os.register_at_fork``, for a child that only forks in its turn; see ``fork_into``."""
    return _checked(_clone(0, cgroup), "clone3")


def _clone(namespaces: int, cgroup: int | None) -> int:
    arguments = _CloneArguments(flags=namespaces, exit_signal=signal.SIGCHLD)
    if cgroup is not None:
        arguments.flags |= _CLONE_INTO_CGROUP
        arguments.cgroup = cgroup
    return _libc_with_gil.syscall(_NR_CLONE3, ctypes.byref(arguments), ctypes.c_size_t(ctypes.sizeof(arguments)))


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare", hex(flags))


def setns(descriptor: int, flags: int) -> None:
    """Enter the namespace behind a descriptor, which must be of the kind in ``flags``."""
    _checked(_libc.setns(descriptor, flags), "setns", hex(flags))


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    result = _libc.mount(_path(source), _path(target), _path(kind), ctypes.c_ulong(flags), _path(data))
    _checked(result, "mount", source, target, kind, hex(flags), data)


def detach_mount(target: str) -> None:
    _checked(_libc.umount2(_path(target), _MNT_DETACH), "umount2", target)


def pivot_root(new_root: str, put_old: str) -> None:
    _checked(_libc.pivot_root(_path(new_root), _path(put_old)), "pivot_root", new_root, put_old)


def clone_mount(path: str, *, recursive: bool = False) -> int:
    """Return a descriptor of a detached bind mount of ``path``; ``attach_mount`` puts it somewhere."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    return _checked(_syscall(_NR_OPEN_TREE, _AT_FDCWD, _path(path), flags), "open_tree", path)


def attach_mount(descriptor: int, target: str) -> None:
    result = _syscall(_NR_MOVE_MOUNT, descriptor, b"", _AT_FDCWD, _path(target), _MOVE_MOUNT_F_EMPTY_PATH)
    _checked(result, "move_mount", target)


class _OpenHow(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("flags", "mode", "resolve"))


def openat2(path: str, flags: int, *, resolve: int, mode: int = 0, directory: int = _AT_FDCWD) -> int:
    """Open a path below a directory, close-on-exec, with restrictions (``RESOLVE_*``) on how it is resolved."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    result = _syscall(_NR_OPENAT2, directory, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
    return _checked(result, "openat2", path)


def open_directory_in_root(root: int, path: str) -> int:
    """Open a directory below ``root`` (a descriptor), resolved as if ``root`` were ``/`` (Linux 5.6)."""
    resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS
    return openat2(path or ".", os.O_PATH | os.O_DIRECTORY, resolve=resolve, directory=root)


def sync_file_system(descriptor: int) -> None:
    _checked(_libc.syncfs(descriptor), "syncfs", descriptor)


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd"))


def restrict_mount(target: str | int, attributes: int, *, recursive: bool = False) -> None:
    """Add ``MOUNT_ATTR_*`` to a mount, given by its path or by the descriptor of a detached one.

    Only adds: flags that the host locked on the mount stay as they are. Falls back to a remount on kernels before
    5.12, where only a path works.
    """
    wanted = _MountAttributes(attr_set=attributes)
    directory, path = (target, b"") if isinstance(target, int) else (_AT_FDCWD, os.fsencode(target))
    flags = (_AT_EMPTY_PATH if isinstance(target, int) else 0) | (_AT_RECURSIVE if recursive else 0)
    result = _syscall(_NR_MOUNT_SETATTR, directory, path, flags, ctypes.byref(wanted), ctypes.sizeof(wanted))
    if result == -1 and ctypes.get_errno() == errno.ENOSYS and isinstance(target, str):
        # Flags that the mount has must be named again, since the host may have locked them.
        held = os.statvfs(target).f_flag
        kept = held & (MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
        relative = MS_RELATIME if held & os.ST_RELATIME else 0
        return mount(None, target, None, MS_REMOUNT | MS_BIND | kept | relative | attributes)
    _checked(result, "mount_setattr", target, hex(attributes))


def _prctl(name: str, option: int, *arguments: int) -> int:
    result = _libc.prctl(option, *(*arguments, 0, 0, 0, 0)[:4])
    return result if result != -1 else _checked(result, f"prctl {name}", *arguments)


def set_parent_death_signal(number: int) -> None:
    """Request this signal for when the thread that forked us ends. Any later change of credentials clears it."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, number)


def set_child_subreaper() -> None:
    """Become the parent of every orphaned descendant."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def set_dumpable(dumpable: bool) -> None:
    """Set whether other processes of the same uid may trace this one and read its ``/proc`` files."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, int(dumpable))


@cache
def find_command_line() -> tuple[int, int]:
    """Return where the arguments of this process begin and end in its memory; its forks have them there, too."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[45]), int(fields[46])


def set_command_line(text: str) -> None:
    """Replace what ``/proc/PID/cmdline`` shows of this process, and of its children until they execute a program.

    As much of ``text`` is shown as the process's own arguments took.
    """
    start, end = find_command_line()
    if start:  # 0: not reported by this kernel
        shown = os.fsencode(text)[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, shown, len(shown))


def set_no_new_privileges() -> None:
    """Make setuid bits and file capabilities ineffective for this process and its children, for ever."""
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilityData(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def keep_capabilities(kept: Iterable[int]) -> None:
    """Reduce the bounding, permitted and effective sets to ``kept``; empty the inheritable and ambient sets.

    What the process does not have is not added, and needs no capability to be dropped.
    """
    kept = frozenset(kept)
    limit_bounding_set(kept)
    header = _CapabilityHeader(version=_CAPABILITY_VERSION_3, pid=0)
    held = (_CapabilityData * 2)()
    _checked(_libc.capget(ctypes.byref(header), held), "capget")
    _prctl("PR_CAP_AMBIENT", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    mask = sum(1 << capability for capability in kept)
    wanted = [mask >> shift & half.permitted for shift, half in zip((0, 32), held, strict=True)]
    halves = (_CapabilityData * 2)(*((half, half, 0) for half in wanted))
    _checked(_libc.capset(ctypes.byref(header), halves), "capset", hex(mask))


def limit_bounding_set(kept: Iterable[int]) -> None:
    """Reduce the bounding set to ``kept``, for this process and everything below it; its own rights are left alone."""
    for capability in sorted(frozenset(range(64)).difference(kept)):
        present = _libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0)
        if present < 0:
            break  # beyond the last one of this kernel
        if present:
            _prctl("PR_CAPBSET_DROP", _PR_CAPBSET_DROP, capability)


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install_seccomp_filter(program: bytes) -> None:
    """Install a seccomp filter (``struct sock_filter`` one after the other). A kernel built without any is let be."""
    if _install_filter(program, 0) == -1 and ctypes.get_errno() not in (errno.ENOSYS, errno.EINVAL):
        _checked(-1, "seccomp")


def install_seccomp_listener(program: bytes) -> int | None:
    """Install a seccomp filter; return a descriptor that hears of what it asks about, close-on-exec.

    ``None``: nothing was installed, since this kernel or a container around us does not let us listen.
    """
    listener = _install_filter(program, _SECCOMP_FILTER_FLAG_NEW_LISTENER)
    return None if listener == -1 else listener


def _install_filter(program: bytes, flags: int) -> int:
    given = _FilterProgram(len(program) // 8, program)
    flags |= _SECCOMP_FILTER_FLAG_SPEC_ALLOW  # else older kernels slow the whole process down
    return _syscall(_NR_SECCOMP[platform.machine()], _SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(given))


def leave_session_keyring() -> None:
    """Join a new, empty session keyring: the service's own (tickets, tokens) is otherwise inherited and readable.

    Kernels without keyrings, and machines whose call number is not known here, have nothing to leave.
    """
    number = _NR_KEYCTL.get(platform.machine())
    if number is None:
        return
    if _syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None) == -1 and ctypes.get_errno() != errno.ENOSYS:
        _checked(-1, "keyctl", "KEYCTL_JOIN_SESSION_KEYRING")


def bring_up_loopback() -> None:
    get_flags, set_flags, up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        answer = fcntl.ioctl(handle, get_flags, struct.pack("16sh22x", b"lo", 0))
        flags: int = struct.unpack("16sh22x", answer)[1]
        fcntl.ioctl(handle, set_flags, struct.pack("16sh22x", b"lo", flags | up))


def write_setting(path: str | os.PathLike[str], text: str) -> None:
    """Write an existing file of procfs or of a cgroup, in one call.

    Raises ``OSError`` when the kernel refuses the value, or has no such setting (``FileNotFoundError``).
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode("ascii"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    finally:
        os.close(descriptor)
