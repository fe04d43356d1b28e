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
import re
import secrets
import stat
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from prorl_gym.environments.killed_program import raise_if_killed
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.patch_filter import MAX_FILE, MAX_FILES, MAX_RAW
from prorl_gym.environments.swe.swe_row import HIDDEN_FROM_AGENT, HIDDEN_OUTSIDE_WORKDIR, SET_ASIDE_DIRECTORY, SweTask
from prorl_gym.errors import ConfigError, FailureKind, SandboxError, TaskError
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
    """Git's index of the placed files: later changes are found without reading all files again."""


class NoPatchError(Exception):
    """No patch can be taken from the state that the agent left; the message has the reason."""


async def sandbox_spec(task: SweTask) -> SandboxSpec:
    """Return the sandbox of a task, the same for agent and grading so that one warm pool serves both.

    This installation's pytest is mounted where the image is the default and the tests need it; it is copied at the
    first call, and again when the copy is gone. Raises ``SandboxError`` (SANDBOX_UNAVAILABLE): it is not installed with
    the service, or cannot be mounted.
    """
    if task.image or task.tests.parser != "pytest":  # a row that names an image brings its own pytest
        return SandboxSpec(image=task.image, workdir=task.workdir, limits=_LIMITS)
    global _pytest_mount
    if _pytest_mount is None or not _exists(_pytest_mount):
        config = SandboxConfig()
        cache = config.ipython_cache_dir().with_name("pytest")
        try:
            _pytest_mount = await asyncio.to_thread(packages_mount, cache, os.geteuid() or config.uid, "pytest", PYTEST)
        except ConfigError as error:
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, error.what, error.fix) from None
    return SandboxSpec(workdir=task.workdir, env={"PYTHONPATH": PYTEST}, mounts=(_pytest_mount,), limits=_LIMITS)


def _exists(mount: Mount) -> bool:
    return Path(mount.source).is_dir()


async def place_repository(task: SweTask, sandbox: Sandbox) -> BaseState:
    """Put the task's repository into the sandbox's working directory, at its base.

    Raises ``TaskError`` (BAD_ROW, IMAGE_BROKEN): the repository differs from the row's; ``SandboxError``: the sandbox
    is lost, or too slow.
    """
    if packed := await asyncio.to_thread(read_archive, task):
        await _unpack(task, packed, sandbox)
    names = HIDDEN_FROM_AGENT.get(task.source, ())
    result = await _run(
        sandbox, ["sh", "-c", _PLACE, "place", task.workdir, task.base_commit, SET_ASIDE_DIRECTORY, *names]
    )
    lists: list[list[str]] = [[]]
    for entry in os.fsdecode(result.stdout).split("\0")[:-1]:
        if entry:
            lists[-1].append(entry)
        else:
            lists.append([])
    if result.exit_code != 0 or result.truncated or len(lists) != 4 or len(lists[3]) != 1:
        what, fix = _PLACE_ERRORS.get(result.exit_code, ("", ""))
        what = what.format(workdir=task.workdir, base=task.base_commit) or f"git failed in it: {_exit_summary(result)}"
        image = f"image '{sandbox.spec.image or 'default'}'"
        fix = fix or "Look at the image's repository, and at the disk limit of the sandboxes."
        raise TaskError(FailureKind.IMAGE_BROKEN, f"swe row {task.id}: {image} cannot be used: {what}.", fix)
    changed, untracked, nested, (commit,) = lists
    return BaseState(
        commit=commit,
        dirty=frozenset(changed).union(untracked),
        untracked=tuple(untracked),
        nested=frozenset(path.removeprefix("./") for path in nested),
    )


async def _unpack(task: SweTask, packed: bytes, sandbox: Sandbox) -> None:
    # In the sandbox: a hostile archive cannot reach the host.
    result = await _run(sandbox, ["tar", "-xzof", "-", "-C", task.workdir], stdin=packed)
    if result.exit_code == 127:
        what = f"swe row {task.id}: image '{sandbox.spec.image}' has no tar."
        raise TaskError(FailureKind.IMAGE_BROKEN, what, "Use an image with tar and gzip.")
    if result.exit_code != 0:
        what = f"swe row {task.id}: its archive cannot be unpacked: {_exit_summary(result)}."
        raise TaskError(FailureKind.BAD_ROW, what, "Give a complete tar.gz that fits the sandbox's disk limit.")


async def place_repository_for_agent(task: SweTask, sandbox: Sandbox) -> PlacedRepository:
    """Place the repository, and remove what the image holds for graders only."""
    base = await place_repository(task, sandbox)
    abroad = (SET_ASIDE_DIRECTORY, *HIDDEN_OUTSIDE_WORKDIR.get(task.source, ()))
    result = await _run(sandbox, ["rm", "-rf", "--", *abroad])
    if result.exit_code != 0:
        image, summary = sandbox.spec.image, _exit_summary(result)
        what = f"swe row {task.id}: hidden tests cannot be removed from image '{image}': {summary}."
        raise TaskError(FailureKind.IMAGE_BROKEN, what, "Make the image's files belong to the user of the sandboxes.")
    try:
        return PlacedRepository(base, await sandbox.read_file(f"{task.workdir}/.git/index", limit=_MAX_INDEX))
    except OSError as error:
        what = f"swe row {task.id}: the placed repository has no index ({error.strerror})."
        raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "Look at the disk limit of the sandboxes.") from None


