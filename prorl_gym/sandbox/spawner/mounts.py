"""The two kinds of mount that put files of the host into a sandbox: a writable overlay and a read-only bind.

The overlay is mounted with ``userxattr``: without it a user namespace cannot mark directories opaque, and ``rm -rf``
of an image directory or a rename of a new one fails (EIO, EXDEV).
"""

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.protocol import Mount

OVERLAY_REFUSED_ERRNOS = (errno.EINVAL, errno.EPERM, errno.ENODEV)
"""Errors of a kernel that has no userxattr overlay, or not over this directory (something is mounted below it)."""

_NOSUID_NODEV = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
_READ_ONLY = syscalls.MOUNT_ATTR_RDONLY | _NOSUID_NODEV


@dataclass(frozen=True, slots=True)
class BindMount:
    """A directory that is still to be mounted onto a root.

    Not done at once, since backends differ: Apptainer cannot start from a root with mounts below it.
    """

    source: str
    target: str
    read_only: bool


def mount_overlay(base: str, name: str, lower: Sequence[str], *, volatile: bool = False) -> str:
    """Mount a writable overlay over ``lower`` with its changes kept in ``base/name``; return where it is mounted.

    The options name nothing but short words relative to there (a link for each directory): colons, commas and
    backslashes in a path would otherwise be read as syntax, and a few dozen long paths would not fit into the one
    page that the kernel takes.

    Args:
        base: storage of the changes.
        name: a name in it that is free.
        lower: read-only directories, topmost first; the kernel allows up to 500.
        volatile: nothing is ever synced to the disk; a sandbox does not outlive a crash of its machine.
    """
    storage = f"{base}/{name}"
    os.makedirs(f"{storage}/upper", exist_ok=True)
    os.mkdir(f"{storage}/work")
    os.mkdir(f"{storage}/merged")
    links = [f"l{number}" for number in range(len(lower))]
    for link, directory in zip(links, lower, strict=True):
        os.symlink(directory, f"{storage}/{link}")
    os.chdir(storage)
    try:
        syscalls.mount(
            "overlay",
            f"{storage}/merged",
            "overlay",
            syscalls.MS_NOSUID | syscalls.MS_NODEV,
            f"lowerdir={':'.join(links)},upperdir=upper,workdir=work,userxattr{',volatile' if volatile else ''}",
        )
    finally:
        os.chdir("/")
    return f"{storage}/merged"


def mount_binds(root: str, binds: tuple[BindMount, ...]) -> None:
    """Mount directories onto a root of our own making, with all that is mounted below, without setuid and devices."""
    for bind in binds:
        target = root + bind.target
        syscalls.mount(bind.source, target, None, syscalls.MS_BIND | syscalls.MS_REC)
        syscalls.restrict_mount(target, _READ_ONLY if bind.read_only else _NOSUID_NODEV, recursive=True)


@dataclass(frozen=True, slots=True)
class DetachedMount:
    """A read-only mount of a host path that is still to be attached inside."""

    descriptor: int
    target: str
    is_directory: bool


def clone_mounts(mounts: tuple[Mount, ...]) -> list[DetachedMount]:
    """Return detached mounts of host paths: cloned while those can be resolved, attached when the image's paths can.

    Raises:
        SandboxError: a source does not exist or cannot be reached by the sandbox's uid.
    """
    detached: list[DetachedMount] = []
    for mount in mounts:
        try:
            is_directory = stat.S_ISDIR(os.stat(mount.source).st_mode)
            descriptor = syscalls.clone_mount(mount.source, recursive=is_directory)
        except OSError as error:
            raise _unreachable(mount, error) from None
        syscalls.restrict_mount(descriptor, _READ_ONLY, recursive=is_directory)
        detached.append(DetachedMount(descriptor, mount.target, is_directory))
    return detached


def check_mount_sources(mounts: tuple[Mount, ...]) -> None:
    """Check what a runtime will mount for us, so that an error names the mount.

    Raises:
        SandboxError: a source does not exist or cannot be reached by the sandbox's uid.
    """
    for mount in mounts:
        try:
            os.stat(mount.source)
        except OSError as error:
            raise _unreachable(mount, error) from None


def _unreachable(mount: Mount, error: OSError) -> SandboxError:
    return SandboxError(
        FailureKind.SANDBOX_UNAVAILABLE,
        f"mount source {mount.source}: {error.strerror}.",
        "It must exist where the sandbox's uid may go; a directory below a 0700 home is out of its reach.",
    )


def attach_mounts(detached: list[DetachedMount]) -> None:
    """Attach mounts at their targets, which are made. The process's root is the sandbox's already."""
    for mount in detached:
        target = os.path.join("/", mount.target)
        if mount.is_directory:
            os.makedirs(target, exist_ok=True)
        elif not os.path.exists(target):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        syscalls.attach_mount(mount.descriptor, target)
        os.close(mount.descriptor)
