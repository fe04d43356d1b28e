"""Facts about a machine that runs sandboxes, read once, and pure rules that judge them, each a cause with its fix."""

import errno
import os
import platform
import resource
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.spawner.cgroup import CgroupsUnavailable, find_delegated, own_cgroup
from prorl_gym.sandbox.spawner.namespaces import explain_user_namespaces, read_sysctl
from prorl_gym.sandbox.spawner.rootfs import file_system_of, unsupported_upper
from prorl_gym.sandbox.spawner.scratch import default_scratch

_NAMESPACE_LIMITS = tuple(f"user.max_{kind}_namespaces" for kind in ("user", "mnt", "pid", "net"))
_SYSCTLS = (
    *_NAMESPACE_LIMITS,
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
)
_VERSION_SECONDS = 10
_APPTAINER_PROGRAMS = ("apptainer", "singularity")
"""Names in PATH, best first."""

Verdict = Literal["yes", "weak", "no", "info"]
_OLDEST_KERNEL = (5, 11)
_MAX_SOCKET_PATH = 107
"""sun_path of unix(7) without its final NUL, in bytes."""
_MAX_SOCKET_NAME = 45
"""Longest name below the scratch directory: a sandbox's id (32 characters) and a socket in its directory."""
_FILES_PER_SANDBOX = 16
_PROCESSES_PER_SANDBOX = 16
_SHARED_MEMORY_KERNEL = (5, 9)
_MIN_OPEN_FILES = 4096
_MIN_PROCESSES = 2048
_MIN_NAMESPACES = 256
_MIN_INODES = 100_000
_MIN_STORE_BYTES = 10 << 30
_MIN_SCRATCH_BYTES = 1 << 30


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
    """Uid that sandboxes will have."""
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
    cgroups: str | CgroupsUnavailable
    """The cgroup that is divided up among the sandboxes, or why there is none."""
    apptainer: ApptainerFacts | None = None
    limits: Mapping[str, int] = field(default_factory=dict[str, int])
    """The configured bounds of one sandbox that a machine must have room for: ``open_files``, ``root_size``."""


