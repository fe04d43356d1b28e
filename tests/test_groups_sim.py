"""The simulation of ``bench groups``: what it counts must be exact, or its table would be a story."""

import math
from dataclasses import replace

import pytest
from _groups_schemes import BatchFull, DropStale, Reuse, ServiceScheme, WaitForAll
from _groups_sim import (
    TOOL_SHARE,
    ActiveGroup,
    Draw,
    Population,
    Result,
    Setting,
    Task,
    Tasks,
    Workers,
    new_group,
    simulate,
)
from groups import interval_bound

SMALL = Setting(batch=4, size=4, steps=4, init=8, run=16, eval=8)


class Given(Tasks):
    """Groups that a test names; the last one for ever."""

    def __init__(self, *groups: tuple[Draw, ...]) -> None:
        self._groups = groups

    def __getitem__(self, number: int) -> Task:
        return Task(number, self._groups[min(number, len(self._groups) - 1)])


def pair(first: float, second: float) -> tuple[Draw, Draw]:
    """An informative group of two."""
    return Draw(1.0, first, 2.0, 1.0), Draw(1.0, second, 2.0, 0.0)


ONE = Setting(batch=1, size=2, steps=1, init=8, run=4, eval=8)


class SingleGroup:
    def __init__(self, workers: Workers, task: Task) -> None:
        self.group = new_group(task)
        self._workers = workers

    def on_step_start(self, version: int) -> None:
        for job in self.group.jobs:
            self._workers.enqueue(job)

    def on_training(self) -> None: ...

    def on_stage_entered(self, job: object) -> None: ...

    def on_reward(self, job: object) -> None: ...

    def pop_batch(self) -> list[ActiveGroup] | None:
        return [self.group] if self.group.complete else None


def test_worker_seconds_are_all_slots_while_the_trainer_waits():
    workers = Workers(ONE)
    result = simulate(workers, SingleGroup(workers, Task(0, pair(10.0, 30.0))), 0.0)
    assert result.seconds == 33.0
    assert result.worker_seconds == 4 * 33.0
    assert result.busy == 40.0
    assert result.waits == [33.0]


def test_a_round_is_waited_for_and_its_surplus_is_lost():
    workers = Workers(replace(ONE, steps=2))
    result = simulate(workers, WaitForAll(workers, Given(pair(5.0, 5.0), pair(5.0, 50.0)), 2.0), 0.0)
    assert result.waits == [53.0, 53.0]
    assert [task.number for task in result.delivered] == [0, 2]


@pytest.mark.parametrize(
    ("reuse", "second"),
    [
        ("lost", 1.0 + 100.0 + 2.0),
        # 7 seconds of it were done when the first batch was full.
        ("replayed", 1.0 + 93.0 + 7.0 * TOOL_SHARE + 2.0),
    ],
)
def test_what_is_cut_costs_what_its_reuse_implies(reuse: Reuse, second: float):
    workers = Workers(replace(ONE, steps=2))
    scheme = BatchFull(workers, Given(pair(5.0, 5.0), pair(100.0, 100.0)), 2.0, reuse)
    assert simulate(workers, scheme, 0.0).waits == pytest.approx([8.0, second])


def test_groups_that_become_too_old_are_dropped():
    workers = Workers(replace(ONE, steps=3, staleness=0))
    tasks = Given(pair(5.0, 5.0), pair(500.0, 500.0), pair(5.0, 5.0))
    result = simulate(workers, DropStale(workers, tasks, 2.0, 9.0), 0.0)
    assert 1 not in [task.number for task in result.delivered]
    assert set(result.behind) == {0}


@pytest.mark.parametrize("train", [0.0, 400.0])
def test_ours_delivers_whole_fresh_groups_and_returns_every_slot(train: float):
    def made() -> tuple[Workers, Result]:
        workers = Workers(SMALL)
        return workers, simulate(workers, ServiceScheme(workers, Tasks(SMALL, 1)), train)

    (workers, result), (_, again) = made(), made()
    assert result == again
    assert len(result.delivered) == SMALL.batch * SMALL.steps
    assert len({task.number for task in result.delivered}) == len(result.delivered)
    assert all(task.informative for task in result.delivered)
    assert 0 <= min(result.behind) and max(result.behind) <= SMALL.staleness
    assert result.busy >= sum(member.run for task in result.delivered for member in task.members) - 1e-6
    assert result.busy <= result.worker_seconds <= result.seconds * SMALL.run + 1e-6
    assert workers.parked <= SMALL.run


def test_groups_depend_on_the_seed_alone():
    assert Tasks(SMALL, 3)[7] == Tasks(SMALL, 3)[7] != Tasks(SMALL, 4)[7]
    share = len(Population(SMALL, 500).informative) / 500
    assert 0.15 < share < 0.5


def test_equivalence_is_the_far_end_of_the_interval():
    spread = [0.0, 2.0] * 50
    half = 1.6448536269514722 * math.sqrt(2 * (100 / 99) / 100)
    assert interval_bound(spread, [value + 0.5 for value in spread]) == pytest.approx(0.5 + half)
