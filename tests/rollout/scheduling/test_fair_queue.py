"""Environments get equal worker-seconds while they compete, no slot is idle while an item waits, and all come back."""

import asyncio
import heapq
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.rollout.scheduling.fair_queue import Charge, FairQueue
from prorl_gym.rollout.scheduling.stage_pools import StagePool


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Site:
    """Slots and a line before them, in simulated time. Environments in ``lengths`` always have work waiting."""

    def __init__(
        self,
        slots: int,
        lengths: Mapping[str, float],
        weights: Mapping[str, float] | None = None,
        offered: Sequence[str] = (),
    ) -> None:
        self.clock = Clock()
        self.line: FairQueue[int] = FairQueue(weights, self.clock)
        self.lengths = dict(lengths)
        self.worked: defaultdict[str, float] = defaultdict(float)
        self._free = slots
        self._count = 0
        self.of: dict[int, str] = {}
        self._ends: list[tuple[float, int, str, Charge]] = []
        for name in offered or lengths:
            self.offer(name)

    def offer(self, name: str) -> None:
        """Let one more piece wait."""
        self._count += 1
        self.of[self._count] = name
        self.line.push(name, self._count)

    def run(self, until: float) -> None:
        """Serve until then; work that is cut by the end counts as far as it came."""
        while self.clock.now < until:
            while self._free and self.line:
                item, charge = self.line.pop()
                charge.resume()
                self._free -= 1
                name = self.of.pop(item)
                heapq.heappush(self._ends, (self.clock.now + self.lengths[name], item, name, charge))
                self.offer(name)
            at, _, name, charge = heapq.heappop(self._ends)
            self.clock.now = at
            charge.end()
            self._free += 1
            self.worked[name] += self.lengths[name]


def test_short_and_long_work_converge_to_equal_worker_seconds() -> None:
    site = Site(8, {"math": 1.0, "swe": 100.0})
    site.run(4000)
    assert site.worked["math"] + site.worked["swe"] > 0.95 * 8 * 4000  # nothing was idle
    assert site.worked["math"] == pytest.approx(site.worked["swe"], rel=0.1)


def test_long_work_does_not_take_every_slot_before_its_first_piece_has_ended() -> None:
    site = Site(8, {"math": 1.0, "swe": 100.0})
    site.run(90)
    assert site.worked["math"] > 90 * 8 / 5


def test_weights_are_shares() -> None:
    site = Site(6, {"math": 1.0, "code": 7.0, "swe": 40.0}, {"swe": 2.0})
    site.run(6000)
    assert site.worked["swe"] / 2 == pytest.approx(site.worked["math"], rel=0.1)
    assert site.worked["code"] == pytest.approx(site.worked["math"], rel=0.1)


def test_who_was_away_has_saved_nothing_up() -> None:
    site = Site(4, {"math": 1.0, "swe": 10.0}, offered=["math"])
    site.run(1000)
    site.offer("swe")
    before = site.worked["math"]
    site.run(1400)
    assert site.worked["math"] - before > 0.4 * 4 * 400


def test_a_piece_that_stood_still_is_charged_for_what_it_worked() -> None:
    clock = Clock()
    line: FairQueue[str] = FairQueue(None, clock)
    line.push("swe", "a")
    _, charge = line.pop()
    charge.resume()
    assert line.usage_by_environment() == {"swe": 0.0}
    clock.now = 5.0
    assert line.usage_by_environment() == {"swe": 5.0}
    charge.pause()
    clock.now = 500.0
    assert line.usage_by_environment() == {"swe": 5.0}
    charge.resume()
    clock.now = 502.0
    assert line.usage_by_environment() == {"swe": 7.0}
    charge.end()
    assert line.usage_by_environment() == {"swe": 7.0}
    with pytest.raises(RuntimeError, match="ended twice"):
        charge.end()


def test_work_that_takes_no_time_is_not_served_for_ever() -> None:
    site = Site(1, {"a": 0.0, "b": 0.0})
    line = site.line
    for _ in range(19):
        site.offer("a")
        site.offer("b")
    served = [site.of[line.pop()[0]] for _ in range(20)]
    assert 5 <= served.count("b") <= 15