def collect_host_facts(config: SandboxConfig, store: Path | None = None) -> HostFacts:
    """Look at this machine: the scratch directory, programs and limits of ``config``, and the image ``store``."""
    uid = os.geteuid() or config.uid
    major, minor = platform.release().split(".")[:2]
    return HostFacts(
        kernel=(int(major), int("".join(filter(str.isdigit, minor)) or 0)),
        release=platform.release(),
        uid=uid,
        sysctls={name: value for name in _SYSCTLS if (value := read_sysctl(name)) is not None},
        user_namespace_errno=_try_user_namespace(uid),
        fuse=os.access("/dev/fuse", os.R_OK | os.W_OK),
        scratch=describe_directory(config.scratch or default_scratch()),
        store=describe_directory(store) if store else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[1],
        free_memory=_free_memory(),
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
    libexec = first_output_line(path, "buildcfg", "LIBEXECDIR")
    setuid_starter = ""
    for starter in (f"{libexec}/{name}/bin/starter-suid" for name in _APPTAINER_PROGRAMS):
        with suppress(OSError):
            found = os.stat(starter)
            if found.st_mode & stat.S_ISUID and found.st_uid == 0:
                setuid_starter = starter
                break
    return ApptainerFacts(path, first_output_line(path, "--version"), setuid_starter)


def first_output_line(*command: str) -> str:
    """Return the first line that a program prints, or "" when it fails. Blocks: use a thread."""
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
    """Return the path of the program; ``SANDBOX_UNAVAILABLE`` when it is not installed."""
    found = find_apptainer(config)
    if found is not None:
        return found
    raise SandboxError(
        FailureKind.SANDBOX_UNAVAILABLE,
        f"sandbox.apptainer: no program {config.apptainer}." if config.apptainer else "Apptainer is not installed.",
        "Install apptainer or singularity-ce, or choose the backend 'userns', which needs none.",
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    name: str
    verdict: Verdict
    """``weak``: it works, and something will be missing or run out."""
    detail: str
    fix: str = ""


def run_checks(facts: HostFacts) -> list[Finding]:
    """Return the findings of every rule, in the order of the table."""
    rules = (
        _check_kernel,
        _check_directories,
        _check_memory,
        _check_ulimits,
        _check_cgroups,
        _check_apptainer,
    )
    return [finding for rule in rules for finding in rule(facts)]


def _check_kernel(facts: HostFacts) -> Iterator[Finding]:
    if facts.kernel < _OLDEST_KERNEL:
        fix = "Linux 5.11 or newer has overlays for users; until then: sandbox.backend: apptainer-plain."
        yield Finding("kernel", "no", f"Linux {facts.release} has no userxattr overlay.", fix)
    else:
        yield Finding("kernel", "yes", f"Linux {facts.release}")
    if facts.user_namespace_errno == 0:
        yield Finding("user namespaces", "yes", f"uid {facts.uid} can make them")
    else:
        cause = explain_user_namespaces(facts.user_namespace_errno, facts.sysctls.get)
        yield Finding("user namespaces", "no", cause.what, cause.fix)
    for name in _NAMESPACE_LIMITS:
        limit = facts.sysctls.get(name)
        if limit is not None and 0 < int(limit) < _MIN_NAMESPACES:
            detail = f"{name} is {limit}: so many sandboxes at most, all users' containers counted."
            yield Finding("namespaces", "weak", detail, f"As root: sysctl -w {name}=65536")
    if facts.fuse:
        yield Finding("/dev/fuse", "yes", "can be opened")
    else:
        fix = "As root: modprobe fuse; chmod 666 /dev/fuse. Only SIF files in apptainer-plain need it."
        yield Finding("/dev/fuse", "weak", "is missing or closed to this user.", fix)


def _check_directories(facts: HostFacts) -> Iterator[Finding]:
    place = facts.scratch
    yield from _check_disk(place, "scratch", "sandbox.scratch", _MIN_SCRATCH_BYTES)
    if place.noexec:
        fix = f"Mount it without noexec, or set sandbox.scratch to another disk than {place.path}'s."
        yield Finding("scratch", "weak", "is mounted noexec: in apptainer-plain nothing written there can be run.", fix)
    length = len(place.path.encode()) + 1 + _MAX_SOCKET_NAME
    if length > _MAX_SOCKET_PATH:
        detail = f"sockets below {place.path} would have {length} bytes; the kernel takes {_MAX_SOCKET_PATH}."
        fix = f"Set sandbox.scratch to a path of at most {_MAX_SOCKET_PATH - 1 - _MAX_SOCKET_NAME} bytes."
        yield Finding("socket path", "no", detail, fix)
    if facts.store is not None:
        yield from _check_disk(facts.store, "image store", "sandbox.images.directory", _MIN_STORE_BYTES)
        if facts.store.nosuid:
            detail = "is mounted nosuid, which changes nothing: setuid bits have no effect."
            yield Finding("image store", "info", detail)


def _check_disk(place: DirectoryFacts, name: str, setting: str, least: int) -> Iterator[Finding]:
    unfit = unsupported_upper(place.file_system)
    if place.read_only:
        yield Finding(
            name, "no", f"{place.path} is on a read-only file system.", f"Set {setting} to one on a local disk."
        )
    elif unfit:
        detail = f"{place.path} is on {unfit}, which cannot take the changes of an overlay, nor keep its marks."
        # Roots are kept in memory (limits.root_on), so such a scratch works as long as nothing is to be kept on disk.
        verdict: Verdict = "weak" if name == "scratch" else "no"
        yield Finding(
            name, verdict, detail, f"Set {setting} to a directory on a local disk (ext4, xfs, btrfs) or tmpfs."
        )
    else:
        yield Finding(name, "yes", f"{place.path} on {place.file_system}, {_format_size(place.free_bytes)} free")
    if place.free_bytes < least:
        detail = f"{place.path} has {_format_size(place.free_bytes)} left (disk or quota)."
        yield Finding(name, "weak", detail, f"Free some: {_format_size(least)} is little already; or set {setting}.")
    if place.free_inodes is not None and place.free_inodes < _MIN_INODES:
        detail = f"{place.path} has {place.free_inodes} inodes left; an unpacked image takes 10,000 to 300,000."
        yield Finding(name, "weak", detail, f"Remove files, have the inode quota raised, or set {setting}.")


def _check_memory(facts: HostFacts) -> Iterator[Finding]:
    root = facts.limits.get("root_size", 0)
    if facts.free_memory < root:
        detail = (
            f"{_format_size(facts.free_memory)} of memory are free; one sandbox may write "
            f"{_format_size(root)}, kept in memory."
        )
        yield Finding("memory", "weak", detail, "Lower sandbox.limits.root_size, or free memory.")
    else:
        yield Finding("memory", "yes", f"{_format_size(facts.free_memory)} free")


def _check_ulimits(facts: HostFacts) -> Iterator[Finding]:
    files = facts.open_files
    if files != -1 and files < max(_MIN_OPEN_FILES, facts.limits.get("open_files", 0)):
        detail = f"the hard limit of open files is {files}: about {files // _FILES_PER_SANDBOX} sandboxes."
        fix = "Raise it: ulimit -Hn 65536, LimitNOFILE= of the unit, or 'nofile' in /etc/security/limits.conf."
        yield Finding("open files", "weak", detail, fix)
    if facts.processes != -1 and facts.processes < _MIN_PROCESSES:
        enough_for = facts.processes // _PROCESSES_PER_SANDBOX
        detail = f"this user may have {facts.processes} processes: about {enough_for} sandboxes."
        fix = "Raise it: ulimit -Hu 65536, TasksMax= of the unit, or 'nproc' in /etc/security/limits.conf."
        yield Finding("processes", "weak", detail, fix)


def _check_cgroups(facts: HostFacts) -> Iterator[Finding]:
    found = facts.cgroups
    if isinstance(found, CgroupsUnavailable):
        detail = f"none: memory of sandboxes is bounded by what their guests can read: {found.cause}. {found.fix}"
        yield Finding("cgroups", "info", detail)
        if facts.kernel < _SHARED_MEMORY_KERNEL:
            detail = f"Linux {facts.release} does not report shared memory: what a program unmaps is not counted."
            yield Finding("shared memory", "weak", detail, "Boot Linux 5.9 or newer, or give the service a cgroup.")
    else:
        yield Finding("cgroups", "yes", f"the kernel bounds memory: one for each sandbox, below {found}")


def _check_apptainer(facts: HostFacts) -> Iterator[Finding]:
    found = facts.apptainer
    if found is None:
        yield Finding("Apptainer", "info", "is not installed; 'userns' needs none.")
    else:
        mode = f"setuid ({found.setuid_starter})" if found.setuid_starter else "not setuid"
        yield Finding("Apptainer", "info", f"{found.version or 'of unknown version'} at {found.path}, {mode}")


def _format_size(count: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.3g} {unit}" if count < 1000 << shift else f"{count >> shift} {unit}"
    return f"{count} B"
