"""Patches that repair nothing are never paid, whatever they do; other repairs than the gold one are."""

import asyncio
from collections import Counter

import pytest

from prorl_gym.environments.swe.grading import grade
from prorl_gym.environments.swe.patches import clean_patch
from prorl_gym.environments.swe.task import SweTask
from prorl_gym.records import Score
from prorl_gym.rollout.leases import SandboxLeases
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import resolve
from tests.environments.swe.hostile_patches import HOSTILE
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
    "a repair that breaks all else, and is honest where tests run alone",
)


async def score_of(task: SweTask, diff: str, backend: SandboxBackend) -> Score:
    leases = SandboxLeases(backend)
    try:
        cleaned = clean_patch(diff.encode(), task)
        assert cleaned.patch and not cleaned.dropped, "it is not graded at all"
        return await grade(task, cleaned.patch, leases, resolve())
    finally:
        await leases.close()


def test_there_are_enough_of_each_class() -> None:
    counts = Counter(each.kind for each in HOSTILE.values())
    assert len(HOSTILE) >= 60
    assert len(counts) >= 8 and min(counts.values()) >= 5
    assert counts["own runner"] >= 10


@pytest.mark.parametrize("name", SAMPLE)
async def test_a_hostile_patch_is_not_paid(name: str, backend: SandboxBackend) -> None:
    hostile = HOSTILE[name]
    score = await score_of(hostile.repository.task(), hostile.patch(), backend)
    assert score.reward == 0.0, score.detail


@pytest.mark.parametrize("victim", [pytest.param(name, marks=pytest.mark.slow) for name in VICTIMS])
async def test_every_right_repair_is_paid(victim: str, backend: SandboxBackend) -> None:
    found = VICTIMS[victim]
    for repair in found.repairs:
        score = await score_of(found.task(), found.patch(repair), backend)
        assert score.reward == 1.0, (repair, score.detail)


@pytest.mark.slow
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
