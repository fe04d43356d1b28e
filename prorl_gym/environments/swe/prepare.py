"""Putting a repository in place: the same way in the agent's sandbox and in the one that grades.

What stands in the working directory afterwards is the base: a git repository with one commit on ``main`` and nothing
else. Later commits, other branches, tags, remotes, stashes, reflogs, and objects of any of them are gone, not hidden;
files keep their state, tracked or not. Author and date are fixed, so all replicas see the same commit.
"""

import asyncio
import base64
import hashlib
import os
import stat
from dataclasses import dataclass, replace
from importlib.resources import files

from prorl_gym.environments.killed import must_have_ended
from prorl_gym.environments.swe.public_rows import ASIDE, HIDDEN, HIDDEN_ABROAD
from prorl_gym.environments.swe.task import Repository, SweTask
from prorl_gym.errors import FailureKind, RolloutError, SandboxError, TaskError
from prorl_gym.sandbox.protocol import ExecResult, Sandbox

_PLACE = files("prorl_gym.environments.swe").joinpath("place.sh").read_text(encoding="utf-8")

PLACE_SECONDS = 300.0
"""For unpacking, and for placing: both take a second at most where the machine has time."""
MAX_PACKED = 1 << 30
"""Bytes of a tar.gz on the service's host."""
_OUTPUT = 16 << 20
_MAX_INDEX = 256 << 20

_COMPLAINTS = {
    81: ("git does not run in it", "Use an image with git: it is needed to prepare the task and by the agent."),
    82: ("there is no repository in {workdir}", "Give the row an 'archive' or a 'path', or an image that holds one."),
    83: ("its repository has no commit {base}", "Use the image that was built for this row."),
    84: ("commit {base} cannot be checked out", "Use the image that was built for this row."),
    85: ("its repository lacks objects", "Build the image from a complete clone."),
}
"""What exit codes of place.sh mean, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Base:
    """The state from which the agent starts."""

    commit: str
    dirty: frozenset[str]
    """Paths below the working directory that the image changed or added beside the base commit: they belong to the
    build, not to the repair. A path that ends in ``/`` stands for all below it."""
    untracked: tuple[str, ...]
    """Those of them that are in no commit."""
    nested: frozenset[str]
    """Further ``.git`` below the working directory."""


async def place(task: SweTask, sandbox: Sandbox) -> Base:
    """Put the task's repository into the sandbox's working directory, at its base.

    Raises:
        TaskError: ``BAD_ROW`` or ``IMAGE_BROKEN``: the repository is not what the row says.
        SandboxError: the sandbox is lost, or too slow.
    """
    packed = await asyncio.to_thread(read_packed, task.id, task.repository)
    if packed:
        await _unpack(task, sandbox, packed)
    names = HIDDEN.get(task.source, ())
    result = await _run(sandbox, ["sh", "-c", _PLACE, "place", task.workdir, task.base_commit, ASIDE, *names])
    if result.exit_code != 0:
        raise _broken(task, sandbox, result)
    return _read_base(task, sandbox, result)


async def place_for_agent(task: SweTask, sandbox: Sandbox) -> Base:
    """Place the repository, and remove what the image holds for graders only."""
    base = await place(task, sandbox)
    abroad = (ASIDE, *HIDDEN_ABROAD.get(task.source, ()))
    result = await _run(sandbox, ["rm", "-rf", "--", *abroad])
    if result.exit_code != 0:
        raise TaskError(
            FailureKind.IMAGE_BROKEN,
            f"swe row {task.id}: hidden tests cannot be removed from image '{sandbox.spec.image}': {_said(result)}.",
            "Make the image's files belong to the user of the sandboxes.",
        )
    return base


async def read_index(task: SweTask, sandbox: Sandbox) -> bytes:
    """Return git's list of the placed files, with which later changes are found without reading them all again."""
    try:
        return await sandbox.read_file(f"{task.workdir}/.git/index", limit=_MAX_INDEX)
    except OSError as error:
        what = f"swe row {task.id}: the placed repository has no index ({error.strerror})."
        raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "Look at the disk limit of the sandboxes.") from None


