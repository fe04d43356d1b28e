"""The writable root of a sandbox: storage, and on it a kernel overlay over an image directory or the host's /usr.

All this runs in pid 1, before its root is changed. An image is hostile: nothing is created or
written through its paths until the root has been changed to it, so that its symbolic links can only point into itself.

Changes are kept in a sized tmpfs, or on the disk below the scratch directory. One directory of a disk has no size
(project quotas take the host's root), so the guest counts what is written there (``disk_watch``). The directory
is a mount all the same: without setuid and devices, and with a detached copy for the guest that leads nowhere else.
"""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.protocol import SandboxLimits
from prorl_gym.sandbox.spawner import host_root
from prorl_gym.sandbox.spawner.mounts import OVERLAY_REFUSED_ERRNOS, BindMount, mount_overlay
from prorl_gym.sandbox.spawner.spawner_protocol import LaunchRequest

_PROBE_XATTR = "user.overlay.probe"
_LOCAL_DISK_FIX = "Set sandbox.scratch to a directory on a local disk (ext4, xfs, btrfs), or limits.root_on: memory."
_UNSUPPORTED_UPPER = {  # names of the kernel, and common ones
    "nfs": "NFS",
    "nfs4": "NFS",
    "lustre": "Lustre",
    "overlay": "another overlay",
    "gpfs": "GPFS",
    "beegfs": "BeeGFS",
    "ceph": "CephFS",
    "cifs": "SMB",
    "smb3": "SMB",
    "9p": "9p",
    "panfs": "PanFS",
    "vboxsf": "a shared folder",
    "squashfs": "squashfs",
}


@dataclass(frozen=True, slots=True)
class SandboxRoot:
    """A root that is built but not entered."""

    path: str
    bind_mounts: tuple[BindMount, ...]
    """What is still to be mounted onto it."""
    limitations: str
    """What is weaker than usual, as text for the operator; "" when nothing is."""
    storage_fd: int | None
    """See ``_mount_storage``."""


def build_root(launch: LaunchRequest, base: str) -> SandboxRoot:
    """Build the root of a sandbox.

    Args:
        launch: image and size.
        base: an empty directory, used as mount point.

    Raises:
        SandboxError: the kernel is too old, or the disk cannot keep a root.
        OSError: a mount was refused.
    """
    storage = _mount_storage(launch.spec.limits, base)
    limitations = describe_limitations(base)
    volatile = storage is not None
    if not launch.lower_dirs:
        os.mkdir(f"{base}/root", 0o755)
        syscalls.mount(f"{base}/root", f"{base}/root", None, syscalls.MS_BIND)  # a root must be a mount
        binds, limitation_of_usr = host_root.fill_host_root(base, volatile=volatile)
        limitations = "; ".join(filter(None, (limitation_of_usr, limitations)))
        return SandboxRoot(f"{base}/root", tuple(binds), limitations, storage)
    try:
        return SandboxRoot(mount_overlay(base, "image", launch.lower_dirs, volatile=volatile), (), limitations, storage)
    except OSError as error:
        if error.errno not in OVERLAY_REFUSED_ERRNOS:
            raise
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"the kernel refuses an overlay over {launch.spec.image} ({error.strerror}).",
            "It needs Linux 5.11 or newer, and an image directory on a local disk with nothing mounted below it.",
        ) from None


def check_image(launch: LaunchRequest, host_ids: tuple[int, int]) -> None:
    """Refuse an image that cannot work.

    Args:
        launch: names the image.
        host_ids: the sandboxes' uid and gid outside of their user namespace, in which every foreign uid reads alike.

    Raises:
        SandboxError: ``IMAGE_MISSING`` or ``IMAGE_BROKEN``.
    """
    image = launch.spec.image
    if launch.backend == "apptainer-plain" and os.path.isfile(launch.lower_dirs[0] if launch.lower_dirs else ""):
        return  # a SIF, which the runtime checks by itself
    for directory in launch.lower_dirs:
        _check_directory(directory, "image" if directory == image else f"image {image}:", launch.backend, host_ids)
    shells = ("bin/bash", "usr/bin/bash", "bin/sh", "usr/bin/sh")
    if launch.lower_dirs and not any(
        os.path.lexists(f"{path}/{shell}") for path in launch.lower_dirs for shell in shells
    ):
        raise SandboxError(
            FailureKind.IMAGE_BROKEN,
            f"image {image} has no bin/bash and no bin/sh.",
            "It is not the root of a Linux system, or it was not unpacked to the end.",
        )


