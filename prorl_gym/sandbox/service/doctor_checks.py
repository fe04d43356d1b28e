"""What a machine's facts mean for sandboxes: pure rules, each a cause with its fix."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prorl_gym.sandbox.service.host_facts import DirectoryFacts, HostFacts
from prorl_gym.sandbox.spawner.cgroup import CgroupsUnavailable
from prorl_gym.sandbox.spawner.namespaces import explain_user_namespaces
from prorl_gym.sandbox.spawner.rootfs import unsupported_upper

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
class Finding:
    """One line of the table."""

    name: str
    verdict: Verdict
    """``weak``: it works, and something will be missing or run out."""
    detail: str
    fix: str = ""


DoctorCheck = Callable[[HostFacts], Iterable[Finding]]


def run_checks(facts: HostFacts) -> list[Finding]:
    """Return the findings of every rule, in the order of the table."""
    return [finding for rule in _DOCTOR_CHECKS for finding in rule(facts)]


def _check_kernel(facts: HostFacts) -> Iterator[Finding]:
    if facts.kernel < _OLDEST_KERNEL:
        fix = "Linux 5.11 or newer has overlays for users; until then: sandbox.backend: apptainer-plain."
        yield Finding("kernel", "no", f"Linux {facts.release} has no userxattr overlay.", fix)
    else:
        yield Finding("kernel", "yes", f"Linux {facts.release}")


def _check_user_namespaces(facts: HostFacts) -> Iterator[Finding]:
    if facts.user_namespace_errno == 0:
        yield Finding("user namespaces", "yes", f"uid {facts.uid} can make them")
    else:
        cause = explain_user_namespaces(facts.user_namespace_errno, facts.sysctls.get)
        yield Finding("user namespaces", "no", cause.what, cause.fix)


def _check_namespace_limits(facts: HostFacts) -> Iterator[Finding]:
    for kind in ("user", "mnt", "pid", "net"):
        name = f"user.max_{kind}_namespaces"
        limit = facts.sysctls.get(name)
        if limit is not None and 0 < int(limit) < _MIN_NAMESPACES:
            detail = f"{name} is {limit}: so many sandboxes at most, all users' containers counted."
            yield Finding("namespaces", "weak", detail, f"As root: sysctl -w {name}=65536")


def _check_fuse(facts: HostFacts) -> Iterator[Finding]:
    if facts.fuse:
        yield Finding("/dev/fuse", "yes", "can be opened")
    else:
        fix = "As root: modprobe fuse; chmod 666 /dev/fuse. Only SIF files in apptainer-plain need it."
        yield Finding("/dev/fuse", "weak", "is missing or closed to this user.", fix)


def _check_scratch(facts: HostFacts) -> Iterator[Finding]:
    place = facts.scratch
    yield from _check_disk(place, "scratch", "sandbox.scratch", _MIN_SCRATCH_BYTES)
    if place.noexec:
        fix = f"Mount it without noexec, or set sandbox.scratch to another disk than {place.path}'s."
        yield Finding("scratch", "weak", "is mounted noexec: in apptainer-plain nothing written there can be run.", fix)
    length = len(facts.socket_directory.encode()) + 1 + _MAX_SOCKET_NAME
    if length > _MAX_SOCKET_PATH:
        detail = (
            f"sockets below {facts.socket_directory} would have {length} bytes; the kernel takes {_MAX_SOCKET_PATH}."
        )
        fix = f"Set sandbox.scratch to a path of at most {_MAX_SOCKET_PATH - 1 - _MAX_SOCKET_NAME} bytes."
        yield Finding("socket path", "no", detail, fix)


def _check_store(facts: HostFacts) -> Iterator[Finding]:
    if facts.store is None:
        return
    yield from _check_disk(facts.store, "image store", "sandbox.images.directory", _MIN_STORE_BYTES)
    if facts.store.nosuid:
        yield Finding("image store", "info", "is mounted nosuid, which changes nothing: setuid bits have no effect.")


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


_DOCTOR_CHECKS: tuple[DoctorCheck, ...] = (
    _check_kernel,
    _check_user_namespaces,
    _check_namespace_limits,
    _check_fuse,
    _check_scratch,
    _check_store,
    _check_memory,
    _check_ulimits,
    _check_cgroups,
    _check_apptainer,
)


def _format_size(count: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.3g} {unit}" if count < 1000 << shift else f"{count >> shift} {unit}"
    return f"{count} B"
