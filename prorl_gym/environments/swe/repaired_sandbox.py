"""A clean sandbox with the repository and the agent's patch in it, and the hidden tests put in place there.

The patch is applied except where hidden tests go, and they are put in place after it, so that nothing of the agent's
survives there. What else of a patch counts, ``patch_filter`` decides before.
"""

import secrets
import shlex
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prorl_gym.environments.killed_program import raise_if_killed
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.repository import place_repository, sandbox_spec
from prorl_gym.environments.swe.run_tests import CommandSequence
from prorl_gym.environments.swe.swe_row import SweTask, TestPlan
from prorl_gym.errors import FailureKind, TaskError
from prorl_gym.sandbox.protocol import ExecResult, Sandbox

_APPLY_SECONDS = 120.0
"""For git; some repositories have tens of thousands of files."""

_CONFIG_FILES = ("setup.cfg", "pyproject.toml", "package.json")
"""They choose, among other things, the plug-ins of a test run: a patch may change one only where gold does."""

_GIT = "git -c safe.directory=* -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.autocrlf=false"
_NOT_FOUND = 127
_GIT_ENV = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_TERMINAL_PROMPT": "0"}

# From the strictest to the most forgiving; where all but the first fail, the tree is put back before the next.
_APPLY_COMMANDS = (
    ("git apply", "apply --whitespace=nowarn"),
    ("git apply -C1 --ignore-whitespace", "apply --whitespace=nowarn --recount -C1 --ignore-whitespace"),
    ("git apply --3way", "apply --whitespace=nowarn --3way"),
)


MAX_BUILT = 64 << 20
"""Bytes of a packed build; a larger one is built again."""
_PACK_SECONDS = 120.0
# By the inode's time of change, which no program can set. Files that a build removes are not tracked.
_PACK = """
find / "$2" -xdev \\( -path /proc -o -path /sys -o -path /dev -o -path "$1" -o -path '/tmp/prorl-*' \\) -prune \\
    -o -cnewer "$1" ! -path / -print0 2>/dev/null |
    tar --null --no-recursion -czf "$1.tar" -T - 2>/dev/null
[ "$(stat -c %s "$1.tar")" -le "$3" ]
"""


@dataclass(frozen=True, slots=True)
class RepairedSandbox:
    """A sandbox that does not hold the hidden tests yet."""

    sandbox: Sandbox
    apply_command: str
    """Command that applied the patch; empty without a patch."""


class UnsolvedError(Exception):
    """The patch scores 0.0 before any test runs; the message has the reason."""


@asynccontextmanager
async def open_repaired_sandbox(
    task: SweTask, patch: bytes, leases: Leases, *, hidden: SweTask | None = None
) -> AsyncGenerator[RepairedSandbox]:
    """Start a clean sandbox with the repository and the patch in it.

    Args:
        task: what is put in place.
        patch: the agent's; may be empty.
        leases: gives the sandbox.
        hidden: names the paths of hidden tests, when it is another than ``task``.

    Raises:
        UnsolvedError: the patch does not apply.
        SandboxError, TaskError: see ``grade``.
    """
    sandbox = await leases.start_clean_sandbox(await sandbox_spec(task))
    try:
        await place_repository(task, sandbox)
        yield RepairedSandbox(sandbox, await apply_patch(sandbox, hidden or task, patch) if patch.strip() else "")
    finally:
        await sandbox.close()


async def apply_patch(sandbox: Sandbox, task: SweTask, patch: bytes) -> str:
    """Apply a patch to the repository, in the first of three ways that works; returns the command that did.

    Raises:
        UnsolvedError: no way works.
        SandboxError: the sandbox is lost.
        TaskError: ``IMAGE_BROKEN``: there is no bash in it.
    """
    path = _random_path()
    await sandbox.write_file(path, patch)
    chosen = " ".join(_exclude_options(task))
    script = "\n".join(
        f"if {_GIT} {way} {chosen} -- {path}; then echo applied {number}; exit 0; fi\n{_GIT} checkout -q -f HEAD -- ."
        for number, (_, way) in enumerate(_APPLY_COMMANDS)
    )
    result = await _bash(sandbox, task, f"{script}\nexit 1")
    for number, (name, _) in enumerate(_APPLY_COMMANDS):
        if result.exit_code == 0 and result.stdout.strip().endswith(f"applied {number}".encode()):
            return name
    raise UnsolvedError(f"the patch does not apply: {_first_line(result.stderr)}")


async def place_tests(sandbox: Sandbox, task: SweTask) -> str:
    """Put the hidden tests in place; returns what failed, or an empty text.

    Raises:
        SandboxError: the sandbox is lost.
    """
    plan = task.tests
    gone = [f"rm -rf -- {shlex.quote(path)} || exit 1" for path in plan.removed]
    script = [*gone, *_clear_paths(plan.files), *_restore_paths(paths_in_diff(plan.patch))]
    if script and (result := await _bash(sandbox, task, "\n".join(script))).exit_code != 0:
        return f"the hidden tests' places cannot be cleared: {_first_line(result.stderr)}"
    for path, text in plan.files.items():
        try:
            await sandbox.write_file(f"{task.workdir}/{path}", text.encode())
        except OSError as error:
            return f"a hidden test cannot be written: {error.strerror}"
    if not plan.patch:
        return ""
    path = _random_path()
    await sandbox.write_file(path, plan.patch.encode())
    result = await _bash(sandbox, task, f"{_GIT} apply --whitespace=nowarn -- {path} && rm -f {path}")
    return f"the test patch does not apply: {_first_line(result.stderr)}" if result.exit_code != 0 else ""


