"""A row's hidden tests in a sandbox: their texts, the functions that the row names, and their helper files alone.

Helpers are the hidden files without tests. When one function runs alone, they are all that is in place besides it.
"""

import asyncio
import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from prorl_gym.environments.swe.controls.parsed_tests import TestFile
from prorl_gym.environments.swe.repaired_sandbox import hidden_test_paths, paths_in_diff, place_tests
from prorl_gym.environments.swe.swe_row import HIDDEN_OUTSIDE_WORKDIR, R2E_TESTS, SET_ASIDE_DIRECTORY, SweTask
from prorl_gym.sandbox.protocol import Sandbox

_REMOVE_SECONDS = 120.0
_MAX_TEST_FILE = 4 << 20
_MAX_HELPER = 16 << 20
_HELPER_NAMES = ("conftest.py", "__init__.py")
"""Files that other test files need, even if there are tests in them."""


@dataclass(frozen=True, slots=True)
class TestName:
    """A test function that a row names."""

    path: str
    name: str


async def read_tests(sandbox: Sandbox, task: SweTask) -> dict[str, str]:
    """Return the texts of the hidden Python files, and of other files that ``fail_to_pass`` names, by path.

    The hidden tests must be in place, and no code of the repository may have run since.
    """
    texts = {path: text for path, text in task.tests.files.items() if path.endswith(".py")}
    named = [name.partition("::")[0] for name in task.tests.fail_to_pass if "::" in name]
    for path in dict.fromkeys([*paths_in_diff(task.tests.patch), *named]):
        if path.endswith(".py") and path not in texts:
            try:
                texts[path] = (await sandbox.read_file(f"{task.workdir}/{path}", limit=_MAX_TEST_FILE)).decode()
            except (OSError, UnicodeDecodeError):
                continue
    return texts


async def parse_tests(texts: Mapping[str, str]) -> dict[str, TestFile]:
    """Return the files that can be parsed, by path."""
    return await asyncio.to_thread(_parse, texts)


def find_test_function(test: str, task: SweTask, files: Mapping[str, TestFile]) -> TestName | None:
    """Return the function of a test that a row names in its runner's way; ``None`` when there is not exactly one."""
    bare = test.partition("[")[0]
    if task.tests.parser == "unittest":
        parts = bare.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            found = _locate("/".join(parts[:cut]) + ".py", "::".join(parts[cut:]), files)
            if found is not None:
                return found
        return None
    path, _, name = bare.partition("::")
    if name:
        return _locate(path, name, files)
    name = bare.replace(".", "::")  # R2E-Gym has no files in its names
    matches = [TestName(path, name) for path, file in files.items() if file.find_definition(name) is not None]
    return matches[0] if len(matches) == 1 else None


def files_to_remove(files: Mapping[str, TestFile]) -> tuple[str, ...]:
    """Return the paths of files that hold tests and are no helpers."""
    return tuple(path for path, file in files.items() if file.tests and path.rpartition("/")[2] not in _HELPER_NAMES)


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


async def restore_helper(sandbox: Sandbox, path: str, data: bytes) -> None:
    """Restore a helper that a build may have changed, without any program of the sandbox.

    Where the build put a directory in its place it cannot be written; the tests then show the effect.
    """
    with suppress(OSError):
        await sandbox.write_file(path, data)


def _parse(texts: Mapping[str, str]) -> dict[str, TestFile]:
    files: dict[str, TestFile] = {}
    for path, text in texts.items():
        try:
            files[path] = TestFile(text)
        except ValueError:
            continue
    return files


def _locate(path: str, name: str, files: Mapping[str, TestFile]) -> TestName | None:
    """Return the function of this name in a file; the path may start at a directory below the working directory."""
    paths = [path] if path in files else [each for each in files if each.endswith(f"/{path}")]
    if len(paths) != 1 or files[paths[0]].find_definition(name) is None:
        return None
    return TestName(paths[0], name)
