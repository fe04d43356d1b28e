"""Servers killed under way, with the rest as Gym starts it: no row is lost, answered twice or made again. Slow."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gym_stack import post, row, stacked

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(200)]

import gym_needed  # noqa: E402, F401

QUICK, GATED = 20, 4
ROWS = [row(index) for index in range(QUICK)] + [row(100 + index, run="gate") for index in range(GATED)]


def kept(folder: Path) -> dict[str, Any]:
    return {"ledger": {"path": str(folder / "ledger.sqlite")}}


def ids(answers: list[tuple[int, dict[str, Any]]]) -> dict[tuple[int, int], str]:
    assert {status for status, _ in answers} == {200}
    return {(one["_ng_task_index"], one["_ng_rollout_index"]): one["prorl_rollout_id"] for _, one in answers}


async def test_killed_agent_is_met_again_by_gym_s_own_repeats(tmp_path: Path):
    """Gym's client posts a row again, without end, when the connection to the agent drops before an answer begins.

    One that drops within an answer is a 500 of Gym's, so that nothing is being answered here when the agent is killed.
    """
    with stacked(tmp_path) as stack:
        await stack.start()
        first = ids(await post(stack.url("relay"), ROWS[:QUICK]))
        answers = asyncio.create_task(post(stack.url("relay"), ROWS[QUICK:]))
        await stack.until_begun(len(ROWS))
        stack.kill("agent")
        await stack.start("agent")
        stack.open_gate()
        assert len(first | ids(await answers)) == len(ROWS)
        assert set(stack.begun().values()) == {1}


async def test_rows_that_a_killed_client_left_meet_their_rollouts(tmp_path: Path):
    with stacked(tmp_path) as stack:
        await stack.start()
        waiting = asyncio.create_task(post(stack.url("relay"), ROWS[QUICK:]))
        first = ids(await post(stack.url("relay"), ROWS[:QUICK]))
        await stack.until_begun(len(ROWS))
        waiting.cancel()
        await asyncio.wait({waiting})
        stack.open_gate()
        second = ids(await post(stack.url("relay"), ROWS[QUICK:]))
        assert len(first | second) == len(ROWS)
        assert set(stack.begun().values()) == {1}


async def test_killed_rollout_server_takes_up_what_its_ledger_has(tmp_path: Path):
    """What had its record is answered with it; what was at work is begun anew, once, as after any restart."""
    with stacked(tmp_path, service=kept(tmp_path)) as stack:
        await stack.start()
        answers = asyncio.create_task(post(stack.url("agent"), ROWS))
        await stack.until_begun(len(ROWS))
        stack.kill("rollouts")
        stack.open_gate()
        await stack.start("rollouts")
        assert len(ids(await answers)) == len(ROWS)
        assert max(stack.begun().values()) <= 2


async def test_everything_killed_and_the_rest_of_the_rows_posted_again(tmp_path: Path):
    """``gym eval run --resume`` after all of Gym died: it posts the rows without a result."""
    with stacked(tmp_path, service=kept(tmp_path)) as stack:
        await stack.start()
        waiting = asyncio.create_task(post(stack.url("relay"), ROWS[QUICK:]))
        half = ids(await post(stack.url("relay"), ROWS[: QUICK // 2]))
        # The record of a rollout that ends while the agent is dead must be kept.
        late = asyncio.create_task(post(stack.url("relay"), ROWS[QUICK // 2 : QUICK]))
        await stack.until_begun(len(ROWS))
        await stack.until_acknowledged(half.values())  # until then they count as not delivered
        stack.stop()
        for task in (waiting, late):
            task.cancel()
        await asyncio.wait({waiting, late})
        before = stack.begun()
        stack.open_gate()
        await stack.start()
        rest = ids(await post(stack.url("relay"), ROWS[QUICK // 2 :]))
        assert len(half | rest) == len(ROWS)
        again = stack.begun() - before
        assert not {f"t{index}-0" for index in range(QUICK // 2)} & again.keys()
        assert max(stack.begun().values()) <= 2
        # The same rows once more are another evaluation: new rollouts, since the first were delivered.
        more = ids(await post(stack.url("relay"), ROWS[:QUICK]))
        assert not set(more.values()) & set((half | rest).values())