def paths_in_diff(patch: str) -> tuple[str, ...]:
    """Return the paths below the repository that a unified diff names, old and new ones, in order."""
    found: dict[str, None] = {}
    for line in patch.split("\n"):
        for mark in ("--- a/", "+++ b/", "rename from ", "rename to ", "copy to "):
            if line.startswith(mark):
                found[line.removeprefix(mark).split("\t")[0].rstrip()] = None
    return tuple(path for path in found if path and ".." not in path.split("/") and not path.startswith("/"))


def hidden_test_paths(plan: TestPlan) -> tuple[str, ...]:
    """Return the paths at which hidden tests are put: nothing of a patch is applied there."""
    return tuple(dict.fromkeys([*plan.files, *paths_in_diff(plan.patch), *plan.removed]))


def _exclude_options(task: SweTask) -> Iterable[str]:
    """Options of ``git apply`` that leave out where hidden tests go, and what configures their runner."""
    for path in hidden_test_paths(task.tests):
        yield _option("exclude", _escape_glob(path))
        yield _option("exclude", f"{_escape_glob(path)}/*")
    repaired = {path.rpartition("/")[2] for path in paths_in_diff(task.gold_patch)}
    for name in _CONFIG_FILES:
        if name not in repaired:
            yield _option("exclude", name)
            yield _option("exclude", f"*/{name}")


def _option(name: str, pattern: str) -> str:
    return shlex.quote(f"--{name}={pattern}")


def _escape_glob(path: str) -> str:
    return "".join(f"\\{character}" if character in "\\*?[" else character for character in path)


def _clear_paths(paths: Iterable[str]) -> Iterable[str]:
    """Remove what is at the paths, and links or files where their directories should be."""
    for path in paths:
        parts = path.split("/")
        for end in range(1, len(parts)):
            above = shlex.quote("/".join(parts[:end]))
            yield f"if [ -L {above} ] || {{ [ -e {above} ] && [ ! -d {above} ]; }}; then rm -f -- {above} || exit 1; fi"
        yield f"rm -rf -- {shlex.quote(path)} || exit 1"


def _restore_paths(paths: Sequence[str]) -> Iterable[str]:
    """Put paths back as they are in the base tree, and remove those that it has not."""
    yield from _clear_paths(paths)
    for path in map(shlex.quote, paths):
        yield f"if {_GIT} cat-file -e HEAD:{path} 2>/dev/null; then {_GIT} checkout -q HEAD -- {path} || exit 1; fi"


async def _bash(sandbox: Sandbox, task: SweTask, script: str) -> ExecResult:
    result = await sandbox.exec(["bash", "-c", script], timeout=_APPLY_SECONDS, cwd=task.workdir, env=_GIT_ENV)
    if result.exit_code == _NOT_FOUND:
        what = f"swe row {task.id or 'without id'}: image '{sandbox.spec.image or 'default'}' has no bash."
        raise TaskError(FailureKind.IMAGE_BROKEN, what, "Use an image with bash and git.")
    return raise_if_killed(result, "git")


def _random_path() -> str:
    """Unpredictable, so that a patch cannot bring a file of this name."""
    return f"/tmp/prorl-{secrets.token_hex(8)}"


def _first_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[0][:200] if lines else "no message"


class BuildSnapshot:
    """Packs what a build changes in a sandbox, so that the build runs once.

    Args:
        sandbox: where the build will run.
        workdir: the repository.
    """

    def __init__(self, sandbox: Sandbox, workdir: str) -> None:
        self._sandbox = sandbox
        self._workdir = workdir
        self._mark = f"/tmp/prorl-{secrets.token_hex(8)}"

    async def record_start(self) -> None:
        """Mark the time before the build."""
        await self._sandbox.write_file(self._mark, b"")

    async def pack_changes(self) -> bytes:
        """Return a tar.gz of what changed since; empty when it is too large or cannot be packed."""
        argv = ["sh", "-c", _PACK, "pack", self._mark, self._workdir, str(MAX_BUILT)]
        result = await self._sandbox.exec(argv, timeout=_PACK_SECONDS, cwd="/")
        if result.exit_code != 0:
            return b""
        try:
            return await self._sandbox.read_file(f"{self._mark}.tar", limit=MAX_BUILT)
        except OSError:
            return b""


async def restore_build(sandbox: Sandbox, packed: bytes) -> None:
    """Unpack what ``pack_changes`` returned."""
    await sandbox.exec(["tar", "-xzf", "-", "-C", "/"], stdin=packed, timeout=_PACK_SECONDS, cwd="/")


async def run_build(sandbox: Sandbox, task: SweTask) -> bool:
    """Run the row's build; returns whether it succeeded."""
    run = CommandSequence(sandbox, task.workdir, task.tests.seconds)
    await run.create_log_directory()
    return (await run.run_command(task.tests.build)).exit_code == 0
