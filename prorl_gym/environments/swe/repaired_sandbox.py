"""A clean sandbox with the repository and the agent's patch in it, and the hidden tests put in place there.

The patch is applied except where hidden tests go, and they are put in place after it, so that nothing of the agent's
survives there. What else of a patch counts, ``patch_filter`` decides before.

Helpers are the hidden files without tests. When one test function runs alone, they are all that is in place besides it.
"""

import secrets
import shlex
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace

from prorl_gym.environments.killed_program import raise_if_killed
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.swe.patch_filter import paths_in_diff
from prorl_gym.environments.swe.repository import open_clean_repository, sandbox_spec
from prorl_gym.environments.swe.run_tests import CommandSequence
from prorl_gym.environments.swe.swe_row import HIDDEN_OUTSIDE_WORKDIR, R2E_TESTS, SET_ASIDE_DIRECTORY, SweTask, TestPlan
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

_REMOVE_SECONDS = 120.0
_MAX_HELPER = 16 << 20

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


class UnsolvedError(Exception):
    """The patch scores 0.0 before any test runs; the message has the reason."""


@asynccontextmanager
async def open_repaired_sandbox(task: SweTask, patch: bytes, leases: Leases) -> AsyncGenerator[tuple[Sandbox, str]]:
    """Start a clean sandbox with the repository and the patch in it, but without the hidden tests.

    Gives the command that applied the patch, too; it is empty, as the patch may be. Raises ``UnsolvedError``: the patch
    does not apply.
    """
    async with open_clean_repository(task, leases, await sandbox_spec(task)) as sandbox:
        yield sandbox, await apply_patch(sandbox, task, patch) if patch.strip() else ""


async def apply_patch(sandbox: Sandbox, task: SweTask, patch: bytes) -> str:
    """Apply a patch to the repository, in the first of three ways that works; returns the command that did.

    It leaves out where hidden tests go, and what configures their runner. Raises ``UnsolvedError``: no way works;
    ``TaskError`` (IMAGE_BROKEN): there is no bash.
    """
    path = _random_path()
    await sandbox.write_file(path, patch)
    excluded: list[str] = []
    for hidden in hidden_test_paths(task.tests):
        plain = "".join(f"\\{character}" if character in "\\*?[" else character for character in hidden)
        excluded += [plain, f"{plain}/*"]
    repaired = {path.rpartition("/")[2] for path in paths_in_diff(task.gold_patch)}
    for name in _CONFIG_FILES:
        if name not in repaired:
            excluded += [name, f"*/{name}"]
    options = shlex.join(f"--exclude={pattern}" for pattern in excluded)
    script = "\n".join(
        f"if {_GIT} {way} {options} -- {path}; then echo applied {number}; exit 0; fi\n{_GIT} checkout -q -f HEAD -- ."
        for number, (_, way) in enumerate(_APPLY_COMMANDS)
    )
    result = await _bash(sandbox, task, f"{script}\nexit 1")
    for number, (name, _) in enumerate(_APPLY_COMMANDS):
        if result.exit_code == 0 and result.stdout.strip().endswith(f"applied {number}".encode()):
            return name
    raise UnsolvedError(f"the patch does not apply: {_first_line(result.stderr)}")


async def place_tests(sandbox: Sandbox, task: SweTask) -> str:
    """Put the hidden tests in place; returns what failed, or an empty text."""
    plan = task.tests
    patched = paths_in_diff(plan.patch)
    script = [f"rm -rf -- {shlex.quote(path)} || exit 1" for path in plan.removed]
    for path in (*plan.files, *patched):  # and links or files where their directories should be
        parts = path.split("/")
        for end in range(1, len(parts)):
            above = shlex.quote("/".join(parts[:end]))
            script.append(
                f"if [ -L {above} ] || {{ [ -e {above} ] && [ ! -d {above} ]; }}; then rm -f -- {above} || exit 1; fi"
            )
        script.append(f"rm -rf -- {shlex.quote(path)} || exit 1")
    for path in map(shlex.quote, patched):  # as in the base tree
        script.append(
            f"if {_GIT} cat-file -e HEAD:{path} 2>/dev/null; then {_GIT} checkout -q HEAD -- {path} || exit 1; fi"
        )
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


