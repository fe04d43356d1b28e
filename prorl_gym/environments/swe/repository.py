"""The repository of a SWE task: its sandbox, its base state there, and the patch that the agent makes of it.

The same code places it in the agent's sandbox and in the one that grades. The working directory then holds the base: a
git repository with one commit on ``main`` and nothing else. Later commits, other branches, tags, remotes, stashes,
reflogs, and objects of any of them are gone, not hidden; files keep their state, tracked or not. Author and date are
fixed, so all replicas have the same commit.

The patch is taken against a base that the agent never touched: git's list of the placed files is read before it begins
and written back afresh. The patch is untrusted all the same, since the agent owns every program in its sandbox, git
included: ``patch_filter`` reads it strictly, and it is applied in a clean sandbox only.
"""

import asyncio
import base64
import hashlib
import math
import os
import secrets
import stat
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from prorl_gym.environments.killed_program import raise_if_killed
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.patch_filter import MAX_FILE, MAX_RAW
from prorl_gym.environments.swe.swe_row import (
    HIDDEN_FROM_AGENT,
    HIDDEN_OUTSIDE_WORKDIR,
    SET_ASIDE_DIRECTORY,
    Repository,
    SweTask,
)
from prorl_gym.errors import ConfigError, FailureKind, RolloutError, SandboxError, TaskError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import ExecResult, Mount, Sandbox, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.python_packages import packages_mount

PYTEST = "/.prorl/pytest"
"""Mount point of pytest in the service's default image, which has only python3 and git."""

_LIMITS = SandboxLimits(output=16 << 10)

_pytest_mount: Mount | None = None

_PLACE = files("prorl_gym.environments.swe").joinpath("place.sh").read_text(encoding="utf-8")

_PLACE_SECONDS = 300.0
"""For unpacking, and for placing: each takes a second at most on an idle machine."""
_MAX_ARCHIVE_FILE = 1 << 30
"""Bytes of a tar.gz on the service's host."""
_OUTPUT = 16 << 20
_MAX_INDEX = 256 << 20

_PLACE_ERRORS = {
    81: ("git does not run in it", "Use an image with git: it is needed to prepare the task and by the agent."),
    82: ("there is no repository in {workdir}", "Give the row an 'archive' or a 'path', or an image that holds one."),
    83: ("its repository has no commit {base}", "Use the image that was built for this row."),
    84: ("commit {base} cannot be checked out", "Use the image that was built for this row."),
    85: ("its repository lacks objects", "Build the image from a complete clone."),
}
"""Cause and fix by exit code of place.sh."""


_EXTRACT = files("prorl_gym.environments.swe").joinpath("extract.sh").read_text(encoding="utf-8")

EXTRACT_SECONDS = 120.0
_MAX_CLEAN_SHARE = 0.25
"""Share of these seconds. If git needs no more of them in a clean sandbox, the node is not too slow."""
_LARGE_FILE = 8 << 20
"""Bytes from which changes of a file are left out of a patch; new files may have ``MAX_FILE``."""
_MAX_PACK = 1 << 30
_TEMP_DIRECTORIES = ("/tmp", "/dev/shm", "/var/tmp")
"""Tried in order: the agent may have filled or removed one of them."""


@dataclass(frozen=True, slots=True)
class BaseState:
    """The state from which the agent starts."""

    commit: str
    dirty: frozenset[str]
    """Paths below the working directory that the image changed or added after the base commit: they belong to the
    build, not to the repair. A path that ends in ``/`` includes everything below it."""
    untracked: tuple[str, ...]
    """Paths in ``dirty`` that are in no commit."""
    nested: frozenset[str]
    """Other ``.git`` directories or files below the working directory."""


@dataclass(frozen=True, slots=True)
class PlacedRepository:
    """State of the repository in the agent's sandbox before the agent began."""

    base: BaseState
    index: bytes


class NoPatchError(Exception):
    """No patch can be taken from the state that the agent left; the message has the reason."""


async def sandbox_spec(task: SweTask) -> SandboxSpec:
    """Return the sandbox of a task, the same for agent and grading so that one warm pool serves both.

    Pytest is mounted where the image is the default and the tests need it.

    Raises:
        SandboxError: ``SANDBOX_UNAVAILABLE``: pytest is not installed beside the service, or cannot be mounted.
    """
    if task.image or task.tests.parser != "pytest":  # a row that names an image brings its own pytest
        return SandboxSpec(image=task.image, workdir=task.workdir, limits=_LIMITS)
    mount = await _mount_pytest()
    return SandboxSpec(workdir=task.workdir, env={"PYTHONPATH": PYTEST}, mounts=(mount,), limits=_LIMITS)


def _exists(mount: Mount) -> bool:
    return Path(mount.source).is_dir()


async def _mount_pytest() -> Mount:
    """Return the mount of this installation's pytest, copied at the first call and again when the copy is gone."""
    global _pytest_mount
    if _pytest_mount is None or not _exists(_pytest_mount):
        config = SandboxConfig()
        cache = config.ipython_cache_dir().with_name("pytest")
        try:
            _pytest_mount = await asyncio.to_thread(packages_mount, "pytest", PYTEST, cache, os.geteuid() or config.uid)
        except ConfigError as error:
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, error.what, error.fix) from None
    return _pytest_mount


