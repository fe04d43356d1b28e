"""Which rollout a posted row means (see ``posts.py``)."""

import asyncio

import pytest

from prorl_gym.errors import TaskError
from prorl_gym.gym_root.responses_api_agents.prorl_agent.posts import Posts
from prorl_gym.records import RolloutRequest
from prorl_gym.trainers.gym_rows import Groups, RowDefaults

ROW = {"environment": "math", "task": {"question": "2+2?"}, "_ng_task_index": 0, "_ng_rollout_index": 0}


class Abandoned:
    """Collects abandoned requests and says when the first is there."""

    def __init__(self) -> None:
        self.requests: list[RolloutRequest] = []
        self.happened = asyncio.Event()

    def __call__(self, request: RolloutRequest) -> None:
        self.requests.append(request)
        self.happened.set()


def make(nonce: str = "n1", patience: float = 60.0, abandoned: Abandoned | None = None) -> Posts:
    return Posts(nonce, RowDefaults(), Groups("run", size=4), patience, abandoned or Abandoned())


async def test_row_posted_again_after_a_drop_meets_its_rollout():
    posts = make()
    first = posts.claim(ROW)
    posts.caller_vanished(ROW, first)
    assert posts.claim(ROW) is first


async def test_dropped_rollout_is_met_once():
    posts = make()
    first = posts.claim(ROW)
    posts.caller_vanished(ROW, first)
    posts.claim(ROW)
    assert posts.claim(ROW).rollout_id != first.rollout_id


async def test_equal_row_while_the_first_caller_waits_is_a_new_rollout():
    posts = make()
    assert posts.claim(ROW).rollout_id != posts.claim(ROW).rollout_id


async def test_other_rollout_index_is_another_rollout():
    posts = make()
    posts.caller_vanished(ROW, posts.claim(ROW))
    assert posts.claim(ROW | {"_ng_rollout_index": 1}).replica == 1


async def test_another_process_never_meets_old_ids():
    assert make("n1").claim(ROW).rollout_id != make("n2").claim(ROW).rollout_id


async def test_rollout_that_nobody_claims_is_abandoned():
    abandoned = Abandoned()
    posts = make(patience=0.0, abandoned=abandoned)
    first = posts.claim(ROW)
    posts.caller_vanished(ROW, first)
    await asyncio.wait_for(abandoned.happened.wait(), 5)
    assert abandoned.requests == [first]
    assert posts.claim(ROW).rollout_id != first.rollout_id


async def test_claimed_rollout_is_not_abandoned():
    abandoned = Abandoned()
    posts = make(patience=0.0, abandoned=abandoned)
    posts.caller_vanished(ROW, posts.claim(ROW))
    posts.claim(ROW)
    await asyncio.sleep(0)  # the timer that must not fire would be due in this round
    assert not abandoned.requests


async def test_bad_row_is_refused():
    with pytest.raises(TaskError):
        make().claim({"task": {}})
