"""Rows out of twenty real projects of PyPI: solved by gold, and by nothing else.

The distributions come from the index that pip is configured for, and are kept below PRORL_GYM_CACHE/sdists. The
projects are small, in pure Python, and of different kinds: one module, packages with and without ``src``, tests beside
the code, unittest and pytest, coroutines, tests that share files, tests made from data when they run.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from prorl_gym.data.sdist.mutations import is_fault, propose_mutations
from prorl_gym.data.sdist.row_maker import RowOptions, open_project
from prorl_gym.data.sdist.source_tree import fetch_sdist, find_layout, read_sdist
from prorl_gym.environments.playback import play_script
from prorl_gym.environments.swe.environment import SweEnvironment
from prorl_gym.environments.swe.grading import grade
from prorl_gym.environments.swe.patch_filter import filter_patch
from prorl_gym.environments.swe.swe_row import SweTask, git_diff, parse_swe_row
from prorl_gym.errors import ConfigError
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import resolve_settings
from tests.environments.swe.mini import unpack

pytestmark = [pytest.mark.release, pytest.mark.data, pytest.mark.timeout(1200)]

FIRST = (
    *("cachetools==5.5.0", "inflection==0.5.1", "isodate==0.7.2", "jmespath==1.0.1", "markupsafe==3.0.2"),
    *("ordered-set==4.1.0", "orderedmultidict==1.0.1", "parse==1.20.2", "pathspec==0.12.1", "toolz==1.0.0"),
)
SECOND = (
    *("aiofiles==24.1.0", "async-timeout==4.0.3", "click==8.1.7", "mistune==3.0.2", "dictdiffer==0.9.0"),
    *("semver==3.0.2", "sqlparse==0.5.1", "tabulate==0.9.0", "uritemplate==4.1.1", "webcolors==24.8.0"),
)
NEEDS = {"aiofiles==24.1.0": ("pytest-asyncio",), "async-timeout==4.0.3": ("pytest-asyncio",)}
TWO_FAULTS = ("jmespath==1.0.1", "toolz==1.0.0", "sqlparse==0.5.1")
"""Projects of which the second row is used: it has faults at two places, in two files."""
SETS = {"first": (FIRST, 0), "second": (SECOND, 7)}
"""Projects, and the seed of their faults."""
AT_ONCE = 2
"""Projects that are worked on at the same time."""


@pytest.fixture(scope="module")
def cache():
    """Where the distributions are; the tests need the index only for what is not there."""
    folder = SandboxConfig().ipython_cache_dir().with_name("sdists")
    try:
        for name in (*FIRST, *SECOND):
            fetch_sdist(name, folder)
    except ConfigError as error:
        if "cannot be fetched" not in error.what:
            raise
        pytest.skip(f"the package index is out of reach: {error}")
    return folder


async def rewards(name: str, seed: int, cache: Any, backend: SandboxBackend) -> AsyncIterator[tuple[str, float, Any]]:
    """Make a row of a project; yield what each kind of answer to it is worth, with the detail."""
    leases = SandboxLeases(backend)
    try:
        rows = 2 if name in TWO_FAULTS else 1
        project = await open_project(name, NEEDS.get(name, ()), cache, "", leases, RowOptions(rows, seed))
        made = [row async for row in project.make_rows()]
        assert len(made) == rows, (name, project.outcome)
        task = parse_swe_row(made[-1])
        settings = resolve_settings(SweEnvironment.settings)
        answers = {
            "gold": task.gold_patch,
            "empty": "",
            "deletes": "".join(git_diff(path, text, "") for path, text in task.tests.files.items() if text),
            "skips": skips_tests(task),
            "wrong": wrong_patch(task, fetch_sdist(name, cache)),
        }
        if (half := half_patch(task)) is not None:
            answers["half"] = half
        for kind, patch in answers.items():
            score = await grade(task, patch.encode(), leases, settings)
            yield kind, score.reward, score.detail
            if kind == "deletes":
                assert not filter_patch(patch.encode(), task, ()).patch.strip()
    finally:
        await leases.close()


@pytest.mark.parametrize("which", SETS)
async def test_ten_real_projects_are_solved_by_gold_and_by_nothing_else(
    which: str, backend: SandboxBackend, cache: Any
) -> None:
    projects, seed = SETS[which]
    seen: dict[str, dict[str, float]] = {}
    details: dict[str, Any] = {}
    slots = asyncio.Semaphore(AT_ONCE)

    async def look(name: str) -> None:
        async with slots:
            seen[name] = {}
            async for kind, reward, detail in rewards(name, seed, cache, backend):
                seen[name][kind] = reward
                details[f"{name} {kind}"] = detail

    async with asyncio.TaskGroup() as group:
        for name in projects:
            group.create_task(look(name))
    right = {"gold": 1.0, "empty": 0.0, "deletes": 0.0, "skips": 0.0, "wrong": 0.0}
    assert len(seen) == 10
    for name, found in seen.items():
        assert {kind: reward for kind, reward in found.items() if kind != "half"} == right, (name, found, details)
        assert found.get("half", 0.0) == 0.0, (name, details[f"{name} half"])
    assert {name for name, found in seen.items() if "half" in found} >= {*TWO_FAULTS}.intersection(projects)
    # They fail for the right reason: tests ran, and those of the fault did not pass.
    for name in seen:
        assert "why" not in details[f"{name} gold"]
        assert details[f"{name} wrong"]["why"] in (
            "the fault is not repaired",
            "tests that passed before do not any more",
        ), details[f"{name} wrong"]


async def test_a_row_is_played_from_prompt_to_reward(backend: SandboxBackend, cache: Any) -> None:
    leases = SandboxLeases(backend)
    try:
        project = await open_project("parse==1.20.2", (), cache, "", leases, RowOptions(1, 0))
        (row,) = [row async for row in project.make_rows()]
    finally:
        await leases.close()
    environment = SweEnvironment()
    for steps, reward in ((environment.gold_steps(row), 1.0), (environment.wrong_steps(row, 1), 0.0), ((), 0.0)):
        leases = SandboxLeases(backend)
        try:
            assert (await play_script(environment, row, steps, leases)).score.reward == reward
        finally:
            await leases.close()


def skips_tests(task: SweTask) -> str:
    """Let nothing be collected, and whatever is collected be skipped."""
    hook = "import pytest\n\n\ndef pytest_collection_modifyitems(items):\n    for item in items:\n"
    hook += "        item.add_marker(pytest.mark.skip)\n"
    configuration = "[pytest]\ncollect_ignore_glob = *\naddopts = --collect-only\n"
    files = {"conftest.py": hook, "pytest.ini": configuration, "sitecustomize.py": "import os\nos._exit(0)\n"}
    return "".join(git_diff(path, "", text) for path, text in files.items() if path not in task.tests.files)


def wrong_patch(task: SweTask, sdist: Any) -> str:
    """Edit the line that gold edits, wrongly: a plausible but wrong repair."""
    released = read_sdist(sdist)
    paths = re.findall(r"^\+\+\+ b/(.*)$", task.gold_patch, re.MULTILINE)
    path = paths[0]
    assert path in find_layout(released).sources
    line = int(re.findall(r"^@@ -(\d+)", task.gold_patch, re.MULTILINE)[0]) + 3
    broken = unpack(task.archive)[path].decode()
    near = [one for one in propose_mutations(path, broken.encode()) if abs(one.line - line) <= 3]
    for one in near:
        edited = one.apply(broken.encode())
        if is_fault(one, broken.encode()) and edited != released[path].data:
            return git_diff(path, broken, edited.decode())
    return git_diff(path, broken, broken.replace("\n", "\n\n", 1))


def half_patch(task: SweTask) -> str | None:
    """The repair of one of two files."""
    parts = re.split(r"(?=^diff --git )", task.gold_patch, flags=re.MULTILINE)[1:]
    return parts[0] if len(parts) == 2 else None
