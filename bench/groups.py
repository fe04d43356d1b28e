"""Informative groups per worker-second, in simulation: the service's own book beside what others do.

Five seeds, each with the same groups for every arm; a ratio is of two rates of one seed, and its interval is that of
the mean of the five (Student's t, 95 %). The workload stands in ``_groups_workload.py``, which was committed before the
first measurement. Every peer has its best setting of a grid, chosen by its mean rate on these very seeds, which is more
than a user could do; ours has the service's defaults, but that agents stay parked for up to twice the time that a
step's training takes, so that they are there when it is over, which was settled on other seeds. Nothing here depends
on how busy this machine is.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from statistics import mean, stdev

from _groups_ours import ServiceScheme
from _groups_peers import BatchFull, DropStale, Reuse, WaitForAll
from _groups_sim import Result, Scheme, Workers, simulate
from _groups_workload import MAIN, SEEDS, SLOTS, TAILS, TRAINS, Population, Setting, Task, Tasks, train_seconds
from _report import SHORT, Figure, Report, figure, interval, peer, report

from prorl_gym.demand import RedundantHandling

ROUNDS = (1.0, 2.0, 3.0, 4.0, 6.0)
BEGUN = (2.0, 4.0, 6.0, 8.0, 12.0)
UNDER_WAY = (1.5, 2.0, 2.5, 3.0, 4.0)
BUFFERS = (1.0, 2.0)
"""Grids of the peers, in batches."""
LENGTH_MARGIN = 0.02
"""Of the mean logarithm of RUN seconds: what is delivered is no more than about 2 % shorter or longer."""
REWARD_MARGIN = 0.02
LONG = 60
"""Steps of the run for bias: the groups that are under way when a run ends are long ones, in every scheme."""
POPULATION = 20_000
_PARK_SECONDS = RedundantHandling().park_seconds
_Z90 = 1.6448536269514722
"""Two one-sided tests at 5 % are one interval of 90 %."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One run to make."""

    scheme: str
    setting: Setting
    many: float = 0.0
    buffer: float = 0.0
    reuse: Reuse = "lost"
    seed: int = 0


def execute(arm: Arm) -> Result:
    """Make a run."""
    workers, tasks = Workers(arm.setting), Tasks(arm.setting, arm.seed)
    if arm.scheme != "ours":
        return simulate(workers, _peer(arm, workers, tasks), _training(arm.setting))
    training = _training(arm.setting)
    redundant = RedundantHandling(park_seconds=max(_PARK_SECONDS, 2 * training))
    return simulate(workers, ServiceScheme(workers, tasks, redundant), training)


def _peer(arm: Arm, workers: Workers, tasks: Tasks) -> Scheme:
    if arm.scheme == "wait":
        return WaitForAll(workers, tasks, arm.many)
    if arm.scheme == "full":
        return BatchFull(workers, tasks, arm.many, arm.reuse)
    return DropStale(workers, tasks, arm.many, arm.buffer)


@cache
def _training(setting: Setting) -> float:
    return train_seconds(setting)


class ArmCache:
    """Runs arms once and remembers them."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds
        self._done: dict[Arm, list[Result]] = {}

    def prepare(self, arms: Sequence[Arm]) -> None:
        """Run what is not there yet, on all cores."""
        new = [arm for arm in dict.fromkeys(arms) if arm not in self._done]
        jobs = [replace(arm, seed=seed) for arm in new for seed in self._seeds]
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as workers:
            made = list(workers.map(execute, jobs))
        for place, arm in enumerate(new):
            self._done[arm] = made[place * len(self._seeds) : (place + 1) * len(self._seeds)]

    def __getitem__(self, arm: Arm) -> list[Result]:
        return self._done[arm]

    def rates(self, arm: Arm) -> list[float]:
        """Return informative groups per 1000 worker-seconds, by seed."""
        return [made.rate for made in self[arm]]

    def best(self, arms: Sequence[Arm]) -> Arm:
        """Return the arm with the highest mean rate."""
        return max(arms, key=lambda arm: mean(self.rates(arm)))

    def speedups(self, ours: Arm, theirs: Arm) -> list[float]:
        """Return, by seed, how many times as much ours delivers."""
        return [a / b for a, b in zip(self.rates(ours), self.rates(theirs), strict=True)]

    def delivered(self, arm: Arm) -> list[Task]:
        """Return the groups that trainers got, of all seeds."""
        return [task for made in self[arm] for task in made.delivered]


def peers(setting: Setting) -> dict[str, list[Arm]]:
    """Return each peer's grid."""
    full: dict[Reuse, str] = {
        "lost": "stop when the batch is full, what is cut is lost",
        "replayed": "stop when the batch is full, what is cut is reused (sandbox made again, tools replayed)",
    }
    return {
        "wait for all": [Arm("wait", setting, many) for many in ROUNDS],
        **{name: [Arm("full", setting, many, reuse=reuse) for many in BEGUN] for reuse, name in full.items()},
        "drop stale groups": [Arm("stale", setting, many, buffer) for many in UNDER_WAY for buffer in BUFFERS],
    }


