"""What a machine offers to sandboxes: read once, judged in ``doctor_checks``. Nothing here changes anything."""

import errno
import os
import platform
import resource
import shutil
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.spawner.cgroup import CgroupsUnavailable, find_delegated, own_cgroup
from prorl_gym.sandbox.spawner.namespaces import read_sysctl
from prorl_gym.sandbox.spawner.rootfs import file_system_of
from prorl_gym.sandbox.spawner.scratch import default_scratch

_SYSCTLS = (
    "user.max_user_namespaces",
    "user.max_mnt_namespaces",
    "user.max_pid_namespaces",
    "user.max_net_namespaces",
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
)
_VERSION_SECONDS = 10
_APPTAINER_PROGRAMS = ("apptainer", "singularity")
"""Names in PATH, best first."""


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """A directory that sandboxes use, or will: then the nearest one that exists is described."""

    path: str
    exists: bool
    file_system: str
    """As the mount table names it: ``ext4``, ``nfs4``, ``fuse.sshfs``; else ``unknown``."""
    free_bytes: int
    free_inodes: int | None
    """``None`` when the file system does not count them."""
    noexec: bool = False
    nosuid: bool = False
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class ApptainerFacts:
    """An installed Apptainer or Singularity."""

    path: str
    version: str
    setuid_starter: str = ""
    """Path of its setuid part; "" in an installation without one."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts about this machine, for one user."""

    kernel: tuple[int, int]
    release: str
    uid: int
    """That sandboxes will have."""
    sysctls: Mapping[str, str]
    """Kernel settings that exist, by their dotted names."""
    user_namespace_errno: int
    """0 when one could be made just now, else the ``errno``."""
    fuse: bool
    """/dev/fuse can be opened for writing."""
    scratch: DirectoryFacts
    store: DirectoryFacts | None
    open_files: int
    """Hard limit of this process; -1 is none."""
    processes: int
    """Hard limit of this user; -1 is none."""
    free_memory: int
    """Bytes that can be given out without swapping: roots of sandboxes are kept in memory."""
    socket_directory: str
    """Where Unix sockets with a name are made."""
    cgroups: str | CgroupsUnavailable
    """The cgroup that is divided up among the sandboxes, or why there is none."""
    apptainer: ApptainerFacts | None = None
    limits: Mapping[str, int] = field(default_factory=dict[str, int])
    """The configured bounds of one sandbox that a machine must have room for: ``open_files``, ``root_size``."""


def collect_host_facts(config: SandboxConfig, store: Path | None = None) -> HostFacts:
    """Look at this machine.

    Args:
        config: names scratch, uid, programs and limits.
        store: directory of the image store, when there is one.
    """
    uid = os.geteuid() or config.uid
    major, minor = platform.release().split(".")[:2]
    scratch = config.scratch or default_scratch()
    return HostFacts(
        kernel=(int(major), int("".join(filter(str.isdigit, minor)) or 0)),
        release=platform.release(),
        uid=uid,
        sysctls={name: value for name in _SYSCTLS if (value := read_sysctl(name)) is not None},
        user_namespace_errno=_try_user_namespace(uid),
        fuse=os.access("/dev/fuse", os.R_OK | os.W_OK),
        scratch=describe_directory(scratch),
        store=describe_directory(store) if store else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[1],
        free_memory=_free_memory(),
        socket_directory=str(scratch),
        apptainer=_describe_apptainer(config),
        cgroups=_find_cgroup(),
        limits={"open_files": config.limits.open_files, "root_size": config.limits.root_size},
    )


def describe_directory(path: Path) -> DirectoryFacts:
    """Describe a directory, or the nearest one above it that exists."""
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    found = os.statvfs(nearest)
    return DirectoryFacts(
        path=str(path),
        exists=nearest == path,
        file_system=file_system_of(nearest),
        free_bytes=found.f_bavail * found.f_frsize,
        free_inodes=found.f_favail if found.f_files else None,
        noexec=bool(found.f_flag & os.ST_NOEXEC),
        nosuid=bool(found.f_flag & os.ST_NOSUID),
        read_only=bool(found.f_flag & os.ST_RDONLY),
    )


def _try_user_namespace(uid: int) -> int:
    """Make a user namespace in a child process, as the sandboxes' uid, and work in it; return 0 or the ``errno``."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            syscalls.set_dumpable(True)
            syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWNET)
            code = 0
        except OSError as error:
            code = error.errno or errno.EIO
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _free_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as table:
        for line in table:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return 0


def _find_cgroup() -> str | CgroupsUnavailable:
    try:
        found = find_delegated(own_cgroup())
    except OSError as error:
        return CgroupsUnavailable(f"{error.filename}: {error.strerror}")
    return found if isinstance(found, CgroupsUnavailable) else str(found)


def _describe_apptainer(config: SandboxConfig) -> ApptainerFacts | None:
    path = find_apptainer(config)
    if path is None:
        return None
    return ApptainerFacts(path, _first_output_line(path, "--version"), _setuid_starter(path))


def _setuid_starter(path: str) -> str:
    libexec = _first_output_line(path, "buildcfg", "LIBEXECDIR")
    for name in _APPTAINER_PROGRAMS:
        starter = f"{libexec}/{name}/bin/starter-suid"
        try:
            found = os.stat(starter)
        except OSError:
            continue
        if found.st_mode & stat.S_ISUID and found.st_uid == 0:
            return starter
    return ""


def _first_output_line(*command: str) -> str:
    """Return the first line that a program prints, or "" when it prints none."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0][:100]


def find_apptainer(config: SandboxConfig) -> str | None:
    """Return the path of the program, or ``None``. SingularityCE's name serves where Apptainer's is missing."""
    installed = next(filter(None, map(shutil.which, _APPTAINER_PROGRAMS)), None)
    found = str(config.apptainer) if config.apptainer else installed
    return found if found and os.access(found, os.X_OK) else None


def require_apptainer(config: SandboxConfig) -> str:
    """Return the path of the program.

    Raises:
        SandboxError: ``SANDBOX_UNAVAILABLE``: it is not installed.
    """
    found = find_apptainer(config)
    if found is not None:
        return found
    wanted = config.apptainer
    raise SandboxError(
        FailureKind.SANDBOX_UNAVAILABLE,
        "Apptainer is not installed." if wanted is None else f"sandbox.apptainer: no program {wanted}.",
        "Install apptainer or singularity-ce, or choose the backend 'userns', which needs none.",
    )