async def place_repository(task: SweTask, sandbox: Sandbox) -> BaseState:
    """Put the task's repository into the sandbox's working directory, at its base.

    Raises:
        TaskError: ``BAD_ROW`` or ``IMAGE_BROKEN``: the repository differs from the row's.
        SandboxError: the sandbox is lost, or too slow.
    """
    packed = await asyncio.to_thread(read_archive, task.id, task.repository)
    if packed:
        await _unpack(task, sandbox, packed)
    names = HIDDEN_FROM_AGENT.get(task.source, ())
    result = await _run(
        sandbox, ["sh", "-c", _PLACE, "place", task.workdir, task.base_commit, SET_ASIDE_DIRECTORY, *names]
    )
    if result.exit_code != 0:
        raise _broken_image_error(task, sandbox, result)
    return _read_base(task, sandbox, result)


async def place_repository_for_agent(task: SweTask, sandbox: Sandbox) -> BaseState:
    """Place the repository, and remove what the image holds for graders only."""
    base = await place_repository(task, sandbox)
    abroad = (SET_ASIDE_DIRECTORY, *HIDDEN_OUTSIDE_WORKDIR.get(task.source, ()))
    result = await _run(sandbox, ["rm", "-rf", "--", *abroad])
    if result.exit_code != 0:
        raise TaskError(
            FailureKind.IMAGE_BROKEN,
            f"swe row {task.id}: hidden tests cannot be removed from image '{sandbox.spec.image}': "
            f"{_exit_summary(result)}.",
            "Make the image's files belong to the user of the sandboxes.",
        )
    return base


async def read_index(task: SweTask, sandbox: Sandbox) -> bytes:
    """Return git's index of the placed files: later changes are found without reading all files again."""
    try:
        return await sandbox.read_file(f"{task.workdir}/.git/index", limit=_MAX_INDEX)
    except OSError as error:
        what = f"swe row {task.id}: the placed repository has no index ({error.strerror})."
        raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "Look at the disk limit of the sandboxes.") from None


