"""Each check names the link that is broken; the recipe's controls break the same links in sampled rollouts."""

import pytest
from rollout_samples import failed, rollout, segment

from prorl_gym.errors import FailureKind, Limit
from prorl_gym.records import Outcome, Retry, Rollout, Score
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.trainers.checks import (
    CheckError,
    check_advantages,
    check_gradient,
    check_history,
    check_moved,
    expected_advantages,
    normalize_group,
)

np = pytest.importorskip("numpy", reason="prorl-gym[trainers] is not installed in this environment")


def member(replica: int, reward: float | None, **changes: object) -> Rollout:
    fields = {"rollout_id": f"r{replica}", "group_id": "g", "group_size": 4, "replica": replica, **changes}
    return failed(**fields) if reward is None else rollout(score=Score(reward=reward), **fields)


GROUP = [member(0, 1.0), member(1, 0.0), member(2, 0.0), member(3, 0.0)]
BROKEN = [member(0, 1.0), member(1, 0.0), member(2, 0.0), member(3, None)]


def test_advantages_follow_from_the_members_with_a_reward():
    found = expected_advantages(BROKEN)
    assert list(found) == ["r0", "r1", "r2"]
    assert [*found.values()] == pytest.approx(normalize_group([1.0, 0.0, 0.0]))
    assert normalize_group([1.0, 0.0, 0.0])[0] == pytest.approx((2 / 3) / (2**0.5 / 3 + 1e-4))


def test_a_masked_member_counts_and_has_no_advantage():
    settings = resolve_settings(RolloutSettings(mask_overlong=(Limit.TOKENS,)))
    overlong = member(3, 0.0, outcome=Outcome(status="truncated", limit=Limit.TOKENS), settings=settings)
    found = expected_advantages([*GROUP[:3], overlong])
    assert found == dict(list(expected_advantages(GROUP).items())[:3])


@pytest.mark.parametrize("group", [GROUP, BROKEN])
def test_right_advantages_pass(group: list[Rollout]):
    check_advantages([group], expected_advantages(group))
    check_advantages([group], {})  # a group that was dropped


def test_another_rule_may_be_given():
    def without_deviation(rewards):
        return [reward - sum(rewards) / len(rewards) for reward in rewards]

    found = expected_advantages(GROUP, without_deviation)
    check_advantages([GROUP], found, without_deviation)
    with pytest.raises(CheckError, match="advantages: those of r0"):
        check_advantages([GROUP], found)


def test_rewards_of_other_members_are_found():
    values = normalize_group([0.0, 1.0, 0.0, 0.0])
    with pytest.raises(CheckError, match="advantages: those of r0 do not follow from the rewards") as caught:
        check_advantages([GROUP], dict(zip(("r0", "r1", "r2", "r3"), values, strict=True)))
    assert caught.value.check == "advantages"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("r0", "r1", "r2", "r3"), "r3 has no reward and carries loss"),
        (("r0", "r1", "r2"), "mean and deviation of g count 1 rollouts without a reward as 0"),
    ],
)
def test_a_failure_that_counts_as_0_is_found(rows: tuple[str, ...], message: str):
    values = normalize_group([1.0, 0.0, 0.0, 0.0])
    with pytest.raises(CheckError, match=f"failures: {message}") as caught:
        check_advantages([BROKEN], dict(zip(rows, values, strict=False)))
    assert caught.value.check == "failures"


def test_histories_that_are_not_one_are_found():
    check_history([GROUP, BROKEN])
    other = member(1, 0.0, segments=[segment(prompt=[1, 2, 9])])
    with pytest.raises(CheckError, match="history: the rollouts of g have 2 different prompts"):
        check_history([[GROUP[0], other]])
    retry = Retry(attempt=0, kind=FailureKind.INTERNAL, stage="run", message="drift")
    with pytest.raises(CheckError, match="history: the service made r1 again"):
        check_history([[GROUP[0], member(1, 0.0, retries=[retry])]])


# --- the gradient ---------------------------------------------------------------------------------------------------

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
ROWS = [(one, one.segments[0]) for one in GROUP]
ADVANTAGES = expected_advantages(GROUP)


def right_gradient(logprobs):
    """Of the clipped token-level mean, written out for two turns of two tokens in each of four rows."""
    rows = []
    for (one, served), own in zip(ROWS, logprobs, strict=True):
        advantage, row = ADVANTAGES[one.rollout_id], np.zeros(len(own))
        for place in (3, 4, 6, 7):
            ratio = np.exp(own[place] - served.logprobs[place])
            cut = ratio > 1.28 if advantage > 0 else ratio < 0.8
            row[place] = 0.0 if cut else -advantage * ratio / 16
        rows.append(row)
    return rows


def own_logprobs(*moved: tuple[int, int, float]):
    found = [np.array([*served.logprobs, 0.0, 0.0]) for _, served in ROWS]  # padded by two
    for row, place, by in moved:
        found[row][place] += by
    return found


def test_the_right_gradient_passes_with_clipped_tokens():
    logprobs = own_logprobs((0, 3, 0.5), (1, 4, -0.5), (2, 6, 0.1))
    check_gradient(ROWS, ADVANTAGES, logprobs, right_gradient(logprobs), **CLIP)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: np.roll(row, 1), "mask: 2 tokens of r0 carry loss and were not sampled .the first at position 5"),
        (lambda row: row * (np.arange(10) != 7), "mask: 1 sampled tokens of r0 carry no loss"),
        (lambda row: -row, "gradient: that of r0 does not follow"),
        (lambda row: row * 2, "gradient: that of r0"),
    ],
)
def test_a_gradient_of_another_loss_is_named(change, message: str):
    logprobs = own_logprobs()
    gradients = right_gradient(logprobs)
    with pytest.raises(CheckError, match=message):
        check_gradient(ROWS, ADVANTAGES, logprobs, [change(gradients[0]), *gradients[1:]], **CLIP)


def test_an_update_has_to_move_something_and_stay_finite():
    before = [np.ones(3), np.ones((2, 2))]
    check_moved(before, [np.ones(3), np.eye(2)])
    with pytest.raises(CheckError, match="learning rate: the update moved no weight"):
        check_moved(before, [one.copy() for one in before])
    with pytest.raises(CheckError, match=r"weights: .* not finite"):
        check_moved(before, [np.array([1.0, np.nan, 1.0]), np.eye(2)])
