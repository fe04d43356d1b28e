"""A cgroup for each sandbox, where the service was given a part of the cgroup v2 tree to divide up (delegation).

    <delegated>/prorl-gym-<pid>-<start>/spawner    the spawner, which must be below to start processes below
    <delegated>/prorl-gym-<pid>-<start>/<id>       one sandbox

Optional. What bounds a sandbox without it (the guest's watchdog, RLIMIT_NPROC) goes on and names what was hit; the
cgroup is the hard edge behind it: nothing beyond it can be touched between two looks, files in memory are counted with
the processes that wrote them, and what a killed service left is ended at one word. Processes are born in their cgroup:
moving one takes the kernel up to 30 ms.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.processes import ProcessIdentity
from prorl_gym.sandbox.protocol import SandboxLimits

_CONTROLLERS = ("memory", "pids")
_PREFIX = "prorl-gym-"
_SPAWNER = "spawner"
_OWN_PROCESSES = 64
"""Processes and threads of ours beside the payload's: guest, init, keeper, and a container runtime's (Go)."""
_FIX = "Give the service a delegated cgroup: systemd-run --user --scope -p Delegate=yes -- prorl-gym serve"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why sandboxes get no cgroup."""

    cause: str
    fix: str = _FIX

    def __str__(self) -> str:
        return f"none has a cgroup, {self.cause}"


def own_cgroup(root: Path = Path("/"), pid: str = "self") -> Path | None:
    """Return the directory of this process's cgroup in the v2 tree; ``None`` when that is not mounted.

    Args:
        root: where ``/proc`` and the mount points are looked up.
        pid: the process.
    """
    inside = next(
        (line[3:] for line in (root / f"proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::")), None
    )
    for line in (root / f"proc/{pid}/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 ") and inside is not None:
            return root / before.split(" ")[4].lstrip("/") / inside.lstrip("/")
    return None


def find_delegated(start: Path | None) -> Path | Refusal:
    """Return the nearest cgroup at or above ``start`` that may be divided up.

    That is one with the controllers, which this user may write and which holds no processes of its own. For root, who
    may write all of them, it must be marked as delegated, too (``user.delegate``, as systemd does).
    """
    if start is None:
        return Refusal("no cgroup v2 tree is mounted", "Boot with systemd.unified_cgroup_hierarchy=1, or do without.")
    refusal = Refusal(f"{start} is not delegated to this user")
    for place in (start, *start.parents):
        if not (place / "cgroup.controllers").exists():
            break
        found = check_delegated(place)
        if found is None and (os.geteuid() != 0 or _is_marked(place)):
            return place
        refusal = found if place == start and found is not None else refusal
    return refusal


def check_delegated(place: Path) -> Refusal | None:
    """Return what keeps a cgroup from being divided up, or ``None``."""
    try:
        offered = (place / "cgroup.controllers").read_text().split()
        processes = (place / "cgroup.procs").read_text().split()
    except OSError as error:
        return Refusal(f"{place} is no cgroup of the v2 tree ({error.strerror})")
    missing = [name for name in _CONTROLLERS if name not in offered]
    if missing:
        return Refusal(f"{place} has no {' and no '.join(missing)} controller")
    for name in (".", "cgroup.procs", "cgroup.subtree_control"):
        if not os.access(place / name, os.W_OK):
            return Refusal(f"{place}/{name} cannot be written by this user")
    if processes:
        fix = "Start the service in a cgroup below it (systemd 254: DelegateSubgroup=service), or set sandbox.cgroup."
        return Refusal(f"{place} holds processes itself, so the kernel gives its controllers to no cgroup below", fix)
    return None