def read_archive(name: str, repository: Repository) -> bytes:
    """Return the tar.gz of a row, or nothing when the image holds the repository. Blocks.

    Raises:
        TaskError: ``BAD_ROW``: no such file, or its digest differs from the row's.
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
        if status.st_size > _MAX_ARCHIVE_FILE:
            raise OSError(0, f"larger than {_MAX_ARCHIVE_FILE >> 20} MiB")
        return file.read(_MAX_ARCHIVE_FILE + 1)


async def _unpack(task: SweTask, sandbox: Sandbox, packed: bytes) -> None:
    # In the sandbox: a hostile archive cannot reach the host.
    result = await _run(sandbox, ["tar", "-xzof", "-", "-C", task.workdir], stdin=packed)
    if result.exit_code == 127:
        what = f"swe row {task.id}: image '{sandbox.spec.image}' has no tar."
        raise TaskError(FailureKind.IMAGE_BROKEN, what, "Use an image with tar and gzip.")
    if result.exit_code != 0:
        what = f"swe row {task.id}: its archive cannot be unpacked: {_exit_summary(result)}."
        raise TaskError(FailureKind.BAD_ROW, what, "Give a complete tar.gz that fits the sandbox's disk limit.")


async def _run(sandbox: Sandbox, argv: list[str], stdin: bytes = b"") -> ExecResult:
    limits = replace(sandbox.spec.limits, output=_OUTPUT)
    result = await sandbox.exec(argv, stdin=stdin, cwd="/", timeout=_PLACE_SECONDS, limits=limits)
    if result.timed_out:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"a repository could not be put in place within {_PLACE_SECONDS:g} s.",
            "Look at the load of the node, and at the size of the row's repository.",
        )
    return raise_if_killed(result, argv[0])


def _read_base(task: SweTask, sandbox: Sandbox, result: ExecResult) -> BaseState:
    lists: list[list[str]] = [[]]
    for entry in os.fsdecode(result.stdout).split("\0")[:-1]:
        if entry:
            lists[-1].append(entry)
        else:
            lists.append([])
    if result.truncated or len(lists) != 4 or len(lists[3]) != 1:
        raise _broken_image_error(task, sandbox, result)
    changed, untracked, nested, (commit,) = lists
    return BaseState(
        commit=commit,
        dirty=frozenset(changed).union(untracked),
        untracked=tuple(untracked),
        nested=frozenset(path.removeprefix("./") for path in nested),
    )


def _broken_image_error(task: SweTask, sandbox: Sandbox, result: ExecResult) -> RolloutError:
    what, fix = _PLACE_ERRORS.get(result.exit_code, ("", ""))
    what = what.format(workdir=task.workdir, base=task.base_commit) or f"git failed in it: {_exit_summary(result)}"
    image = f"image '{sandbox.spec.image or 'default'}'"
    fix = fix or "Look at the image's repository, and at the disk limit of the sandboxes."
    return TaskError(FailureKind.IMAGE_BROKEN, f"swe row {task.id}: {image} cannot be used: {what}.", fix)


def _exit_summary(result: ExecResult) -> str:
    said = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return f"exit code {result.exit_code}" + (f", {said[:200]}" if said else "")


async def extract_patch(task: SweTask, repository: PlacedRepository, sandbox: Sandbox, leases: Leases) -> bytes:
    """Return what the agent changed as a patch, untrusted and perhaps longer than ``MAX_RAW``.

    Args:
        task: the row.
        repository: see ``PlacedRepository``.
        sandbox: the agent's.
        leases: gives a clean sandbox when the agent destroyed the objects of the base, and one to find out whether
            the agent or the node is slow. The agent's sandbox is closed then.

    Raises:
        NoPatchError: the agent broke git or the repository, or git is fast enough in a clean sandbox only.
        SandboxError: the sandbox is lost, or the node is too slow.
    """
    result = await _diff(task, repository, sandbox, pack=b"")
    if _failed(result):
        shell = await sandbox.shell()
        await shell.close()  # ends what the agent left running
        result = await _diff(task, repository, sandbox, pack=await _pack_base(task, leases, sandbox.spec))
    if result.timed_out:
        await sandbox.close()  # so that nothing in it slows down what follows
        usual = await _clean_seconds(task, repository, leases, sandbox.spec)
        if usual <= EXTRACT_SECONDS * _MAX_CLEAN_SHARE:
            raise NoPatchError(
                f"git does not end in the agent's sandbox within {EXTRACT_SECONDS:g} s, "
                f"which takes {usual:.0f} s where no agent has been"
            )
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE,
            f"swe row {task.id}: the patch could not be taken within {EXTRACT_SECONDS:g} s, twice.",
            "Look at the load of the node.",
        )
    if result.exit_code != 0:
        said = result.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
        raise NoPatchError(f"git does not work in the agent's sandbox any more: exit code {result.exit_code}, {said}")
    return result.stdout


def _failed(result: ExecResult) -> bool:
    return result.exit_code != 0 or result.timed_out


async def _diff(task: SweTask, placed: PlacedRepository, sandbox: Sandbox, pack: bytes) -> ExecResult:
    own = await _write_git_inputs(placed, sandbox, pack)
    # Of a patch over the limit only its length matters.
    limits = replace(sandbox.spec.limits, output=MAX_RAW + (64 << 10))
    argv = ["sh", "-c", _EXTRACT, "extract", task.workdir, own, str(MAX_FILE >> 10), str(_LARGE_FILE >> 10)]
    return await sandbox.exec(argv, cwd="/", timeout=EXTRACT_SECONDS, limits=limits)


async def _write_git_inputs(placed: PlacedRepository, sandbox: Sandbox, pack: bytes) -> str:
    """Write the inputs of ``extract.sh`` where there is room; returns the directory."""
    name = f".base-{secrets.token_hex(8)}"
    contents = {
        "index": placed.index,
        "exclude": "".join(f"{_exclude_pattern(path)}\n" for path in placed.base.untracked).encode(
            errors="surrogateescape"
        ),
        "nested": "".join(f"{path}\n" for path in placed.base.nested).encode(errors="surrogateescape"),
    }
    if pack:
        contents["base.pack"] = pack
    complaint = ""
    for place_ in _TEMP_DIRECTORIES:
        own = f"{place_}/{name}"
        try:
            for file, content in contents.items():
                await sandbox.write_file(f"{own}/{file}", content)
        except OSError as error:
            complaint = f"{place_}: {error.strerror}"
        else:
            return own
    raise NoPatchError(f"there is no room for git in the agent's sandbox any more ({complaint})")


def _exclude_pattern(path: str) -> str:
    """Return the line of an exclude file that matches only this path; a line break becomes ``?``."""
    special = "\\*?[]!# "
    return "/" + "".join(f"\\{char}" if char in special else char for char in path.replace("\n", "?"))


async def _clean_seconds(task: SweTask, placed: PlacedRepository, leases: Leases, spec: SandboxSpec) -> float:
    """Return the seconds of the same diff in a clean sandbox; infinite when it fails there."""
    clean = await leases.start_clean_sandbox(spec)
    try:
        await place_repository(task, clean)
        result = await _diff(task, placed, clean, pack=b"")
        return math.inf if _failed(result) else result.seconds
    finally:
        await clean.close()


async def _pack_base(task: SweTask, leases: Leases, spec: SandboxSpec) -> bytes:
    """Pack the objects of the base in a clean sandbox."""
    clean = await leases.start_clean_sandbox(spec)
    try:
        await place_repository(task, clean)
        packing = "git rev-parse main | git pack-objects -q --revs --window=0 --stdout > /tmp/base.pack"
        result = await clean.exec(["sh", "-c", packing], timeout=EXTRACT_SECONDS, cwd=task.workdir)
        if result.exit_code != 0:
            what = f"swe row {task.id}: its base cannot be packed: exit code {result.exit_code}."
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "Look at the disk limit of the sandboxes.")
        return await clean.read_file("/tmp/base.pack", limit=_MAX_PACK)
    finally:
        await clean.close()