TARGETS = {"wait for all": 1.5}


def main_figures(arms: ArmCache) -> list[Figure]:
    """The published batch."""
    ours, ideal = Arm("ours", MAIN), [Arm("full", MAIN, many, reuse="kept") for many in BEGUN]
    grids = peers(MAIN)
    arms.prepare([ours, *ideal, *(arm for grid in grids.values() for arm in grid)])
    rows = [_ratio(f"ours over `{name}`", arms, ours, grid, TARGETS.get(name, 1.1)) for name, grid in grids.items()]
    rows.append(_ratio("ours over reuse with every sandbox kept, at any age and for nothing", arms, ours, ideal))
    rows.append(figure("ours: informative groups per 1000 worker-seconds", arms.rates(ours), "", better="higher"))
    parked = [float(made.most_parked) for made in arms[ours]]
    rows.append(figure("ours: most agents parked at once, each with its sandbox", parked, "", better="lower"))
    return rows + bias(arms, ours, grids)


def bias(arms: ArmCache, ours: Arm, grids: dict[str, list[Arm]]) -> list[Figure]:
    """Equivalence of what is delivered with what would be without any stopping (TOST, groups as units)."""

    def longer(arm: Arm, staleness: int = MAIN.staleness) -> Arm:
        return replace(arm, setting=replace(MAIN, steps=LONG, staleness=staleness))

    unbound, bound = longer(ours, 1000), longer(ours)
    cut = longer(arms.best(grids["stop when the batch is full, what is cut is lost"]))
    stale = longer(arms.best(grids["drop stale groups"]))
    arms.prepare([unbound, bound, cut, stale])
    ratios = arms.speedups(unbound, stale)
    rows = [
        figure(
            f"without max_staleness, {LONG} steps: ours over `drop stale groups`",
            *(ratios, "x"),
            better="higher",
            target=1.0,
            interval=interval(ratios),
            peers=[peer(f"ours with max_staleness {MAIN.staleness}", arms.speedups(bound, stale))],
        )
    ]
    for what, unit, scale, margin, value in (
        ("mean log of RUN seconds", "%", 100, LENGTH_MARGIN, _length),
        ("mean reward", "", 1, REWARD_MARGIN, _reward),
    ):
        everything = [value(task) for task in Population(MAIN, POPULATION).informative]
        off = partial(_off, arms, value, everything)
        n = len(arms.delivered(unbound))
        rows.append(
            figure(
                f"bias, {what}: furthest that ours may be off (n = {n} groups, 90 %)",
                [scale * off(unbound)],
                unit,
                better="lower",
                target=scale * margin,
                peers=[
                    peer(f"ours with max_staleness {MAIN.staleness}", [scale * off(bound)]),
                    peer("`stop when the batch is full`, lost", [scale * off(cut)]),
                    peer(f"`drop stale groups` beyond {MAIN.staleness}", [scale * off(stale)]),
                ],
            )
        )
    return rows


def _off(arms: ArmCache, value: Callable[[Task], float], everything: Sequence[float], arm: Arm) -> float:
    return interval_bound([value(task) for task in arms.delivered(arm)], everything)


def interval_bound(sample: Sequence[float], everything: Sequence[float]) -> float:
    """Return the larger end, without its sign, of the 90 % interval of the difference of two means.

    Equivalence within a margin is shown at 5 % when it is smaller than the margin (Schuirmann 1987).
    """
    half = _Z90 * math.sqrt(stdev(sample) ** 2 / len(sample) + stdev(everything) ** 2 / len(everything))
    return abs(mean(sample) - mean(everything)) + half


def sweep(arms: ArmCache) -> list[Figure]:
    """Where it does not gain: slots, tail and trainer changed one by one."""
    settings = {
        **{f"{slots} slots": replace(MAIN, run=slots) for slots in SLOTS},
        **{f"tail {tail:g}": replace(MAIN, tail=tail) for tail in TAILS},
        **{f"training {train:g}": replace(MAIN, train=train) for train in TRAINS},
    }
    rows: list[Figure] = []
    for label, setting in settings.items():
        ours, grids = Arm("ours", setting), peers(setting)
        arms.prepare([ours, *(arm for grid in grids.values() for arm in grid)])
        rows += [_ratio(f"{label}: ours over `{name}`", arms, ours, grid) for name, grid in grids.items()]
    return rows


def run() -> Report:
    """Measure."""
    arms = ArmCache(SEEDS[:2] if SHORT else SEEDS)
    return report("groups", main_figures(arms) + ([] if SHORT else sweep(arms)))


def _ratio(name: str, arms: ArmCache, ours: Arm, grid: Sequence[Arm], target: float | None = None) -> Figure:
    best = arms.best(grid)
    ratios = arms.speedups(ours, best)
    said = f"{name} (best of its grid: {best.many:g} batches)"
    return figure(said, ratios, "x", better="higher", target=target, interval=interval(ratios))


def _length(task: Task) -> float:
    return mean(math.log(member.run) for member in task.members)


def _reward(task: Task) -> float:
    return mean(member.reward for member in task.members)


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
