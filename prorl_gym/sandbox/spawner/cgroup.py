"""A cgroup for each sandbox, where a part of the cgroup v2 tree was delegated to the service.

    <delegated>/prorl-gym-<pid>-<start>/spawner    the spawner: from outside the subtree it may not fork into it
    <delegated>/prorl-gym-<pid>-<start>/<id>       one sandbox

Optional. What bounds a sandbox without it (the guest's watchdog, RLIMIT_NPROC) goes on and names what was hit; the
cgroup is the hard limit behind it: it holds between two checks, it counts files in memory with the processes that
wrote them, and one write kills what a killed service left. Processes are forked into their cgroup: moving one takes the
kernel up to 30 ms.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.process_identity import ProcessIdentity
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.protocol import SandboxLimits
from prorl_gym.sandbox.syscalls import write_setting

_CONTROLLERS = ("memory", "pids")
_PREFIX = "prorl-gym-"
_SPAWNER = "spawner"
_OVERHEAD_PROCESSES = 64
"""Processes and threads of ours: guest, init, supervisor, and the threads of a runtime written in Go."""
_FIX = "Give the service a delegated cgroup: systemd-run --user --scope -p Delegate=yes -- prorl-gym serve"


@dataclass(frozen=True, slots=True)
class CgroupsUnavailable:
    """Why sandboxes get no cgroup."""

    cause: str
    fix: str = _FIX

    def __str__(self) -> str:
        return f"none has a cgroup, {self.cause}"


def own_cgroup(root: Path = Path("/")) -> Path | None:
    """Return the directory of this process's cgroup in the v2 tree; ``None`` when that is not mounted.

    ``/proc`` and the mount points are looked up below ``root``.
    """
    inside = next(
        (line[3:] for line in (root / "proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), None
    )
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 ") and inside is not None:
            return root / before.split(" ")[4].lstrip("/") / inside.lstrip("/")
    return None


def find_delegated(first: Path | None) -> Path | CgroupsUnavailable:
    """Return the nearest cgroup at or above ``first`` that may be divided up, or why there is none.

    It must have the controllers, be writable by this user and hold no processes of its own. Since root may write every
    cgroup, one for root must also be marked as delegated (``user.delegate``, as systemd does).
    """
    if first is None:
        return CgroupsUnavailable(
            "no cgroup v2 tree is mounted", "Boot with systemd.unified_cgroup_hierarchy=1, or do without."
        )
    refusal = CgroupsUnavailable(f"{first} is not delegated to this user")
    for place in (first, *first.parents):
        if not (place / "cgroup.controllers").exists():
            break
        found = check_delegated(place)
        if found is None and (os.geteuid() != 0 or _is_marked_delegated(place)):
            return place
        refusal = found if place == first and found is not None else refusal
    return refusal


def check_delegated(directory: Path) -> CgroupsUnavailable | None:
    """Return what keeps a cgroup from being divided up, or ``None``."""
    try:
        offered = (directory / "cgroup.controllers").read_text().split()
        processes = (directory / "cgroup.procs").read_text().split()
    except OSError as error:
        return CgroupsUnavailable(f"{directory} is no cgroup of the v2 tree ({error.strerror})")
    missing = [name for name in _CONTROLLERS if name not in offered]
    if missing:
        return CgroupsUnavailable(f"{directory} has no {' and no '.join(missing)} controller")
    for name in (".", "cgroup.procs", "cgroup.subtree_control"):
        if not os.access(directory / name, os.W_OK):
            return CgroupsUnavailable(f"{directory}/{name} cannot be written by this user")
    if processes:
        fix = "Start the service in a cgroup below it (systemd 254: DelegateSubgroup=service), or set sandbox.cgroup."
        return CgroupsUnavailable(
            f"{directory} holds processes itself, so the kernel gives its controllers to no cgroup below", fix
        )
    return None


class Cgroups:
    """The cgroups of one spawner's sandboxes, below its part of the tree."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._unremoved: set[str] = set()

    def __str__(self) -> str:
        return f"each has a cgroup below {self._directory}"

    @classmethod
    def create_subtree(cls, delegated: Path, uid: int, gid: int) -> "Cgroups":
        """Make the subtree of this process, the spawner, and enter it; remove those of dead spawners.

        ``uid`` and ``gid`` are the spawner's, once it has dropped root. Raises ``OSError`` when the kernel refuses.
        """
        for other in delegated.glob(f"{_PREFIX}*-*"):
            _remove_if_stale(other)
        write_setting(delegated / "cgroup.subtree_control", " ".join(f"+{name}" for name in _CONTROLLERS))
        me = ProcessIdentity.of(os.getpid())
        place = delegated / f"{_PREFIX}{me.pid}-{me.start_ticks}"
        (place / _SPAWNER).mkdir(parents=True)
        write_setting(place / _SPAWNER / "cgroup.procs", str(me.pid))
        write_setting(place / "cgroup.subtree_control", " ".join(f"+{name}" for name in _CONTROLLERS))
        for path in (place, place / "cgroup.procs", place / _SPAWNER, place / _SPAWNER / "cgroup.procs"):
            os.chown(path, uid, gid)
        return cls(place)

    def fork_into(self, sandbox_id: str, limits: SandboxLimits, namespaces: int) -> int:
        cgroup = self.make_cgroup(sandbox_id, limits)
        try:
            return syscalls.fork_into(namespaces, cgroup)
        except OSError:
            self.remove_cgroup(sandbox_id)
            raise
        finally:
            os.close(cgroup)

    def make_cgroup(self, sandbox_id: str, limits: SandboxLimits) -> int:
        path = self._directory / sandbox_id
        path.mkdir()
        try:
            in_memory = limits.shm_size + (limits.root_size if limits.root_on == "memory" else 0)
            write_setting(path / "memory.max", str(limits.total_memory + in_memory))
            with suppress(FileNotFoundError):  # a kernel that does not account for swap
                write_setting(path / "memory.swap.max", "0")
            write_setting(path / "pids.max", str(limits.processes + _OVERHEAD_PROCESSES))
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            path.rmdir()
            raise

    def open_cgroup(self, sandbox_id: str) -> int:
        return os.open(self._directory / sandbox_id, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def count_oom_kills(self, sandbox_id: str) -> int:
        """Return how many processes of a sandbox the kernel has killed because its cgroup was at its limit."""
        try:
            events = (self._directory / sandbox_id / "memory.events").read_text("ascii").splitlines()
        except OSError:  # a sandbox without a cgroup
            return 0
        return next((int(line.split()[1]) for line in events if line.startswith("oom_kill ")), 0)

    def remove_cgroup(self, sandbox_id: str) -> None:
        """Remove the cgroup of a sandbox that has ended. One that is still busy is removed by a later call."""
        self._unremoved.add(sandbox_id)
        for name in list(self._unremoved):
            if _try_remove(self._directory / name):
                self._unremoved.discard(name)


def open_cgroups(choice: str, uid: int, gid: int) -> Cgroups | CgroupsUnavailable:
    """Make a subtree of cgroups for sandboxes; or return why there is none.

    ``choice`` is ``auto``, ``off``, or a directory of the tree; ``uid`` and ``gid`` as for ``create_subtree``. Raises
    ``SandboxError`` when the configured directory cannot be divided up.
    """
    if choice == "off":
        return CgroupsUnavailable("sandbox.cgroup is off")
    asked = None if choice == "auto" else Path(choice)
    try:
        found = find_delegated(own_cgroup()) if asked is None else check_delegated(asked) or asked
        if isinstance(found, Path):
            return Cgroups.create_subtree(found, uid, gid)
    except OSError as error:
        found = CgroupsUnavailable(f"{error.filename}: {error.strerror}")
    if asked is not None:
        raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"sandbox.cgroup: {found.cause}.", found.fix)
    return found


def _remove_if_stale(place: Path) -> None:
    pid, _, start = place.name.removeprefix(_PREFIX).partition("-")
    if not (pid.isdigit() and start.isdigit()) or ProcessIdentity(int(pid), int(start)).is_alive:
        return
    with suppress(OSError):
        write_setting(place / "cgroup.kill", "1")
    for below in [entry for entry in place.iterdir() if entry.is_dir()]:
        _try_remove(below)
    _try_remove(place)


def _try_remove(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # a process of it is not quite dead
        return False
    return True


def _is_marked_delegated(place: Path) -> bool:
    for name in ("user.delegate", "trusted.delegate"):
        with suppress(OSError):
            if os.getxattr(place, name) == b"1":
                return True
    return False
