"""What the kernel shows inside: ``/proc`` with masks, a small ``/dev``, an empty ``/sys``.

Runs in a process whose root is the sandbox's already, so an image's symbolic links cannot lead out of it.
"""

import os
from contextlib import suppress
from pathlib import Path

from prorl_gym.sandbox import syscalls

_DEVICES = {name: name for name in ("null", "full", "random", "urandom", "tty")} | {"zero": "full"}
"""What is at each name. ``full`` reads as ``zero`` does, and cannot be mapped: a shared mapping of ``zero`` is memory
that nothing bounds (``guest/shared_memory.py``)."""
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}

# What container runtimes hide, too: kernel memory, keys, timers.
_HIDDEN_FILES = (
    "/proc/kcore",
    "/proc/keys",
    "/proc/key-users",
    "/proc/timer_list",
    "/proc/sched_debug",
    "/proc/latency_stats",
    "/proc/kallsyms",
    "/proc/kmsg",
    "/proc/1/cmdline",  # so that nothing of the guest is listed among what runs inside
    "/proc/1/task/1/cmdline",
)
_HIDDEN_DIRECTORIES = ("/proc/acpi", "/proc/scsi")
_MAX_TERMINALS = 64
"""Of one sandbox; the kernel has 3072 for all of them together."""
_NOTIFY_LIMITS = {
    "max_inotify_instances": 32,
    "max_inotify_watches": 16384,
    "max_fanotify_groups": 8,
    "max_fanotify_marks": 16384,
}
"""Of one sandbox. The kernel has 128 instances, 128 groups and some 10,000 to 200,000 watches (``fs.inotify``,
``fs.fanotify``) for all that have one uid."""
_SAFE_FLAGS = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
_OOM_SCORE = 800
"""From -1000 to 1000; the service normally has 0."""
_PAGE = os.sysconf("SC_PAGESIZE")


def write_setting(path: str | Path, text: str) -> None:
    """Write an existing file of procfs or of a cgroup, in one call.

    Raises:
        OSError: the kernel refuses the value, or has no such setting (``FileNotFoundError``).
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode("ascii"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)


def raise_oom_score() -> None:
    """Make the kernel kill this process and its children before the service when memory runs out.

    Raises:
        PermissionError: this process is not dumpable.
    """
    write_setting("/proc/self/oom_score_adj", str(_OOM_SCORE))


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


def forbid_user_namespaces() -> None:
    """Forbid user namespaces below the current one: in a new one the payload would gain capabilities."""
    write_setting("/proc/sys/user/max_user_namespaces", "0")


def limit_kernel_memory(shm_size: int) -> bool:
    """Bound the kernel memory of notifications and System V IPC. The latter outlives processes: killing frees nothing.

    Args:
        shm_size: bytes of System V shared memory, as much as ``/dev/shm`` has.

    Returns:
        Whether System V IPC is bounded; payloads must not have it otherwise.
    """
    for name, most in _NOTIFY_LIMITS.items():
        with suppress(FileNotFoundError, PermissionError):
            write_setting(f"/proc/sys/user/{name}", str(most))
    return limit_system_v(shm_size)


def limit_system_v(shm_size: int, settings: str = "/proc/sys/kernel") -> bool:
    """Bound the System V IPC of the current ipc namespace; a payload that cannot write these files cannot undo it.

    Args:
        shm_size: bytes of shared memory.
        settings: where the files are.

    Returns:
        Whether every bound holds. It does not before Linux 5.19, where only the host's root may set any: payloads must
        not have the calls then.
    """
    try:
        for name, value in (
            ("shmmax", f"{shm_size}"),
            ("shmall", f"{shm_size // _PAGE}"),
            ("sem", "250 32000 100 128"),
            ("msgmni", "64"),
        ):
            write_setting(f"{settings}/{name}", value)
    except OSError:
        return False
    return True


def mask_proc() -> None:
    """Make ``/proc`` read-only and hide its revealing parts.

    All of it, not only the kernel's settings: a payload that could lower its ``oom_score_adj`` would have the service
    killed in its place when memory runs out. Files behind the links in ``/proc/PID/fd`` stay writable.
    """
    syscalls.restrict_mount("/proc", syscalls.MOUNT_ATTR_RDONLY)
    for path in filter(os.path.exists, _HIDDEN_FILES):
        syscalls.mount("/dev/null", path, None, syscalls.MS_BIND)
    for path in filter(os.path.exists, _HIDDEN_DIRECTORIES):
        _mount_empty(path)


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


def hide_sys() -> None:
    """Leave ``/sys`` empty and read-only."""
    os.makedirs("/sys", exist_ok=True)
    _mount_empty("/sys")


def _mount_empty(path: str) -> None:
    syscalls.mount("nothing", path, "tmpfs", _SAFE_FLAGS | syscalls.MS_RDONLY, "size=4k,nr_inodes=2,mode=0555")