class Cgroups:
    """The cgroups of one spawner's sandboxes.

    Args:
        place: the spawner's part of the tree.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._left: set[str] = set()

    def __str__(self) -> str:
        return f"each has a cgroup below {self._place}"

    @classmethod
    def open(cls, delegated: Path, uid: int, gid: int) -> "Cgroups":
        """Take a part of a delegated cgroup, and enter it: this process is the spawner. Removes those of dead ones.

        Args:
            delegated: the cgroup to divide up.
            uid: that the spawner will have.
            gid: likewise.

        Raises:
            OSError: the kernel refused.
        """
        for other in delegated.glob(f"{_PREFIX}*-*"):
            _remove_if_dead(other)
        _write(delegated / "cgroup.subtree_control", " ".join(f"+{name}" for name in _CONTROLLERS))
        me = ProcessIdentity.of(os.getpid())
        place = delegated / f"{_PREFIX}{me.pid}-{me.start}"
        (place / _SPAWNER).mkdir(parents=True)
        _write(place / _SPAWNER / "cgroup.procs", str(me.pid))
        _write(place / "cgroup.subtree_control", " ".join(f"+{name}" for name in _CONTROLLERS))
        for path in (place, place / "cgroup.procs", place / _SPAWNER, place / _SPAWNER / "cgroup.procs"):
            os.chown(path, uid, gid)
        return cls(place)

    def fork(self, sandbox_id: str, limits: SandboxLimits) -> int:
        """Make the cgroup of a sandbox and fork a child into it.

        Raises:
            OSError: the kernel refused.
        """
        cgroup = self.make(sandbox_id, limits)
        try:
            return syscalls.fork_into(cgroup)
        except OSError:
            self.remove(sandbox_id)
            raise
        finally:
            os.close(cgroup)

    def make(self, sandbox_id: str, limits: SandboxLimits) -> int:
        """Make the cgroup of a sandbox and return a descriptor of it.

        Raises:
            OSError: the kernel refused.
        """
        path = self._place / sandbox_id
        path.mkdir()
        try:
            in_memory = limits.shm_size + (limits.root_size if limits.root_on == "memory" else 0)
            _write(path / "memory.max", str(limits.total_memory + in_memory))
            with suppress(FileNotFoundError):  # a kernel that does not account for swap
                _write(path / "memory.swap.max", "0")
            _write(path / "pids.max", str(limits.processes + _OWN_PROCESSES))
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            path.rmdir()
            raise

    def memory_kills(self, sandbox_id: str) -> int:
        """Return how many processes of a sandbox the kernel has killed because its cgroup was at its limit."""
        try:
            events = (self._place / sandbox_id / "memory.events").read_text("ascii").splitlines()
        except OSError:  # a sandbox without a cgroup
            return 0
        return next((int(line.split()[1]) for line in events if line.startswith("oom_kill ")), 0)

    def remove(self, sandbox_id: str) -> None:
        """Remove the cgroup of a sandbox that has ended. One that the kernel has not let go of yet is tried again."""
        self._left.add(sandbox_id)
        for name in list(self._left):
            if _removed(self._place / name):
                self._left.discard(name)


def open_cgroups(choice: str, uid: int, gid: int) -> Cgroups | Refusal:
    """Take a part of the cgroup tree for sandboxes, or say why there is none.

    Args:
        choice: ``auto``, ``off``, or a directory of the tree.
        uid: that this process, the spawner, will have.
        gid: likewise.

    Raises:
        SandboxError: the directory that was asked for cannot be divided up.
    """
    if choice == "off":
        return Refusal("sandbox.cgroup is off")
    asked = None if choice == "auto" else Path(choice)
    try:
        found = find_delegated(own_cgroup()) if asked is None else check_delegated(asked) or asked
        if isinstance(found, Path):
            return Cgroups.open(found, uid, gid)
    except OSError as error:
        found = Refusal(f"{error.filename}: {error.strerror}")
    if asked is not None:
        raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"sandbox.cgroup: {found.cause}.", found.fix)
    return found


def _remove_if_dead(place: Path) -> None:
    pid, _, start = place.name.removeprefix(_PREFIX).partition("-")
    if not (pid.isdigit() and start.isdigit()) or ProcessIdentity(int(pid), int(start)).alive:
        return
    with suppress(OSError):
        _write(place / "cgroup.kill", "1")
    for below in [entry for entry in place.iterdir() if entry.is_dir()]:
        _removed(below)
    _removed(place)


def _removed(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # a process of it is not quite dead
        return False
    return True


def _is_marked(place: Path) -> bool:
    for name in ("user.delegate", "trusted.delegate"):
        with suppress(OSError):
            if os.getxattr(place, name) == b"1":
                return True
    return False


def _write(path: Path, text: str) -> None:
    """Write a control file. It is there, or the kernel has no such control: nothing is created."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode("ascii"))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(descriptor)
