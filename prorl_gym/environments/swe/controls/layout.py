"""Where the hidden tests of a row are, and a sandbox that holds none of them but its helpers."""

import asyncio
import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from prorl_gym.environments.swe.controls.source import TestFile
from prorl_gym.environments.swe.placing import place_tests, protected, touched
from prorl_gym.environments.swe.public_rows import ASIDE, HIDDEN_ABROAD, R2E_TESTS
from prorl_gym.environments.swe.task import SweTask
from prorl_gym.sandbox.protocol import Sandbox

_SECONDS = 120.0
_MAX_HELPER = 16 << 20
_KEPT = ("conftest.py", "__init__.py")


@dataclass(frozen=True, slots=True)
class Named:
    """A test function that a row names."""

    path: str
    name: str


async def read_tests(sandbox: Sandbox, task: SweTask) -> dict[str, str]:
    """Return the texts of the hidden Python files, and of other files that ``fail_to_pass`` names, by path.

    The hidden tests must be in place, and nothing of the repository may have run since.
    """
    texts = {path: text for path, text in task.tests.files.items() if path.endswith(".py")}
    named = [name.partition("::")[0] for name in task.tests.fail_to_pass if "::" in name]
    for path in dict.fromkeys([*touched(task.tests.patch), *named]):
        if path.endswith(".py") and path not in texts:
            try:
                texts[path] = (await sandbox.read_file(f"{task.workdir}/{path}", limit=4 << 20)).decode()
            except (OSError, UnicodeDecodeError):
                continue
    return texts


def find(test: str, task: SweTask, files: Mapping[str, TestFile]) -> Named | None:
    """Return the function of a test that a row names in its runner's way; ``None``: there is none that is known."""
    bare = test.partition("[")[0]
    if task.tests.parser == "unittest":
        parts = bare.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            found = _at("/".join(parts[:cut]) + ".py", "::".join(parts[cut:]), files)
            if found is not None:
                return found
        return None
    path, _, name = bare.partition("::")
    if name:
        return _at(path, name, files)
    name = bare.replace(".", "::")  # R2E-Gym has no files in its names
    found = [Named(path, name) for path, file in files.items() if file.find(name) is not None]
    return found[0] if len(found) == 1 else None


def _at(path: str, name: str, files: Mapping[str, TestFile]) -> Named | None:
    # The command may run in a directory below, from which its names count.
    near = [each for each in files if each == path or each.endswith(f"/{path}")]
    exact = [path] if path in files else near
    if len(exact) != 1 or files[exact[0]].find(name) is None:
        return None
    return Named(exact[0], name)


def absent_files(files: Mapping[str, TestFile]) -> tuple[str, ...]:
    """Return the paths of files that hold tests and that no helper lives in."""
    return tuple(path for path, file in files.items() if file.tests and path.rpartition("/")[2] not in _KEPT)


async def place_helpers(sandbox: Sandbox, task: SweTask, absent: tuple[str, ...]) -> str:
    """Put what the hidden tests need in place, and remove all that holds tests; returns what failed, or an empty text.

    Nothing of the repository runs in between. The history goes too, and what was compiled.
    """
    if complaint := await place_tests(sandbox, task):
        return complaint
    gone = [*absent, ".git"]
    if task.source == "r2egym":
        gone += [f"{ASIDE}/{R2E_TESTS}", *HIDDEN_ABROAD.get(task.source, ())]
    lines = [f"rm -rf -- {shlex.quote(path)}" for path in gone]
    folders = dict.fromkeys(path.rpartition("/")[0] for path in absent)
    lines += [f"rm -rf -- {shlex.quote(f'{folder}/__pycache__'.lstrip('/'))}" for folder in folders]
    result = await sandbox.exec(["sh", "-c", "\n".join(lines)], timeout=_SECONDS, cwd=task.workdir)
    return "hidden tests cannot be removed" if result.exit_code != 0 else ""


async def read_helpers(sandbox: Sandbox, task: SweTask, absent: Collection[str]) -> dict[str, bytes]:
    """Return what ``place_helpers`` put in place, by path in the sandbox."""
    found: dict[str, bytes] = {}
    for path in protected(task.tests):
        if path not in absent and path not in task.tests.removed:
            try:
                where = f"{task.workdir}/{path}"
                found[where] = await sandbox.read_file(where, limit=_MAX_HELPER)
            except OSError:
                continue
    return found


async def put_back(sandbox: Sandbox, path: str, data: bytes) -> None:
    """Write a helper again that a build may have changed, without any program of the sandbox.

    A build that is in the way of it keeps what it made: the tests show what comes of that.
    """
    with suppress(OSError):
        await sandbox.write_file(path, data)


async def parse_tests(texts: Mapping[str, str]) -> dict[str, TestFile]:
    """Parse those files that can be parsed."""
    return await asyncio.to_thread(_parse, texts)


def _parse(texts: Mapping[str, str]) -> dict[str, TestFile]:
    files: dict[str, TestFile] = {}
    for path, text in texts.items():
        try:
            files[path] = TestFile(text)
        except ValueError:
            continue
    return files