def _check_directory(path: str, what: str, backend: str, host_ids: tuple[int, int]) -> None:
    uid, gid = host_ids
    try:
        found = os.stat(path)
    except OSError as error:
        raise SandboxError(
            FailureKind.IMAGE_MISSING,
            f"{what} {path}: {error.strerror}.",
            f"Give the absolute path of an unpacked image that uid {uid} may read, or 'host'.",
        ) from None
    if not stat.S_ISDIR(found.st_mode):
        raise SandboxError(
            FailureKind.IMAGE_BROKEN,
            f"{what} {path} is a file, and without an image store only unpacked directories can be used.",
            f"Set sandbox.images, which unpacks SIF files, or run: apptainer build --sandbox {path}.d {path}",
        )
    if found.st_uid != os.geteuid() and backend != "apptainer-plain":  # which maps no uid
        raise SandboxError(
            FailureKind.IMAGE_BROKEN,
            f"{what} {path} is not owned by uid {uid}, as which sandboxes run.",
            f"Run: chown -hR {uid}:{gid} {path}  (or copy it: prorl-gym images import {path} --name NAME).",
        )


def check_storage(launch: LaunchRequest, base: str) -> None:
    """Refuse a disk that cannot keep a root. Call before anything is mounted: the mount table is the host's until then.

    Args:
        launch: names where the root is kept.
        base: the empty directory of this sandbox.

    Raises:
        SandboxError: this file system can be no overlay's upper directory.
    """
    if launch.spec.limits.root_on == "memory" or launch.backend == "apptainer-plain":  # which has it there anyway
        return
    unfit = unsupported_upper(file_system_of(base))
    if unfit is not None:
        raise _upper_error(base, f"on {unfit}, which cannot take the changes of an overlay")


def _mount_storage(limits: SandboxLimits, base: str) -> int | None:
    """Mount the storage of a root over an empty directory.

    Returns:
        A descriptor of the storage that works from any root, when it is to be counted; ``None`` when it has a size.

    Raises:
        SandboxError: the disk cannot keep an overlay's marks.
        OSError: a mount was refused.
    """
    if limits.root_on == "memory":
        options = f"mode=0755,size={limits.root_size},nr_inodes={limits.root_inodes}"
        syscalls.mount("sandbox", base, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)
        return None
    syscalls.mount(base, base, None, syscalls.MS_BIND)
    syscalls.restrict_mount(base, syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV)
    if not has_user_xattrs(base):
        raise _upper_error(base, "on a file system without user extended attributes, which an overlay needs")
    detached = syscalls.clone_mount(base)
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=detached)
    finally:
        os.close(detached)


def describe_limitations(base: str) -> str:
    """Return what a root on this storage lacks, as text for the operator; "" when it lacks nothing."""
    if not has_user_xattrs(base):
        return (
            "directories of the image cannot be removed and made again (tmpfs keeps no user attributes before Linux"
            " 6.6); limits.root_on: disk has them"
        )
    if os.statvfs(base).f_flag & os.ST_NOEXEC:
        return "programs written outside of /usr cannot be run: the scratch directory's disk is mounted noexec"
    return ""


def has_user_xattrs(directory: str) -> bool:
    """Whether an overlay with ``userxattr`` can mark directories here: ``rm -rf`` of an image's directory needs it."""
    try:
        os.setxattr(directory, _PROBE_XATTR, b"y")
        os.removexattr(directory, _PROBE_XATTR)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EPERM):
            return False
        raise
    return True


def file_system_of(path: Path | str) -> str:
    """Return the name of the file system that holds a path, as the mount table has it.

    Not by ``statfs``' magic number: ext2 to ext4 share one, and so do all FUSE file systems (``fuse.sshfs``).

    Raises:
        OSError: there is no such path.
    """
    device = os.stat(path).st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields, _, rest = line.partition(" - ")
            if fields.split(" ")[2] == numbers:
                return rest.split(" ")[0]
    return "unknown"  # a btrfs subvolume has a device number of its own


def unsupported_upper(file_system: str) -> str | None:
    """Return the common name of a file system that cannot be the upper layer of an overlay; ``None``: it may be."""
    return _UNSUPPORTED_UPPER.get(file_system) or ("FUSE" if file_system.startswith("fuse") else None)


def _upper_error(base: str, why: str) -> SandboxError:
    scratch = os.path.dirname(os.path.dirname(base))
    return SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"limits.root_on: disk: {scratch} is {why}.", _LOCAL_DISK_FIX)
