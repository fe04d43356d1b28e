"""pass@k: the estimator against counting all draws, and what is left out."""

import json
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_records import record

from prorl_gym.errors import CancelReason, FailureKind, Limit
from prorl_gym.records import Outcome, Rollout, Score
from prorl_gym.trainers.evaluation import Evaluation, pass_at_k, summarize, wilson_interval


@given(st.data())
def test_the_estimate_is_the_share_of_draws_that_hold_a_solution(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 9))
    solved = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    draws = list(combinations([True] * solved + [False] * (samples - solved), k))
    assert pass_at_k(samples, solved, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(("samples", "solved", "k"), [(3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0), (0, 0, 1)])
def test_what_is_not_defined_is_refused(samples: int, solved: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(samples, solved, k)


@given(st.floats(0, 1), st.integers(1, 10_000))
def test_the_interval_holds_the_value_and_shrinks(mean: float, count: int) -> None:
    low, high = wilson_interval(mean, count)
    assert 0.0 <= low <= mean <= high <= 1.0
    assert high - low > 0.0
    more = wilson_interval(mean, 4 * count)
    assert more[1] - more[0] <= high - low + 1e-12


def test_the_interval_is_wilsons() -> None:
    assert wilson_interval(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)  # as published tables have it
    assert wilson_interval(1.0, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)


def rollout(reward: float | None, **outcome: Any) -> Rollout:
    score = None if reward is None else Score(reward=reward)
    return record("r", Outcome(**(outcome or {"status": "completed"})), score=score)


def test_infrastructure_failures_are_left_out_and_counted() -> None:
    found = Evaluation()
    for reward in (1.0, 0.0, 0.0, 0.9):
        found.add_sample("a", rollout(reward))
    found.add_sample("a", rollout(None, status="failed", kind=FailureKind.SANDBOX_LOST))
    found.add_sample("b", rollout(1.0, status="truncated", limit=Limit.TURNS))
    found.add_sample("b", rollout(0.0, status="failed", kind=FailureKind.SANDBOX_LIMIT))
    found.add_sample("b", rollout(None, status="cancelled", reason=CancelReason.CLIENT))
    assert found.samples == 6
    assert found.excluded == {"failed(sandbox_lost)": 1, "cancelled(client)": 1}
    assert found.first_messages.keys() == found.excluded.keys()
    one, four = found.pass_at(1), found.pass_at(4)
    assert one is not None and (one.value, one.rows) == (pytest.approx((0.25 + 0.5) / 2), 2)
    assert four is not None and (four.value, four.rows) == (1.0, 1)
    assert found.pass_at(5) is None
    assert found.mean_reward == pytest.approx(2.9 / 6)
    assert json.loads(json.dumps(summarize(found, [1, 4, 5])))["by_row"]["b"] == {
        "samples": 2,
        "solved": 1,
        "excluded": 1,
    }


def test_the_threshold_defines_what_solved_means() -> None:
    found = Evaluation(threshold=0.5)
    for reward in (0.5, 0.4):
        found.add_sample("a", rollout(reward))
    one = found.pass_at(1)
    assert one is not None and one.value == 0.5


def test_nothing_measured_is_no_figure() -> None:
    found = Evaluation()
    found.add_sample("a", rollout(None, status="failed", kind=FailureKind.ENGINE_TIMEOUT))
    assert (found.pass_at(1), found.mean_reward) == (None, None)
    assert summarize(found, [1])["pass_at"] == {}
