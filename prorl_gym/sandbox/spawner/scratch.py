"""The scratch directory: one small directory per sandbox, from which it is cleaned up after its owner's death.

    <scratch>/<id>/state.json    who owns it and which process is its init, with start times and boot id
    <scratch>/<id>/root/         mount point; empty on the host, unless the sandbox's root is kept on disk

A directory is made under another name and renamed once its owner is written, so that each has an owner. A sandbox is
garbage exactly when the spawner that owns it is dead. Normally its init is then dead too (the kernel kills it with its
parent); where it is not, ``reap_sandboxes`` kills it, if pid and start time are the recorded ones. Nothing is ever
killed by name, and nothing of a living owner is touched.
"""

import json
import os
import signal
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.process_identity import ProcessIdentity, boot_id
from prorl_gym.sandbox import syscalls
from prorl_gym.sandbox.guest.fork_exec import close_all_except
from prorl_gym.sandbox.tree_removal import remove_tree

_STATE_FILE = "state.json"
_OWNED_PREFIX = ".new-"
"""Prefix of directories whose name has their owner, since they may lack a state file: half made or half removed."""


def default_scratch() -> Path:
    """Return ``$PRORL_GYM_SCRATCH``, or this user's: on a local disk, never inside a checkout or a 0700 home."""
    return Path(os.environ.get("PRORL_GYM_SCRATCH") or f"/var/tmp/prorl-gym-{os.geteuid()}")


def make_scratch(path: Path, uid: int, gid: int) -> None:
    """Make the scratch directory, or check the one that is there. It belongs to the sandboxes' uid, mode 0700.

    Raises ``SandboxError`` when it cannot be made, or is a symbolic link, another user's or open to others.
    """
    try:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
            os.chown(path, uid, gid)
        found = os.lstat(path)
    except OSError as error:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"scratch directory {path}: {error.strerror}.",
            "Set sandbox.scratch to a directory on a local disk that can be made there.",
        ) from None
    fault = None
    if not stat.S_ISDIR(found.st_mode):
        fault = "is not a directory (symbolic links are refused)"
    elif found.st_uid != uid:
        fault = f"belongs to uid {found.st_uid}, not to the sandboxes' uid {uid}"
    elif found.st_mode & 0o077:
        fault = f"is open to others (mode {stat.S_IMODE(found.st_mode):04o}, wanted 0700)"
    if fault:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"scratch directory {path} {fault}.",
            "Remove it, or set sandbox.scratch to another directory.",
        )


def check_scratch_access(path: Path) -> None:
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"scratch directory {path} is out of reach of uid {os.geteuid()}: a directory above it is closed.",
            "Set sandbox.scratch to a directory that this uid may reach, such as one below /var/tmp.",
        )


@dataclass(frozen=True, slots=True)
class SandboxState:
    """Contents of the state file in a sandbox's directory."""

    boot_id: str
    owner: ProcessIdentity
    """The spawner that started it; a sandbox must not outlive it."""
    init: ProcessIdentity | None
    """Pid 1 of the sandbox, with its pid on the host; ``None`` for a directory that no sandbox has."""

    def to_json(self) -> str:
        init = None if self.init is None else [self.init.pid, self.init.start_ticks]
        return json.dumps(
            {"version": 1, "boot": self.boot_id, "owner": [self.owner.pid, self.owner.start_ticks], "init": init}
        )

    @classmethod
    def from_json(cls, text: str) -> "SandboxState":
        """Read the file's text. Raises ``ValueError`` when it is not a state."""
        try:
            data = json.loads(text)
            init = data["init"]
            return cls(data["boot"], ProcessIdentity(*data["owner"]), None if init is None else ProcessIdentity(*init))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a sandbox state: {error}") from None


def make_sandbox_directory(scratch: Path, sandbox_id: str, state: SandboxState) -> Path:
    """Make the directory of a sandbox; it appears under its name when it is complete.

    Raises ``OSError`` when it cannot be made (a full disk); nothing is left of it.
    """
    aside = scratch / _owned_name(state, sandbox_id)
    try:
        aside.mkdir(mode=0o700)
        (aside / "root").mkdir(mode=0o700)
        (aside / _STATE_FILE).write_text(state.to_json(), encoding="ascii")
        return aside.rename(scratch / sandbox_id)
    except OSError:
        remove_directory(aside)
        raise


