"""Patches that repair nothing, or break something else, are never paid; other repairs than the gold one are."""

import asyncio
import re
from pathlib import Path

import pytest

from prorl_gym.environments.swe import pytest_report
from prorl_gym.environments.swe.controls import guest_runner
from prorl_gym.environments.swe.grading import grade
from prorl_gym.environments.swe.patch_filter import filter_patch
from prorl_gym.environments.swe.swe_row import SweTask
from prorl_gym.records import Score
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import resolve_settings
from tests.environments.swe.hostile_patches import CLASSES, CORPUS, HOSTILE
from tests.environments.swe.hostile_repositories import VICTIMS

AT_ONCE = 3
"""Patches that are graded at the same time."""
SAMPLE = (
    "Function.runtest does nothing",
    "a failure of unittest is added as a success",
    "the report is written again at the end",
    "an integer that is equal to everything",
    "notes in /tmp about the bodies seen",
    "it says that it passed",
    "a right repair that breaks another function and hides its own exception",
)


async def score_of(task: SweTask, diff: str, backend: SandboxBackend) -> Score:
    leases = SandboxLeases(backend)
    try:
        cleaned = filter_patch(diff.encode(), task)
        assert cleaned.patch and not cleaned.dropped, "it is not graded at all"
        return await grade(task, cleaned.patch, leases, resolve_settings())
    finally:
        await leases.close()


def test_there_are_enough_of_each_class() -> None:
    counts = {kind: len(patches) for kind, patches in CLASSES.items()}
    assert len(HOSTILE) == sum(counts.values()) >= 100, "no name stands for two"
    assert len(counts) >= 8 and min(counts.values()) >= 5
    assert counts["own runner"] >= 10


def test_the_patches_name_what_our_guest_programs_have() -> None:
    """After a renaming there they would attack nothing, or fail by themselves, and these tests would pass."""
    text = CORPUS.read_text("utf-8")
    guests = Path(guest_runner.__file__).read_text("utf-8") + Path(pytest_report.__file__).read_text("utf-8")
    pattern = (
        r'(?:guest\(\)|found|module)\.(_[a-zA-Z]\w+)|hasattr\(module, "(\w+)"\)|__name__(?:", ""\))? == "(_\w+)"'
        r'|co_name == "(\w+)"|\b(\w+)=said\b'
    )
    names = {name for found in re.findall(pattern, text) for name in found if name}
    assert len(names) >= 10
    unknown = {name for name in names if re.search(rf"\b{name}\b", guests) is None}
    assert not unknown
    assert "code = 1\n" in guests


@pytest.mark.parametrize("name", SAMPLE)
async def test_a_hostile_patch_is_not_paid(name: str, backend: SandboxBackend) -> None:
    hostile = HOSTILE[name]
    score = await score_of(hostile.repository.task(), hostile.patch(), backend)
    assert score.reward == 0.0, score.detail


@pytest.mark.product
@pytest.mark.parametrize("victim", VICTIMS)
async def test_every_right_repair_is_paid(victim: str, backend: SandboxBackend) -> None:
    found = VICTIMS[victim]
    for repair in found.repairs:
        score = await score_of(found.task(), found.patch(repair), backend)
        assert score.reward == 1.0, (repair, score.detail)


@pytest.mark.release
@pytest.mark.timeout(600)
async def test_no_hostile_patch_is_paid(backend: SandboxBackend) -> None:
    tasks = {name: victim.task() for name, victim in VICTIMS.items()}
    slots = asyncio.Semaphore(AT_ONCE)
    paid: dict[str, Score] = {}

    async def look(name: str) -> None:
        async with slots:
            hostile = HOSTILE[name]
            score = await score_of(tasks[hostile.victim], hostile.patch(), backend)
            if score.reward != 0.0:
                paid[name] = score

    async with asyncio.TaskGroup() as group:
        for name in HOSTILE:
            if name not in SAMPLE:
                group.create_task(look(name))
    assert not paid, f"{len(paid)} of {len(HOSTILE)} are paid: {paid}"
