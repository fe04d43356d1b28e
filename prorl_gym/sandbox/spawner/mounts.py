"""The mounts of a sandbox: overlays and binds of the host's files; ``/proc`` with masks, a small ``/dev``, no ``/sys``.

The latter are mounted by a process whose root is the sandbox's already, so an image's symbolic links cannot lead out of
it. An overlay is mounted with ``userxattr``: without it a user namespace cannot mark directories opaque, and ``rm -rf``
of an image directory or a rename of a new one fails (EIO, EXDEV).
"""

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.protocol import Mount

OVERLAY_REFUSED_ERRNOS = (errno.EINVAL, errno.EPERM, errno.ENODEV)
"""Errors of a kernel that has no userxattr overlay, or not over this directory (something is mounted below it)."""

_NOSUID_NODEV = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV
_READ_ONLY = syscalls.MOUNT_ATTR_RDONLY | _NOSUID_NODEV

_DEVICES = {name: name for name in ("null", "full", "random", "urandom", "tty")} | {"zero": "full"}
"""Devices of the host by their names inside. ``full`` reads as ``zero`` does, and cannot be mapped: a shared mapping of
``zero`` is memory that nothing bounds (``guest/seccomp_notifications.py``)."""
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}

# What container runtimes hide, too: kernel memory, keys, timers.
_HIDDEN_FILES = (
    *("/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/sched_debug", "/proc/latency_stats"),
    *("/proc/kallsyms", "/proc/kmsg"),
    *("/proc/1/cmdline", "/proc/1/task/1/cmdline"),  # so that nothing of the guest is listed among what runs inside
)
_HIDDEN_DIRECTORIES = ("/proc/acpi", "/proc/scsi")
_MAX_TERMINALS = 64
"""Terminals of one sandbox; the kernel has 3072 for all of them together."""
_NOTIFY_LIMITS = {
    "max_inotify_instances": 32,
    "max_inotify_watches": 16384,
    "max_fanotify_groups": 8,
    "max_fanotify_marks": 16384,
}
"""Bounds of one sandbox. The kernel has 128 instances, 128 groups and some 10,000 to 200,000 watches (``fs.inotify``,
``fs.fanotify``) for all that have one uid."""
_SAFE_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
_PAGE = os.sysconf("SC_PAGESIZE")


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

    ``lower`` is topmost first; the kernel allows up to 500. The options name nothing but short words relative to there
    (a link for each directory): colons, commas and backslashes in a path would otherwise be read as syntax, and a few
    dozen long paths would not fit into the one page that the kernel takes.

    ``volatile``: nothing is ever synced to the disk; a sandbox does not outlive a crash of its machine.
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

    Raises ``SandboxError`` when a source does not exist or cannot be reached by the sandbox's uid.
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
    """Check what a runtime will mount for us, so that an error names the mount. Raises as ``clone_mounts``."""
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


def clone_devices() -> dict[str, int]:
    """Return detached mounts of the host's harmless devices, by name; call before the root is changed."""
    devices = {name: syscalls.clone_mount(f"/dev/{device}") for name, device in _DEVICES.items()}
    for descriptor in devices.values():
        syscalls.restrict_mount(descriptor, syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NOEXEC)
    return devices


def mount_proc() -> None:
    """Mount this pid namespace's ``/proc``; the host's must still be mounted somewhere in this mount namespace."""
    os.makedirs("/proc", exist_ok=True)
    syscalls.mount("proc", "/proc", "proc", _SAFE_FLAGS)


def limit_kernel_memory(shm_size: int, settings: str = "/proc/sys") -> bool:
    """Bound the kernel memory of notifications and System V IPC, the latter to ``shm_size`` bytes of memory.

    What System V IPC holds outlives processes: killing frees nothing. Returns whether it is bounded; payloads must not
    have its calls otherwise, as before Linux 5.19, where only the host's root may set a bound. ``settings``: the
    directory of the kernel's settings.
    """
    for name, most in _NOTIFY_LIMITS.items():
        with suppress(FileNotFoundError, PermissionError):
            syscalls.write_setting(f"{settings}/user/{name}", str(most))
    try:
        for name, value in (
            ("shmmax", f"{shm_size}"),
            ("shmall", f"{shm_size // _PAGE}"),
            ("sem", "250 32000 100 128"),
            ("msgmni", "64"),
        ):
            syscalls.write_setting(f"{settings}/kernel/{name}", value)
    except OSError:
        return False
    return True


def mask_kernel_files() -> None:
    """Make ``/proc`` read-only, hide its revealing parts, and leave ``/sys`` empty.

    All of ``/proc``, not only the kernel's settings: a payload that could lower its ``oom_score_adj`` would have the
    service killed in its place when memory runs out. Files behind the links in ``/proc/PID/fd`` stay writable.
    """
    syscalls.restrict_mount("/proc", syscalls.MOUNT_ATTR_RDONLY)
    for path in filter(os.path.exists, _HIDDEN_FILES):
        syscalls.mount("/dev/null", path, None, syscalls.MS_BIND)
    os.makedirs("/sys", exist_ok=True)
    for path in ("/sys", *filter(os.path.exists, _HIDDEN_DIRECTORIES)):
        syscalls.mount("nothing", path, "tmpfs", _SAFE_FLAGS | syscalls.MS_RDONLY, "size=4k,nr_inodes=2,mode=0555")


def mount_dev(devices: dict[str, int]) -> None:
    """Make a small ``/dev`` with the given devices, and terminals of its own."""
    os.makedirs("/dev", exist_ok=True)
    syscalls.mount("dev", "/dev", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "mode=0755,size=256k,nr_inodes=256")
    for name, descriptor in devices.items():
        os.close(os.open(f"/dev/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        syscalls.attach_mount(descriptor, f"/dev/{name}")
        os.close(descriptor)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"/dev/{name}")
    os.mkdir("/dev/pts")
    terminals = f"newinstance,ptmxmode=0666,mode=0620,max={_MAX_TERMINALS}"
    syscalls.mount("devpts", "/dev/pts", "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, terminals)


def mount_shm(size: int) -> None:
    """Mount ``/dev/shm`` with a size in bytes. Memory files are in it, and programs execute and map those."""
    os.makedirs("/dev/shm", exist_ok=True)
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
    syscalls.mount("shm", "/dev/shm", "tmpfs", flags, f"mode=1777,size={size},nr_inodes={size // 4096 + 256}")