def read_packed(name: str, repository: Repository) -> bytes:
    """Return the tar.gz of a row, or nothing when the image holds the repository. Blocks.

    Raises:
        TaskError: ``BAD_ROW``: no such file, or another one than the row means.
    """
    if repository.archive:
        return base64.b64decode(repository.archive)
    if not repository.path:
        return b""
    try:
        packed = _read_file(repository.path)
    except OSError as error:
        what = f"swe row {name}: '{repository.path}' cannot be read on this host ({error.strerror})."
        raise TaskError(FailureKind.BAD_ROW, what, "Copy it there; 'path' is a file of the service's host.") from None
    if hashlib.sha256(packed).hexdigest() != repository.sha256:
        what = f"swe row {name}: '{repository.path}' does not have the SHA-256 that the row names."
        raise TaskError(FailureKind.BAD_ROW, what, "Copy the file that the row was made with.")
    return packed


def _read_file(path: str) -> bytes:
    # Non-blocking: the row may name a FIFO.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "not a regular file")
        if status.st_size > MAX_PACKED:
            raise OSError(0, f"larger than {MAX_PACKED >> 20} MiB")
        return file.read(MAX_PACKED + 1)


async def _unpack(task: SweTask, sandbox: Sandbox, packed: bytes) -> None:
    # Inside: whatever the archive holds, it can only reach what is in there.
    result = await _run(sandbox, ["tar", "-xzof", "-", "-C", task.workdir], stdin=packed)
    if result.exit_code == 127:
        what = f"swe row {task.id}: image '{sandbox.spec.image}' has no tar."
        raise TaskError(FailureKind.IMAGE_BROKEN, what, "Use an image with tar and gzip.")
    if result.exit_code != 0:
        what = f"swe row {task.id}: its archive cannot be unpacked: {_said(result)}."
        raise TaskError(FailureKind.BAD_ROW, what, "Give a complete tar.gz that fits the sandbox's disk limit.")


async def _run(sandbox: Sandbox, argv: list[str], stdin: bytes = b"") -> ExecResult:
    limits = replace(sandbox.spec.limits, output=_OUTPUT)
    result = await sandbox.exec(argv, stdin=stdin, cwd="/", timeout=PLACE_SECONDS, limits=limits)
    if result.timed_out:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"a repository could not be put in place within {PLACE_SECONDS:g} s.",
            "Look at the load of the node, and at the size of the row's repository.",
        )
    return must_have_ended(result, argv[0])


def _read_base(task: SweTask, sandbox: Sandbox, result: ExecResult) -> Base:
    lists: list[list[str]] = [[]]
    for entry in os.fsdecode(result.stdout).split("\0")[:-1]:
        if entry:
            lists[-1].append(entry)
        else:
            lists.append([])
    if result.truncated or len(lists) != 4 or len(lists[3]) != 1:
        raise _broken(task, sandbox, result)
    changed, untracked, nested, (commit,) = lists
    return Base(
        commit=commit,
        dirty=frozenset(changed).union(untracked),
        untracked=tuple(untracked),
        nested=frozenset(path.removeprefix("./") for path in nested),
    )


def _broken(task: SweTask, sandbox: Sandbox, result: ExecResult) -> RolloutError:
    what, fix = _COMPLAINTS.get(result.exit_code, ("", ""))
    what = what.format(workdir=task.workdir, base=task.base_commit) or f"git failed in it: {_said(result)}"
    image = f"image '{sandbox.spec.image or 'default'}'"
    fix = fix or "Look at the image's repository, and at the disk limit of the sandboxes."
    return TaskError(FailureKind.IMAGE_BROKEN, f"swe row {task.id}: {image} cannot be used: {what}.", fix)


def _said(result: ExecResult) -> str:
    said = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return f"exit code {result.exit_code}" + (f", {said[:200]}" if said else "")