async def place_helpers(sandbox: Sandbox, task: SweTask, absent: tuple[str, ...]) -> str:
    """Put the helpers in place and remove everything else about tests; returns what failed, or an empty text.

    The history and compiled files are removed too. No code of the repository runs in between.
    """
    if problem := await place_tests(sandbox, task):
        return problem
    removed = [*absent, ".git"]
    if task.source == "r2egym":
        removed += [f"{SET_ASIDE_DIRECTORY}/{R2E_TESTS}", *HIDDEN_OUTSIDE_WORKDIR.get(task.source, ())]
    folders = dict.fromkeys(path.rpartition("/")[0] for path in absent)
    removed += [f"{folder}/__pycache__".lstrip("/") for folder in folders]
    script = "\n".join(f"rm -rf -- {shlex.quote(path)}" for path in removed)
    result = await sandbox.exec(["sh", "-c", script], timeout=_REMOVE_SECONDS, cwd=task.workdir)
    return "hidden tests cannot be removed" if result.exit_code != 0 else ""


async def read_helpers(sandbox: Sandbox, task: SweTask, absent: Collection[str]) -> dict[str, bytes]:
    """Return what ``place_helpers`` put in place, by path in the sandbox."""
    helpers: dict[str, bytes] = {}
    for path in hidden_test_paths(task.tests):
        if path not in absent and path not in task.tests.removed:
            try:
                full_path = f"{task.workdir}/{path}"
                helpers[full_path] = await sandbox.read_file(full_path, limit=_MAX_HELPER)
            except OSError:
                continue
    return helpers


def hidden_test_paths(plan: TestPlan) -> tuple[str, ...]:
    """Return the paths at which hidden tests are put: nothing of a patch is applied there."""
    return tuple(dict.fromkeys([*plan.files, *paths_in_diff(plan.patch), *plan.removed]))


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


async def mark_build_start(sandbox: Sandbox) -> str:
    """Mark the time before a build, for ``pack_build``."""
    mark = _random_path()
    await sandbox.write_file(mark, b"")
    return mark


async def pack_build(sandbox: Sandbox, workdir: str, mark: str) -> bytes:
    """Return a tar.gz of what changed since the mark; empty when it is too large or cannot be packed."""
    argv = ["sh", "-c", _PACK, "pack", mark, workdir, str(MAX_BUILT)]
    if (await sandbox.exec(argv, timeout=_PACK_SECONDS, cwd="/")).exit_code != 0:
        return b""
    try:
        return await sandbox.read_file(f"{mark}.tar", limit=MAX_BUILT)
    except OSError:
        return b""


async def pack_tree(sandbox: Sandbox, workdir: str) -> bytes:
    """Return the working directory, its modules compiled, as a tar.gz; empty when it is too large or cannot be packed.

    Nothing of the repository runs: ``-I`` leaves its directories off the path.
    """
    script = "python3 -I -m compileall -qq . >/dev/null 2>&1; tar -czf - ."
    limits = replace(sandbox.spec.limits, output=MAX_BUILT)
    packed = await sandbox.exec(["sh", "-c", script], timeout=_PACK_SECONDS, cwd=workdir, limits=limits)
    return packed.stdout if packed.exit_code == 0 and not packed.truncated else b""


async def restore_build(sandbox: Sandbox, packed: bytes) -> None:
    """Unpack what ``pack_build`` returned."""
    await sandbox.exec(["tar", "-xzf", "-", "-C", "/"], stdin=packed, timeout=_PACK_SECONDS, cwd="/")


async def run_build(sandbox: Sandbox, task: SweTask) -> bool:
    """Run the row's build; returns whether it succeeded."""
    run = CommandSequence(sandbox, task.workdir, task.tests.seconds)
    return (await run.run_command(task.tests.build)).exit_code == 0
