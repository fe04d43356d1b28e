"""What happens to the repository between the agent's patch and the tests, in a clean sandbox.

The patch is applied except where hidden tests go, and they are put in place after it, so that nothing of the agent's
survives there. What else of a patch counts was decided before (``patches``).
"""

import secrets
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prorl_gym.environments.killed import must_have_ended
from prorl_gym.environments.swe.task import SweTask, TestPlan
from prorl_gym.errors import FailureKind, TaskError
from prorl_gym.sandbox.protocol import ExecResult, Sandbox

SECONDS = 120.0
"""For git; repositories have been seen with tens of thousands of files."""

CONFIGURATIONS = ("setup.cfg", "pyproject.toml", "package.json")
"""They say, among other things, with which plug-ins tests run: a patch may change one only where gold does."""

_GIT = "git -c safe.directory=* -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.autocrlf=false"
_NOT_FOUND = 127
_GIT_ENV = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_TERMINAL_PROMPT": "0"}

# From the strictest to the most forgiving; where all but the first fail, the tree is put back before the next.
_WAYS = (
    ("git apply", "apply --whitespace=nowarn"),
    ("git apply -C1 --ignore-whitespace", "apply --whitespace=nowarn --recount -C1 --ignore-whitespace"),
    ("git apply --3way", "apply --whitespace=nowarn --3way"),
)


@dataclass(frozen=True, slots=True)
class Applied:
    """How a patch went."""

    way: str
    """The command that applied it; empty when none did."""
    complaint: str = ""


async def apply_patch(sandbox: Sandbox, task: SweTask, patch: bytes) -> Applied:
    """Apply a patch to the repository, in the first of three ways that works.

    Raises:
        SandboxError: the sandbox is lost.
        TaskError: ``IMAGE_BROKEN``: there is no bash in it.
    """
    path = _unknown_path()
    await sandbox.write_file(path, patch)
    chosen = " ".join(_selection(task))
    script = "\n".join(
        f"if {_GIT} {way} {chosen} -- {path}; then echo applied {number}; exit 0; fi\n{_GIT} checkout -q -f HEAD -- ."
        for number, (_, way) in enumerate(_WAYS)
    )
    result = await _bash(sandbox, task, f"{script}\nexit 1")
    for number, (name, _) in enumerate(_WAYS):
        if result.exit_code == 0 and result.stdout.strip().endswith(f"applied {number}".encode()):
            return Applied(name)
    return Applied("", _first_line(result.stderr))


async def place_tests(sandbox: Sandbox, task: SweTask) -> str:
    """Put the hidden tests in place; returns what failed, or an empty text.

    Raises:
        SandboxError: the sandbox is lost.
    """
    plan = task.tests
    gone = [f"rm -rf -- {shlex.quote(path)} || exit 1" for path in plan.removed]
    script = [*gone, *_clear(plan.files), *_restore(touched(plan.patch))]
    if script and (result := await _bash(sandbox, task, "\n".join(script))).exit_code != 0:
        return f"the hidden tests' places cannot be cleared: {_first_line(result.stderr)}"
    for path, text in plan.files.items():
        try:
            await sandbox.write_file(f"{task.workdir}/{path}", text.encode())
        except OSError as error:
            return f"a hidden test cannot be written: {error.strerror}"
    if not plan.patch:
        return ""
    path = _unknown_path()
    await sandbox.write_file(path, plan.patch.encode())
    result = await _bash(sandbox, task, f"{_GIT} apply --whitespace=nowarn -- {path} && rm -f {path}")
    return f"the test patch does not apply: {_first_line(result.stderr)}" if result.exit_code != 0 else ""


def touched(patch: str) -> tuple[str, ...]:
    """Return the paths below the repository that a unified diff names, old and new ones, in order."""
    found: dict[str, None] = {}
    for line in patch.split("\n"):
        for mark in ("--- a/", "+++ b/", "rename from ", "rename to ", "copy to "):
            if line.startswith(mark):
                found[line.removeprefix(mark).split("\t")[0].rstrip()] = None
    return tuple(path for path in found if path and ".." not in path.split("/") and not path.startswith("/"))


def protected(plan: TestPlan) -> tuple[str, ...]:
    """Return the paths at which hidden tests are put: nothing of a patch is applied there."""
    return tuple(dict.fromkeys([*plan.files, *touched(plan.patch), *plan.removed]))


def _selection(task: SweTask) -> Iterable[str]:
    """Options of ``git apply`` that leave out where hidden tests go, and what configures their runner."""
    for path in protected(task.tests):
        yield _option("exclude", _literal(path))
        yield _option("exclude", f"{_literal(path)}/*")
    repaired = {path.rpartition("/")[2] for path in touched(task.gold_patch)}
    for name in CONFIGURATIONS:
        if name not in repaired:
            yield _option("exclude", name)
            yield _option("exclude", f"*/{name}")


def _option(name: str, pattern: str) -> str:
    return shlex.quote(f"--{name}={pattern}")


def _literal(path: str) -> str:
    return "".join(f"\\{character}" if character in "\\*?[" else character for character in path)


def _clear(paths: Iterable[str]) -> Iterable[str]:
    """Remove what is at the paths, and links or files where their directories should be."""
    for path in paths:
        parts = path.split("/")
        for end in range(1, len(parts)):
            above = shlex.quote("/".join(parts[:end]))
            yield f"if [ -L {above} ] || {{ [ -e {above} ] && [ ! -d {above} ]; }}; then rm -f -- {above} || exit 1; fi"
        yield f"rm -rf -- {shlex.quote(path)} || exit 1"


def _restore(paths: Sequence[str]) -> Iterable[str]:
    """Put paths back as they are in the base tree, and remove those that it has not."""
    yield from _clear(paths)
    for path in map(shlex.quote, paths):
        yield f"if {_GIT} cat-file -e HEAD:{path} 2>/dev/null; then {_GIT} checkout -q HEAD -- {path} || exit 1; fi"


async def _bash(sandbox: Sandbox, task: SweTask, script: str) -> ExecResult:
    result = await sandbox.exec(["bash", "-c", script], timeout=SECONDS, cwd=task.workdir, env=_GIT_ENV)
    if result.exit_code == _NOT_FOUND:
        what = f"swe row {task.id or 'without id'}: image '{sandbox.spec.image or 'default'}' has no bash."
        raise TaskError(FailureKind.IMAGE_BROKEN, what, "Use an image with bash and git.")
    return must_have_ended(result, "git")


def _unknown_path() -> str:
    """Not to be known beforehand by what a patch brings."""
    return f"/tmp/prorl-{secrets.token_hex(8)}"


def _first_line(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[0][:200] if lines else "no message"