def read_state(directory: Path, boot: str) -> SandboxState | None:
    """Return the state of a directory in the scratch, also one half made or removed; ``None``: it is not one of ours.

    ``boot``: id of the current boot, assumed where there is no state file.
    """
    if directory.name.startswith(_OWNED_PREFIX):
        pid, start, *_ = [*directory.name.removeprefix(_OWNED_PREFIX).split("-"), ""]
        if not (pid.isdigit() and start.isdigit()):
            return None
        return SandboxState(boot, ProcessIdentity(int(pid), int(start)), None)
    try:
        return SandboxState.from_json((directory / _STATE_FILE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def remove_directory(directory: Path) -> None:
    """Remove the directory of a sandbox, whatever the permissions inside; one that is gone is no error."""
    remove_tree(_mark_for_removal(directory))


def _mark_for_removal(directory: Path) -> Path:
    """Rename a directory so that its name has its owner: its state file may be removed first."""
    state = None if directory.name.startswith(_OWNED_PREFIX) else read_state(directory, "")
    if state is None:
        return directory
    aside = directory.with_name(_owned_name(state, directory.name))
    try:
        return directory.rename(aside)
    except FileNotFoundError:  # another process has just removed it
        return directory


def _owned_name(state: SandboxState, sandbox_id: str) -> str:
    return f"{_OWNED_PREFIX}{state.owner.pid}-{state.owner.start_ticks}-{sandbox_id}"


@dataclass(frozen=True, slots=True)
class Reaped:
    """Counts of one run of ``reap_sandboxes``."""

    removed: int = 0
    """Directories of dead owners, removed."""
    killed: int = 0
    """Inits that were still alive although their owner was dead."""
    alive: int = 0
    """Sandboxes of living owners, left alone."""


def reap_sandboxes(scratch: Path, remove: Callable[[Path], None] = remove_directory) -> Reaped:
    """Remove every sandbox whose owner is dead. Runs as the uid that owns the scratch directory.

    ``remove`` removes the directory of a sandbox, or begins to. Raises ``OSError`` when one could not be removed.
    """
    boot = boot_id()
    removed = killed = alive = 0
    for directory in sorted(entry for entry in scratch.iterdir() if entry.is_dir() and not entry.is_symlink()):
        state = read_state(directory, boot)
        if state is None:
            continue  # not made by us: the operator may have pointed us at a directory in use
        if state.boot_id == boot and state.owner.is_alive:
            alive += 1
            continue
        if state.boot_id == boot and state.init is not None and state.init.kill():
            killed += 1
        remove(directory)
        removed += 1
    return Reaped(removed, killed, alive)


class DirectoryRemover:
    """Removes the directories of ended sandboxes without blocking the event loop for long.

    A root in memory leaves two small entries, which are removed at once. A root on disk may leave a million files: a
    child process removes them. If the child dies with this process, the directory's name has a dead owner, and the next
    ``reap_sandboxes`` removes the rest.

    ``watch`` has a function called whenever a descriptor becomes readable, until ``unwatch``.
    """

    def __init__(self, watch: Callable[[int, Callable[[], None]], None], unwatch: Callable[[int], object]) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._finish_by_pid: dict[int, Callable[[], None]] = {}

    def remove(self, directory: Path, on_removed: Callable[[str], None]) -> None:
        """Remove the directory of a sandbox that has ended. On return its name is free again.

        ``on_removed`` is called when it is removed (with "") or cannot be (with the reason).
        """
        try:
            path = _mark_for_removal(directory)
            if not _is_large(path):
                remove_directory(path)
                return on_removed("")
            pid = _fork_removal(path)
        except OSError as error:
            return on_removed(_error_text(directory, error.errno or 0, error.filename))
        pidfd = os.pidfd_open(pid)

        def finish() -> None:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._unwatch(pidfd)
            os.close(pidfd)
            del self._finish_by_pid[pid]
            on_removed("" if code == 0 else _error_text(path, max(code, 0)))

        self._finish_by_pid[pid] = finish
        self._watch(pidfd, finish)

    def wait_all(self) -> None:
        for finish in list(self._finish_by_pid.values()):
            finish()


def _is_large(path: Path) -> bool:
    """Whether there is something in the root's directory: one that was only a mount point is empty."""
    try:
        return bool(os.listdir(path / "root"))
    except FileNotFoundError:
        return False
    except PermissionError:
        return True


def _fork_removal(path: Path) -> int:
    """Remove a directory in a child and return its pid. Its exit code is 0, or the ``errno`` of the failure."""
    parent = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid
    code = 255
    try:
        close_all_except(0, 1, 2)
        syscalls.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() == parent:
            os.nice(10)
            remove_directory(path)
        code = 0
    except OSError as error:
        code = error.errno or 255
    finally:
        os._exit(code)


def _error_text(path: Path, number: int, name: str | None = None) -> str:
    return f"{name or path} cannot be removed: {os.strerror(number)}"