@pytest.mark.slow
def test_names_from_requests_cannot_fill_the_memory() -> None:
    line: FairQueue[int] = FairQueue(None, Clock())
    for number in range(2000):
        line.push(f"no-such-{number}", number)
    assert len(line.usage_by_environment()) <= 257
    assert len(line) == 2000
    line.remove("no-such-1999", 1999)
    served = {line.pop()[0] for _ in range(len(line))}
    assert served == set(range(1999))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_every_item_is_served_once_or_removed_and_charges_add_up(data: st.DataObject) -> None:
    clock = Clock()
    line: FairQueue[int] = FairQueue({"a": 3.0}, clock)
    waiting: dict[int, str] = {}
    running: list[tuple[Charge, str]] = []
    ended: defaultdict[str, float] = defaultdict(float)
    for number in range(data.draw(st.integers(1, 40))):
        clock.now += data.draw(st.floats(0, 50))
        match data.draw(st.sampled_from(["push", "push", "pop", "end", "remove", "stand", "go"])):
            case "push":
                waiting[number] = data.draw(st.sampled_from("abc"))
                line.push(waiting[number], number)
            case "pop" if waiting:
                least = min(line.usage_by_environment()[name] for name in set(waiting.values()))
                item, charge = line.pop()
                assert line.usage_by_environment()[waiting[item]] >= least - 1e-6
                running.append((charge, waiting.pop(item)))
            case "end" if running:
                charge, name = running.pop(data.draw(st.integers(0, len(running) - 1)))
                seconds = data.draw(st.floats(0.01, 200))
                charge.end(seconds)
                ended[name] += seconds
            case "remove" if waiting:
                item = data.draw(st.sampled_from(sorted(waiting)))
                line.remove(waiting.pop(item), item)
            case "stand" | "go" as what if running:
                charge, _ = data.draw(st.sampled_from(running))
                charge.pause() if what == "stand" else charge.resume()
            case _:
                pass
        assert len(line) == len(waiting)
        assert bool(line) == bool(waiting)
    while waiting:
        item, charge = line.pop()
        running.append((charge, waiting.pop(item)))
    for charge, name in running:
        charge.end(1.0)
        ended[name] += 1.0
    for name, used in line.usage_by_environment().items():  # what newcomers were put forward by comes on top
        assert used * (3.0 if name == "a" else 1.0) >= ended[name] - 1e-6


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 4)), max_size=40), st.integers(1, 4))
async def test_no_slot_is_idle_while_anybody_waits(work: list[tuple[str, bool, int]], size: int) -> None:
    pool = StagePool(size, {"a": 2.0})

    async def piece(name: str, urgent: bool, length: int) -> None:
        async with pool.slot(name, urgent=urgent):
            for _ in range(length):
                await asyncio.sleep(0)

    tasks = [asyncio.create_task(piece(*one)) for one in work]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        assert pool.free == 0 or pool.waiting == 0
    assert (pool.busy, pool.waiting) == (0, 0)


# --- slots -----------------------------------------------------------------------------------------------------------


async def test_urgent_ones_go_first_and_the_rest_in_order() -> None:
    pool, order = StagePool(1), list[str]()
    slot = await pool.acquire_slot()

    async def work(name: str, urgent: bool) -> None:
        async with pool.slot(urgent=urgent):
            order.append(name)

    tasks = [asyncio.create_task(work(n, u)) for n, u in [("a", False), ("b", False), ("c", True), ("d", True)]]
    await asyncio.sleep(0)
    slot.release()
    await asyncio.gather(*tasks)
    assert order == ["c", "d", "a", "b"]


async def test_second_return_is_refused() -> None:
    pool = StagePool(1)
    async with pool.slot() as slot:
        pass
    with pytest.raises(RuntimeError, match="returned twice"):
        slot.release()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4), count=st.integers(1, 30))
async def test_all_slots_come_back_under_random_cancels(seed: int, size: int, count: int) -> None:
    dice, pool = random.Random(seed), StagePool(size)

    async def work() -> None:
        async with pool.slot(urgent=dice.random() < 0.3):
            assert pool.busy <= size
            for _ in range(dice.randrange(3)):
                await asyncio.sleep(0)
            if dice.random() < 0.2:
                raise ValueError

    tasks = [asyncio.create_task(work()) for _ in range(count)]
    while not all(task.done() for task in tasks):
        if dice.random() < 0.5:
            dice.choice(tasks).cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert pool.busy == 0
    async with pool.slot():  # and it still works
        assert pool.busy == 1
