"""What the kernel shows inside: ``/proc`` with masks, a small ``/dev``, an empty ``/sys``.

Runs in a process whose root is the sandbox's already, so an image's symbolic links cannot lead out of it.
"""

import os
from contextlib import suppress

from prorl_gym.sandbox import syscalls, system_v

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

# What a container runtime hides: kernel memory, keys, timers.
HIDDEN_FILES = (
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
HIDDEN_DIRECTORIES = ("/proc/acpi", "/proc/scsi")
_TERMINALS = 64
"""Of one sandbox; the kernel has 3072 for all of them together."""
_WATCHING = {
    "max_inotify_instances": 32,
    "max_inotify_watches": 16384,
    "max_fanotify_groups": 8,
    "max_fanotify_marks": 16384,
}
"""Of one sandbox. The kernel has 128 instances, 128 groups and some 10,000 to 200,000 watches (``fs.inotify``,
``fs.fanotify``) for all that have one uid."""
_SAFE = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC


def take_devices() -> dict[str, int]:
    """Return detached mounts of the host's harmless devices; call before the root is changed."""
    taken = {name: syscalls.clone_mount(f"/dev/{device}") for name, device in _DEVICES.items()}
    for descriptor in taken.values():
        syscalls.restrict_mount(descriptor, syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NOEXEC)
    return taken


def mount_proc() -> None:
    """Mount this pid namespace's ``/proc``; the host's must still be mounted somewhere in this mount namespace."""
    os.makedirs("/proc", exist_ok=True)
    syscalls.mount("proc", "/proc", "proc", _SAFE)


def forbid_user_namespaces() -> None:
    """Let nobody make a user namespace below the current one: the payload must not gain capabilities in a new one."""
    with open("/proc/sys/user/max_user_namespaces", "w", encoding="ascii") as file:
        file.write("0")


def bound_kernel_memory(shm_size: int) -> bool:
    """Bound what is neither a process's memory nor a file's: it outlives processes, and ending them does not free it.

    Args:
        shm_size: bytes of System V shared memory, as much as ``/dev/shm`` has.

    Returns:
        Whether System V IPC is bounded; payloads must not have it otherwise.
    """
    for name, most in _WATCHING.items():
        with suppress(FileNotFoundError, PermissionError):
            with open(f"/proc/sys/user/{name}", "w", encoding="ascii") as file:
                file.write(f"{most}")
    return system_v.bound(shm_size)


def mask_proc() -> None:
    """Make ``/proc`` read-only and hide its telling parts.

    All of it: beside the settings of the kernel, a payload that may write its ``oom_score_adj`` lets the service be
    killed in its place when memory runs out. What the links in ``/proc/PID/fd`` lead to is as writable as it was.
    """
    syscalls.restrict_mount("/proc", syscalls.MOUNT_ATTR_RDONLY)
    for path in filter(os.path.exists, HIDDEN_FILES):
        syscalls.mount("/dev/null", path, None, syscalls.MS_BIND)
    for path in filter(os.path.exists, HIDDEN_DIRECTORIES):
        _mount_nothing(path)


def mount_dev(devices: dict[str, int]) -> None:
    """Make a small ``/dev`` with the given devices, and terminals of its own."""
    os.makedirs("/dev", exist_ok=True)
    syscalls.mount("dev", "/dev", "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "mode=0755,size=256k,nr_inodes=256")
    for name, descriptor in devices.items():
        with open(f"/dev/{name}", "xb"):
            pass
        syscalls.attach_mount(descriptor, f"/dev/{name}")
        os.close(descriptor)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"/dev/{name}")
    os.mkdir("/dev/pts")
    terminals = f"newinstance,ptmxmode=0666,mode=0620,max={_TERMINALS}"
    syscalls.mount("devpts", "/dev/pts", "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, terminals)


def mount_shm(size: int) -> None:
    """Mount ``/dev/shm`` with a size in bytes. Memory files are in it, and programs execute and map those."""
    os.makedirs("/dev/shm", exist_ok=True)
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
    syscalls.mount("shm", "/dev/shm", "tmpfs", flags, f"mode=1777,size={size},nr_inodes={size // 4096 + 256}")


def hide_sys() -> None:
    """Leave ``/sys`` empty and read-only."""
    os.makedirs("/sys", exist_ok=True)
    _mount_nothing("/sys")


def _mount_nothing(path: str) -> None:
    syscalls.mount("nothing", path, "tmpfs", _SAFE | syscalls.MS_RDONLY, "size=4k,nr_inodes=2,mode=0555")
