"""Slots are returned exactly once, whatever happens to the tasks that wait for them or hold them."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.rollout.scheduling.stage_pools import StagePool


async def test_never_more_than_size_hold_a_slot() -> None:
    pool, held, most = StagePool(3), 0, 0

    async def work() -> None:
        nonlocal held, most
        async with pool.slot():
            held += 1
            most = max(most, held)
            await asyncio.sleep(0)
            held -= 1

    await asyncio.gather(*(work() for _ in range(20)))
    assert (most, pool.busy) == (3, 0)


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


async def test_cancel_in_the_moment_of_the_grant_passes_the_slot_on() -> None:
    pool = StagePool(1)
    slot = await pool.acquire_slot()
    first, second = (asyncio.create_task(pool.acquire_slot()) for _ in range(2))
    await asyncio.sleep(0)
    slot.release()  # grants to the first, which has not run yet
    first.cancel()
    await asyncio.wait_for(second, 1)
    assert (first.cancelled(), pool.busy) == (True, 1)


async def test_second_return_is_refused() -> None:
    pool = StagePool(1)
    async with pool.slot() as slot:
        pass
    with pytest.raises(RuntimeError, match="returned twice"):
        slot.release()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4), count=st.integers(1, 30))
def test_all_slots_come_back_under_random_cancels(seed: int, size: int, count: int) -> None:
    async def drive() -> None:
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

    asyncio.run(drive())
