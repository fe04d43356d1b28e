"""Early stop of groups whose rows must all come back."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_samples import rollout

from prorl_gym.errors import CancelReason
from prorl_gym.gym_root.responses_api_agents.prorl_rollout_agent.step_early_stop import EarlyStopConfig, StepEarlyStop
from prorl_gym.records import Outcome, Rollout, RolloutRequest, Score


class Step:
    """Rows of groups ``0``, ``1``, ... and the callbacks about them."""

    def __init__(self, size: int = 2, **config: Any) -> None:
        self.size = size
        self.cancelled: set[str] = set()
        self.rounds = StepEarlyStop(EarlyStopConfig(**{"informative_groups": 1, **config}), self.cancelled.update)
        self.verdicts: dict[str, asyncio.Task[Any]] = {}

    def request(self, group: int, replica: int, **changes: Any) -> RolloutRequest:
        fields = {"group_id": f"g{group}", "group_size": self.size, "replica": replica} | changes
        return RolloutRequest(rollout_id=f"{group}.{replica}", environment="e", task={}, **fields)

    def add_rows(self, *groups: int) -> None:
        for group in groups:
            for replica in range(self.size):
                self.rounds.add_row(self.request(group, replica))

    async def end(self, group: int, replica: int, reward: float | None = 0.0, **changes: Any) -> None:
        """A rollout ended; its row waits for its verdict."""
        request = self.request(group, replica, **changes)
        self.verdicts[request.rollout_id] = asyncio.create_task(self._wait(request, record(request, reward)))
        await asyncio.sleep(0)

    async def _wait(self, request: RolloutRequest, ended: Rollout) -> str:
        verdict = await self.rounds.wait_settled(request, ended)
        self.rounds.remove_row(request)
        return verdict

    async def answered(self) -> dict[str, str]:
        for _ in range(5):
            await asyncio.sleep(0)
        return {name: task.result() for name, task in self.verdicts.items() if task.done()}


def record(request: RolloutRequest, reward: float | None) -> Rollout:
    named = ("rollout_id", "run_id", "group_id", "group_size", "replica", "evaluation")
    changes: dict[str, Any] = {name: getattr(request, name) for name in named}
    if reward is None:
        changes |= {"outcome": Outcome(status="cancelled", reason=CancelReason.REDUNDANT), "score": None}
    else:
        changes["score"] = Score(reward=reward)
    return rollout(**changes)


async def test_enough_informative_groups_stop_the_rest():
    """Until then the rows of a group that has not ended are held."""
    one = Step()
    one.add_rows(0, 1)
    await one.end(1, 0, 1.0)
    await one.end(0, 0, 0.0)
    assert await one.answered() == {}
    await one.end(0, 1, 1.0)
    assert one.cancelled == {"1.1"}
    assert await one.answered() == {"0.0": "own", "0.1": "own", "1.0": "stopped"}


@pytest.mark.parametrize("first", [1.0, None], ids=["equal", "masked"])
async def test_equal_or_masked_rewards_make_no_group_informative(first: float | None):
    one = Step()
    one.add_rows(0, 1)
    await one.end(0, 0, first)
    await one.end(0, 1, 1.0)
    assert not one.cancelled


async def test_spare_groups_are_completed_first():
    one = Step(spare=1)
    one.add_rows(0, 1, 2)
    for group in (0, 1):
        assert not one.cancelled
        await one.end(group, 0, 0.0)
        await one.end(group, 1, 1.0)
    assert one.cancelled == {"2.0", "2.1"}


async def test_old_groups_are_finished():
    one = Step(age_seconds=0.001)
    one.add_rows(0, 1)
    await asyncio.sleep(0.02)
    await one.end(0, 0, 0.0)
    await one.end(0, 1, 1.0)
    assert not one.cancelled


async def test_group_that_comes_when_there_are_enough_is_not_begun():
    one = Step()
    one.add_rows(0, 1)
    await one.end(0, 0, 0.0)
    await one.end(0, 1, 1.0)
    one.add_rows(2)
    assert {"2.0", "2.1"} <= one.cancelled


async def test_next_round_begins_when_every_row_is_answered():
    one = Step()
    one.add_rows(0, 1)
    for group, replica, reward in ((0, 0, 0.0), (0, 1, 1.0), (1, 0, None), (1, 1, None)):
        await one.end(group, replica, reward)
    assert len(await one.answered()) == 4
    one.add_rows(5)
    assert one.rounds.informative_groups == 0
    assert one.cancelled == {"1.0", "1.1"}


@pytest.mark.parametrize("posted", [1, 2], ids=["posted alone", "whose sibling's caller left"])
async def test_row_of_an_incomplete_group_is_answered_when_that_is_old(posted: int):
    one = Step(age_seconds=0.01)
    for replica in range(posted):
        one.rounds.add_row(one.request(0, replica))
    await one.end(0, 0, 1.0)
    assert await one.answered() == {}
    if posted == 2:
        one.rounds.remove_row(one.request(0, 1))
    assert await asyncio.wait_for(one.verdicts["0.0"], 5) == "own"


@pytest.mark.parametrize("changes", [{"evaluation": True}, {"group_id": None, "group_size": 1}])
async def test_evaluation_and_rows_without_a_group_are_not_held(changes: dict[str, Any]):
    one = Step()
    one.rounds.add_row(one.request(0, 0, **changes))
    await one.end(0, 0, 1.0, **changes)
    assert await one.answered() == {"0.0": "own"}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_of_a_group_always_share_their_verdict(data: st.DataObject):
    """Whatever the order, all rows are answered in the end, and a group comes back as one."""
    size, groups = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 4))
    order = data.draw(st.permutations([(group, replica) for group in range(groups) for replica in range(size)]))
    rewards = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(order), max_size=len(order)))

    async def play() -> dict[str, str]:
        one = Step(size, informative_groups=data.draw(st.integers(1, 3)))
        one.add_rows(*range(groups))
        for (group, replica), reward in zip(order, rewards, strict=True):
            await one.end(group, replica, None if f"{group}.{replica}" in one.cancelled else reward)
        return await one.answered()

    answered = asyncio.run(play())
    assert len(answered) == size * groups
    for group in range(groups):
        assert len({answered[f"{group}.{replica}"] for replica in range(size)}) == 1
