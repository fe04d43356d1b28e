"""The clock of simulations: time passes where nothing else can happen, and a loop that can never go on says so."""

import asyncio
import gc

import pytest
from simulation.virtual_clock import run_deterministically, run_virtually


def test_hours_pass_at_once_and_in_order():
    async def work() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), list[tuple[str, float]]()

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time()))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sleeper("late", 7200.0))
            tasks.create_task(sleeper("early", 0.5))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await asyncio.Event().wait()
        seen.append(("timeout", loop.time()))
        return seen

    assert run_virtually(work()) == [
        ("early", pytest.approx(0.5)),
        ("late", pytest.approx(7200.0)),
        ("timeout", pytest.approx(7210.0)),
    ]


def test_a_loop_on_which_nothing_will_happen_raises():
    with pytest.raises(RuntimeError, match="everything waits"):
        run_virtually(asyncio.Event().wait())


def test_a_run_leaves_frozen_objects_frozen():
    frozen = gc.get_freeze_count()  # by `conftest.py`
    run_deterministically(lambda: asyncio.sleep(0), 0)
    assert gc.get_freeze_count() >= frozen > 0
