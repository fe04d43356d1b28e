"""Deadlines that stand still."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import pytest
from virtual_time import virtually

from prorl_gym import deadlines
from prorl_gym.deadlines import Deadline, Timeout, current_deadline, hold_uncharged, paused_deadline


async def forever() -> None:
    await asyncio.Event().wait()


@virtually
async def test_the_rest_of_the_time_runs_on_after_a_hold():
    deadline = Deadline(0.02)
    with pytest.raises(TimeoutError):
        async with deadline:
            with paused_deadline():
                await asyncio.sleep(0.05)
            await forever()
    assert deadline.expired()


@virtually
@pytest.mark.parametrize("is_paused", [False, True])
async def test_the_charged_time_can_be_set(is_paused: bool):
    """0.04 s of other work, then 0.03 s on top of 0.06 s that were charged before."""
    deadline = Deadline(0.1)
    with pytest.raises(TimeoutError):
        async with deadline:
            await asyncio.sleep(0.04)
            if is_paused:
                deadline.pause()
                await asyncio.sleep(0.05)
            deadline.set_charged(0.06)
            if is_paused:
                deadline.resume()
            await asyncio.sleep(0.03)
            assert deadline.charged_seconds == pytest.approx(0.09, abs=0.002)
            assert deadline.paused_seconds == pytest.approx(0.09 if is_paused else 0.04, abs=0.002)
            await forever()
    assert deadline.expired()


@virtually
async def test_a_hold_in_a_task_of_the_block_counts():
    async def wait() -> None:
        with paused_deadline():
            await asyncio.sleep(0.1)

    async with Deadline(0.05) as deadline:
        await asyncio.create_task(wait())
    assert deadline.paused_seconds >= 0.1


@virtually
@pytest.mark.parametrize("permit_type", [asyncio.Lock, partial(asyncio.Semaphore, 1)])
async def test_the_wait_for_a_permit_is_free_and_the_work_under_it_is_not(
    permit_type: Callable[[], asyncio.Lock | asyncio.Semaphore],
):
    permit = permit_type()
    await permit.acquire()
    asyncio.get_running_loop().call_later(0.1, permit.release)
    deadline = Deadline(0.05)
    with pytest.raises(TimeoutError):
        async with deadline, hold_uncharged(permit):
            assert 0.1 <= deadline.paused_seconds
            await forever()
    assert deadline.expired()
    assert not permit.locked()


@virtually
async def test_it_goes_on_when_the_last_of_several_lets_go():
    async with Deadline(0.03) as deadline:
        deadline.pause()
        deadline.pause()
        deadline.resume()
        await asyncio.sleep(0.06)
        deadline.resume()
    assert not deadline.expired()


@virtually
async def test_what_is_let_go_after_the_end_does_nothing():
    async with Deadline(1.0) as deadline:
        deadline.pause()
    held = deadline.paused_seconds
    deadline.resume()
    assert deadline.paused_seconds == held


@virtually
async def test_a_hold_after_the_time_was_up_changes_nothing():
    deadline = Deadline(0.0)
    with pytest.raises(TimeoutError):
        async with deadline:
            try:
                await forever()
            finally:
                with paused_deadline():
                    pass
    assert deadline.expired()


@virtually
async def test_outside_of_any_deadline_nothing_happens():
    assert current_deadline() is None
    with paused_deadline():
        assert current_deadline() is None


@virtually
async def test_lost_time_is_refunded():
    async with Deadline(0.1) as deadline:
        await asyncio.sleep(0.02)
        before = deadline.charged_seconds
        await asyncio.sleep(0.06)
        deadline.refund(before)
        assert deadline.charged_seconds < before + 0.02
        await asyncio.sleep(0.05)  # without the refund it would be over by now
    assert not deadline.expired()
    assert deadline.paused_seconds >= 0.06


@virtually
async def test_time_is_refunded_once_where_several_lost_it():
    async with Deadline(60.0) as deadline:
        before = deadline.charged_seconds
        await asyncio.sleep(0.02)
        deadline.refund(before)
        deadline.refund(before)
    assert 0 <= deadline.charged_seconds < 0.02
    assert deadline.paused_seconds < 0.04


@virtually
async def test_held_time_is_not_refunded_again():
    async with Deadline(60.0) as deadline:
        before = deadline.charged_seconds
        with paused_deadline():
            await asyncio.sleep(0.05)
            deadline.refund(before)
        assert deadline.charged_seconds < 0.05
    assert 0.05 <= deadline.paused_seconds < 0.1


@pytest.mark.parametrize("kind", [Timeout, Deadline])
async def test_time_for_which_the_process_stood_still_is_not_counted(
    kind: type[Timeout], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(deadlines, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(deadlines, "_STANDSTILL_SECONDS", 0.1)
    async with kind(0.2):
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)
        await asyncio.sleep(0.15)
    timeout = kind(0.2)
    with pytest.raises(TimeoutError):
        async with timeout:
            asyncio.get_running_loop().call_soon(time.sleep, 0.5)
            await forever()
    assert timeout.expired()


async def test_a_paused_deadline_counts_a_standstill_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deadlines, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(deadlines, "_STANDSTILL_SECONDS", 0.1)
    async with Deadline(5.0) as deadline:
        with paused_deadline():
            asyncio.get_running_loop().call_soon(time.sleep, 0.5)
            await asyncio.sleep(0.55)
        assert 0.5 <= deadline.paused_seconds < 0.9
        before = deadline.charged_seconds
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)
        await asyncio.sleep(0.55)
        assert deadline.charged_seconds - before < 0.4
