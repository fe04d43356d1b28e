"""Many ``/run`` calls at once, through the servers as Gym starts them: they queue, and none is refused."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gym_stack import GymStack, post, row, stacked

pytestmark = [pytest.mark.gym, pytest.mark.timeout(300)]

import gym_needed  # noqa: E402, F401

from prorl_gym.trainers.nemo_rl import check_result  # noqa: E402

AS_NEMO_RL = {"global_aiohttp_connector_limit": 65536, "global_aiohttp_connector_limit_per_host": 16384}


def check(answers: list[tuple[int, dict[str, Any]]]) -> None:
    assert Counter(status for status, _ in answers) == {200: len(answers)}
    for _, result in answers:
        check_result(result)
    assert len({result["prorl_rollout_id"] for _, result in answers}) == len(answers)


async def drop(stack: GymStack, name: str, rows: list[dict[str, Any]]) -> None:
    """Post rows, and go away as soon as some of them are at work."""
    waiting = asyncio.create_task(post(stack.url(name), rows))
    await stack.until_begun(1)
    waiting.cancel()
    await asyncio.wait({waiting})


@pytest.mark.slow
async def test_hundreds_at_once_and_hundreds_dropped(tmp_path: Path):
    """Dropped ones are cancelled: they would keep every slot from the rest otherwise."""
    settings = {"repost_seconds": 0.1}
    with stacked(tmp_path, agent=settings, service={"runner": {"run": 8}}) as stack:
        await stack.start("rollouts", "agent")
        await drop(stack, "agent", [row(index, run="hang") for index in range(200)])
        check(await post(stack.url("agent"), [row(1000 + index) for index in range(300)]))
        assert set(stack.begun().values()) == {1}
        assert stack.descriptors("rollouts") < 100


@pytest.mark.release
async def test_five_thousand_at_once(tmp_path: Path):
    with stacked(tmp_path, agent={"repost_seconds": 0.1}, settings=AS_NEMO_RL) as stack:
        await stack.start()
        started = time.monotonic()
        check(await post(stack.url("relay"), [row(index) for index in range(5000)]))
        seconds = time.monotonic() - started
        peaks = {name: stack.peak(name) for name in stack.children}
        print(f"{5000 / seconds:.0f} rollouts/s, peak MiB: {peaks}")
        assert max(peaks.values()) < 700
        assert stack.descriptors("rollouts") < 100


@pytest.mark.release
async def test_cancels_do_not_queue_behind_thousands_that_wait(tmp_path: Path):
    """Gym's client has 1,024 connections for one host; a cancel must not wait for one of them."""
    with stacked(tmp_path, agent={"repost_seconds": 0.1}) as stack:
        await stack.start("rollouts", "agent")
        waiting = asyncio.create_task(post(stack.url("agent"), [row(index, run="hang") for index in range(4000)]))
        await stack.until_begun(1)
        await drop(stack, "agent", [row(9000 + index, run="hang") for index in range(300)])
        async with aiohttp.ClientSession() as session, session.get(stack.url("agent") + "/livez") as answer:
            assert answer.status == 200
        waiting.cancel()
        await asyncio.wait({waiting})
        started = time.monotonic()
        check(await asyncio.wait_for(post(stack.url("agent"), [row(20_000 + index) for index in range(50)]), 60))
        print(f"room again after {time.monotonic() - started:.1f} s")
