"""Informative groups per worker-second, in simulation: the service's own book beside what others do.

Five seeds, each with the same groups for every arm; a ratio is of two rates of one seed, and its interval is that of
the mean of the five (Student's t, 95 %). Every peer has its best setting of a grid, chosen by its mean rate on these
very seeds, which is more than a user could do; ours has the service's defaults, but that agents stay parked for up to
twice the time that a step's training takes, which was settled on other seeds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, stdev

from _arm_cache import ArmCache
from _groups_schemes import BatchFull, DropStale, Reuse, ServiceScheme, WaitForAll
from _groups_sim import MAIN, SEEDS, Population, Result, Scheme, Setting, Task, Tasks, Workers, simulate, train_seconds
from _report import SHORT, Figure, Report, figure, interval, peer, report

from prorl_gym.demand import RedundantHandling

ROUNDS = (1.0, 2.0, 3.0, 4.0, 6.0)
BEGUN = (2.0, 4.0, 6.0, 8.0, 12.0)
UNDER_WAY = (1.5, 2.0, 2.5, 3.0, 4.0)
BUFFERS = (1.0, 2.0)
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
    scheme: str
    setting: Setting
    many: float = 0.0
    buffer: float = 0.0
    reuse: Reuse = "lost"
    seed: int = 0


def execute(arm: Arm) -> Result:
    workers, tasks, training = Workers(arm.setting), Tasks(arm.setting, arm.seed), train_seconds(arm.setting)
    scheme: Scheme
    match arm.scheme:
        case "ours":
            redundant = RedundantHandling(park_seconds=max(_PARK_SECONDS, 2 * training))
            scheme = ServiceScheme(workers, tasks, redundant)
        case "wait":
            scheme = WaitForAll(workers, tasks, arm.many)
        case "full":
            scheme = BatchFull(workers, tasks, arm.many, arm.reuse)
        case _:
            scheme = DropStale(workers, tasks, arm.many, arm.buffer)
    return simulate(workers, scheme, training)


Arms = ArmCache[Arm, Result]


def rates(arms: Arms, arm: Arm) -> list[float]:
    """Return informative groups per 1000 worker-seconds, by seed."""
    return [made.rate for made in arms[arm]]


def best_of(arms: Arms, grid: Sequence[Arm]) -> Arm:
    """Return the arm with the highest mean rate."""
    return max(grid, key=lambda arm: mean(rates(arms, arm)))


def speedups(arms: Arms, ours: Arm, theirs: Arm) -> list[float]:
    """Return, by seed, how many times as much ours delivers."""
    return [a / b for a, b in zip(rates(arms, ours), rates(arms, theirs), strict=True)]


def delivered(arms: Arms, arm: Arm) -> list[Task]:
    return [task for made in arms[arm] for task in made.delivered]


def peers() -> dict[str, list[Arm]]:
    full: dict[Reuse, str] = {
        "lost": "stop when the batch is full, what is cut is lost",
        "replayed": "stop when the batch is full, what is cut is reused (sandbox made again, tools replayed)",
    }
    return {
        "wait for all": [Arm("wait", MAIN, many) for many in ROUNDS],
        **{name: [Arm("full", MAIN, many, reuse=reuse) for many in BEGUN] for reuse, name in full.items()},
        "drop stale groups": [Arm("stale", MAIN, many, buffer) for many in UNDER_WAY for buffer in BUFFERS],
    }


TARGETS = {"wait for all": 1.5}


def main_figures(arms: Arms) -> list[Figure]:
    ours, grids = Arm("ours", MAIN), peers()
    arms.prepare([ours, *(arm for grid in grids.values() for arm in grid)])
    rows: list[Figure] = []
    for name, grid in grids.items():
        best = best_of(arms, grid)
        ratios = speedups(arms, ours, best)
        rows.append(
            figure(
                f"ours over `{name}` (best of its grid: {best.many:g} batches)",
                *(ratios, "x"),
                better="higher",
                target=TARGETS.get(name, 1.1),
                interval=interval(ratios),
            )
        )
    return rows + bias(arms, ours, grids)


def bias(arms: Arms, ours: Arm, grids: dict[str, list[Arm]]) -> list[Figure]:
    """Equivalence of what is delivered with what would be without any stopping (TOST, groups as units)."""

    def longer(arm: Arm, staleness: int = MAIN.staleness) -> Arm:
        return replace(arm, setting=replace(MAIN, steps=LONG, staleness=staleness))

    unbound, bound = longer(ours, 1000), longer(ours)
    cut = longer(best_of(arms, grids["stop when the batch is full, what is cut is lost"]))
    stale = longer(best_of(arms, grids["drop stale groups"]))
    arms.prepare([unbound, bound, cut, stale])
    ratios = speedups(arms, unbound, stale)
    rows = [
        figure(
            f"without max_staleness, {LONG} steps: ours over `drop stale groups`",
            *(ratios, "x"),
            better="higher",
            target=1.0,
            interval=interval(ratios),
            peers=[peer(f"ours with max_staleness {MAIN.staleness}", speedups(arms, bound, stale))],
        )
    ]
    for what, unit, scale, margin, value in (
        ("mean log of RUN seconds", "%", 100, LENGTH_MARGIN, _length),
        ("mean reward", "", 1, REWARD_MARGIN, _reward),
    ):
        everything = [value(task) for task in Population(MAIN, POPULATION).informative]
        off = partial(_off, arms, value, everything)
        n = len(delivered(arms, unbound))
        rows.append(
            figure(
                f"bias, {what}: furthest that ours may be off (n = {n} groups, 90 %)",
                [scale * off(unbound)],
                unit,
                target=scale * margin,
                peers=[
                    peer(f"ours with max_staleness {MAIN.staleness}", [scale * off(bound)]),
                    peer("`stop when the batch is full`, lost", [scale * off(cut)]),
                    peer(f"`drop stale groups` beyond {MAIN.staleness}", [scale * off(stale)]),
                ],
            )
        )
    return rows


def _off(arms: Arms, value: Callable[[Task], float], everything: Sequence[float], arm: Arm) -> float:
    return interval_bound([value(task) for task in delivered(arms, arm)], everything)


def interval_bound(sample: Sequence[float], everything: Sequence[float]) -> float:
    """Return the larger end, without its sign, of the 90 % interval of the difference of two means.

    Equivalence within a margin is shown at 5 % when it is smaller than the margin (Schuirmann 1987).
    """
    half = _Z90 * math.sqrt(stdev(sample) ** 2 / len(sample) + stdev(everything) ** 2 / len(everything))
    return abs(mean(sample) - mean(everything)) + half


def run() -> Report:
    return report("groups", main_figures(Arms(execute, lambda arm: SEEDS[:2] if SHORT else SEEDS)))


def _length(task: Task) -> float:
    return mean(math.log(member.run) for member in task.members)


def _reward(task: Task) -> float:
    return mean(member.reward for member in task.members)
