"""Entering the namespaces of a running sandbox, from above: a process that owns its user namespace may."""

import fcntl
import os
from collections.abc import Sequence

from prorl_gym.sandbox import syscalls

_NS_GET_USERNS, _NS_GET_PARENT = 0xB701, 0xB702
_KINDS = (
    ("ipc", syscalls.CLONE_NEWIPC),
    ("uts", syscalls.CLONE_NEWUTS),
    ("net", syscalls.CLONE_NEWNET),
    ("pid_for_children", syscalls.CLONE_NEWPID),
    ("mnt", syscalls.CLONE_NEWNS),  # last: the host's /proc is gone then
)


def open_namespaces(process: str = "self", proc_fd: int | None = None) -> list[int]:
    """Return descriptors of a process's root directory and of its namespaces, as ``enter_namespaces`` takes them.

    Args:
        process: its name in procfs.
        proc_fd: descriptor of that procfs; ``/proc`` by default.
    """
    directory = process if proc_fd is not None else f"/proc/{process}"
    opened = [os.open(f"{directory}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=proc_fd)]
    try:
        for name in ("user", *(name for name, _ in _KINDS)):
            opened.append(os.open(f"{directory}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc_fd))
    except OSError:
        for descriptor in opened:
            os.close(descriptor)
        raise
    return opened


def enter_namespaces(descriptors: Sequence[int]) -> None:
    """Enter the namespaces that this process is not in, then the root directory; closes the descriptors.

    A namespace is entered with the rights that a process has in the user namespace that owns it. So where one user
    namespace lies below another (a container's in ours), each is entered in turn, with what it owns. Only children of
    this process will be in the pid namespace.

    Raises:
        OSError: this process has no right to.
    """
    root, user, *others = descriptors
    own_user = os.stat("/proc/self/ns/user").st_ino
    waiting = [
        (descriptor, flag, _owner(descriptor))
        for descriptor, (name, flag) in zip(others, _KINDS, strict=True)
        if os.fstat(descriptor).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino
    ]
    path: list[int] = []  # of user namespaces, from below this process's own
    while os.fstat(user).st_ino != own_user:
        path.insert(0, user)
        user = fcntl.ioctl(user, _NS_GET_PARENT)
    for level in path:
        syscalls.setns(level, syscalls.CLONE_NEWUSER)
        for descriptor, flag, owner in waiting:
            if owner == os.fstat(level).st_ino:
                syscalls.setns(descriptor, flag)
    os.fchdir(root)
    os.chroot(".")
    os.chdir("/")
    for descriptor in {*descriptors, *path, user}:
        os.close(descriptor)


def _owner(namespace: int) -> int:
    """Return the inode number of the user namespace that owns a namespace."""
    owner = fcntl.ioctl(namespace, _NS_GET_USERNS)
    try:
        return os.fstat(owner).st_ino
    finally:
        os.close(owner)