def read_archive(task: SweTask) -> bytes:
    """Return the tar.gz of a row, or nothing when the image holds the repository. Blocks.

    Raises ``TaskError`` (BAD_ROW): no such file, or its digest differs from the row's.
    """
    if task.archive:
        return base64.b64decode(task.archive)
    if not task.path:
        return b""
    try:
        # Non-blocking: the row may name a FIFO.
        with open(os.open(task.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "not a regular file")
            if status.st_size > _MAX_ARCHIVE_FILE:
                raise OSError(0, f"larger than {_MAX_ARCHIVE_FILE >> 20} MiB")
            packed = file.read(_MAX_ARCHIVE_FILE + 1)
    except OSError as error:
        what = f"swe row {task.id}: '{task.path}' cannot be read on this host ({error.strerror})."
        raise TaskError(FailureKind.BAD_ROW, what, "Copy it there; 'path' is a file of the service's host.") from None
    if hashlib.sha256(packed).hexdigest() != task.sha256:
        what = f"swe row {task.id}: '{task.path}' does not have the SHA-256 that the row names."
        raise TaskError(FailureKind.BAD_ROW, what, "Copy the file that the row was made with.")
    return packed


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


def _exit_summary(result: ExecResult) -> str:
    message = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return f"exit code {result.exit_code}" + (f", {message[:200]}" if message else "")


async def extract_patch(task: SweTask, repository: PlacedRepository, sandbox: Sandbox, leases: Leases) -> bytes:
    """Return what the agent changed as a patch, untrusted and perhaps longer than ``MAX_RAW``.

    A clean sandbox is started when the agent destroyed the objects of the base, and one to find out whether the agent
    or the node is slow; the agent's sandbox is closed then. Raises ``NoPatchError``: the agent broke git or the
    repository, or git is fast enough in a clean sandbox only; ``SandboxError``: the sandbox is lost, or the node is too
    slow.
    """
    result = await _diff(task, repository, sandbox, pack=b"")
    if result.exit_code != 0 or result.timed_out:
        shell = await sandbox.shell()
        await shell.close()  # ends what the agent left running
        async with open_clean_repository(task, leases, sandbox.spec) as clean:
            packing = "git rev-parse main | git pack-objects -q --revs --window=0 --stdout > /tmp/base.pack"
            packed = await clean.exec(["sh", "-c", packing], timeout=EXTRACT_SECONDS, cwd=task.workdir)
            if packed.exit_code != 0:
                what = f"swe row {task.id}: its base cannot be packed: exit code {packed.exit_code}."
                raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "Look at the disk limit of the sandboxes.")
            pack = await clean.read_file("/tmp/base.pack", limit=_MAX_PACK)
        result = await _diff(task, repository, sandbox, pack)
    if result.timed_out:
        await sandbox.close()  # so that nothing in it slows down what follows
        async with open_clean_repository(task, leases, sandbox.spec) as clean:
            again = await _diff(task, repository, clean, pack=b"")
        usual = math.inf if again.exit_code != 0 or again.timed_out else again.seconds
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
        raise NoPatchError(f"git does not work in the agent's sandbox any more: {_exit_summary(result)}")
    return result.stdout


async def _diff(task: SweTask, placed: PlacedRepository, sandbox: Sandbox, pack: bytes) -> ExecResult:
    own = await _write_git_inputs(placed, sandbox, pack)
    # Of a patch over the limit only its length matters.
    limits = replace(sandbox.spec.limits, output=MAX_RAW + (64 << 10))
    sizes = (MAX_FILE >> 10, _LARGE_FILE >> 10, MAX_FILES + 1)
    argv = ["sh", "-c", _EXTRACT, "extract", task.workdir, own, *map(str, sizes)]
    return await sandbox.exec(argv, cwd="/", timeout=EXTRACT_SECONDS, limits=limits)


async def _write_git_inputs(placed: PlacedRepository, sandbox: Sandbox, pack: bytes) -> str:
    """Write the inputs of ``extract.sh`` where there is room; returns the directory."""
    name = f".base-{secrets.token_hex(8)}"
    # Each line of an exclude file matches only its path; a line break becomes ``?``.
    escaped = [re.sub(r"([\\*?\[\]!# ])", r"\\\1", path).replace("\n", "?") for path in placed.base.untracked]
    contents = {
        "index": placed.index,
        "exclude": "".join(f"/{pattern}\n" for pattern in escaped).encode(errors="surrogateescape"),
        "nested": "".join(f"{path}\n" for path in placed.base.nested).encode(errors="surrogateescape"),
    }
    if pack:
        contents["base.pack"] = pack
    problem = ""
    for folder in _TEMP_DIRECTORIES:
        own = f"{folder}/{name}"
        try:
            for file, content in contents.items():
                await sandbox.write_file(f"{own}/{file}", content)
        except OSError as error:
            problem = f"{folder}: {error.strerror}"
        else:
            return own
    raise NoPatchError(f"there is no room for git in the agent's sandbox any more ({problem})")


@asynccontextmanager
async def open_clean_repository(
    task: SweTask, leases: Leases, spec: SandboxSpec, tree: bytes = b""
) -> AsyncGenerator[Sandbox]:
    """Start a clean sandbox with the repository placed in it, or a packed tree in its stead; closed at the end."""
    clean = await leases.start_clean_sandbox(spec)
    try:
        if tree:
            await _unpack(task, tree, clean)
        else:
            await place_repository(task, clean)
        yield clean
    finally:
        await clean.close()
