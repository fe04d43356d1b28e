import math

import pytest
from rollout_samples import segment

from prorl_gym.records import NOT_SAMPLED, Segment
from prorl_gym.trainers.mismatch import Mismatch, MismatchError, measure_mismatch, require_match

pytest.importorskip("numpy", reason="prorl-gym[trainers] is not installed in this environment")

SERVED = segment()  # mask 0 0 0 1 1 0 1 1, log-probs -0.5 and -0.25 for each turn
EQUAL = Mismatch(tokens=4, max_abs_diff=0.0, mean_abs_diff=0.0, kl=0.0, mult_prob_error=1.0, zeros=0)


def of_versions(*versions: int) -> Segment:
    """The sample segment, its sampled tokens labelled in turn."""
    left = iter(versions)
    return SERVED.model_copy(
        update={"policy_versions": [next(left) if sampled else NOT_SAMPLED for sampled in SERVED.mask]}
    )


def of_engine(name: str, served: Segment = SERVED) -> Segment:
    return served.model_copy(
        update={"generations": [call.model_copy(update={"engine": name}) for call in served.generations]}
    )


def shifted(by: float, *at: int) -> list[float]:
    """The served log-probs, all of them or some moved."""
    return [value + (by if not at or place in at else 0.0) for place, value in enumerate(SERVED.logprobs)]


def test_equal_log_probs_differ_by_nothing():
    found = measure_mismatch([SERVED], [SERVED.logprobs])
    assert (found.total, found.by_version, found.by_engine) == (EQUAL, {0: EQUAL}, {"e0": EQUAL})


def test_the_figures_are_those_of_their_formulas():
    found = measure_mismatch([SERVED], [shifted(-0.2, 4)]).total
    assert found.max_abs_diff == pytest.approx(0.2)
    assert found.mean_abs_diff == pytest.approx(0.05)
    assert found.kl == pytest.approx((math.exp(-0.2) + 0.2 - 1) / 4)
    assert found.mult_prob_error == pytest.approx((3 + math.exp(0.2)) / 4)


def test_each_version_has_figures_of_its_own():
    found = measure_mismatch([of_versions(3, 3, 3, 4), of_versions(4, 4, 4, 4)], [shifted(0.1, 7), shifted(0.0)])
    assert {version: one.tokens for version, one in found.by_version.items()} == {3: 3, 4: 5}
    assert [one.max_abs_diff for one in found.by_version.values()] == [0.0, pytest.approx(0.1)]


def test_each_position_has_figures_of_its_own():
    found = measure_mismatch([segment(turns=9)], [segment(turns=9).logprobs])
    tokens = {position: one.tokens for position, one in found.by_position.items()}
    turns = {"turn 1": 2, "turn 2": 2, "turn 3": 2, "turns 4-7": 8, "turns 8-15": 4}
    assert tokens == turns | {"first token": 9, "last token": 9} | {
        "quarter 1": 5,
        "quarter 2": 4,
        "quarter 3": 5,
        "quarter 4": 4,
    }
    late = measure_mismatch([SERVED], [shifted(0.1, 7)])
    assert {position for position, one in late.by_position.items() if one.max_abs_diff} == {
        *("turn 2", "last token", "quarter 4")
    }


def test_a_turn_of_one_token_begins_and_ends_with_it():
    one = SERVED.model_copy(update={"mask": [0, 0, 0, 0, 0, 0, 0, 1], "policy_versions": [-1] * 7 + [0]})
    assert set(measure_mismatch([one], [one.logprobs]).by_position) == {
        *("turn 1", "first token", "last token", "quarter 1")
    }


def test_a_single_token_in_a_large_batch_is_seen():
    others = [SERVED] * 500
    found = measure_mismatch([*others, SERVED], [*(one.logprobs for one in others), shifted(2e-3, 3)])
    assert found.total.kl < 1e-8
    with pytest.raises(MismatchError, match="differ by up to"):
        require_match(found, 1e-4)


def test_the_message_says_where_log_probs_differ_and_where_they_do_not():
    first, second = of_engine("good"), of_engine("stale", of_versions(1, 1, 1, 1))
    found = measure_mismatch([first, second], [first.logprobs, shifted(0.3, 6, 7)])
    with pytest.raises(MismatchError) as caught:
        require_match(found, 1e-4)
    assert caught.value.check == "mismatch"
    for said in ("version 1, not in 0", "turn 2", "not in turn 1", "engine stale, not in good"):
        assert said in caught.value.what


def test_log_probs_of_tokens_without_loss_are_not_read():
    own = [math.nan if not sampled else value for sampled, value in zip(SERVED.mask, SERVED.logprobs, strict=True)]
    require_match(measure_mismatch([SERVED], [own]), 1e-4)


def test_an_observation_that_carries_loss_is_named_even_where_the_log_probs_agree():
    everything = [0, 0, 0, 1, 1, 1, 1, 1]
    found = measure_mismatch([SERVED], [SERVED.logprobs], [everything])
    assert found.by_version[NOT_SAMPLED].tokens == 1
    assert sum(one.tokens for name, one in found.by_position.items() if name.startswith("turn")) == 4
    with pytest.raises(MismatchError, match="1 tokens that carry loss were not sampled") as caught:
        require_match(found, 1e-4)
    assert caught.value.check == "mask"


def test_tokens_that_the_trainer_leaves_out_do_not_count():
    found = measure_mismatch([SERVED, SERVED], [shifted(1.0), SERVED.logprobs], [[0] * 8, SERVED.mask])
    assert found.by_version == {0: EQUAL}


@pytest.mark.parametrize("wrong", [math.nan, -math.inf, 0.0])
def test_what_is_no_log_prob_of_the_token_does_not_pass(wrong: float):
    own = [wrong if place == 6 else value for place, value in enumerate(SERVED.logprobs)]
    with pytest.raises(MismatchError, match="version 0"):
        require_match(measure_mismatch([SERVED], [own]), 1e-4)


def test_a_served_log_prob_of_zero_is_found_without_any_bound():
    served = SERVED.model_copy(update={"logprobs": [0.0, 0.0, 0.0, -0.5, 0.0, 0.0, -0.5, -0.25]})
    found = measure_mismatch([served], [[*[0.0] * 3, -0.5, -0.02, 0.0, -0.5, -0.25]])
    with pytest.raises(MismatchError, match=r"1 of 4 served log-probs are exactly 0\.0") as caught:
        require_match(found)
    assert caught.value.check == "zero log-prob"
    require_match(measure_mismatch([served], [[*[0.0] * 3, -0.5, -1e-6, 0.0, -0.5, -0.25]]), 1e-4)


@pytest.mark.parametrize(
    "bounds", [{"max_abs_diff": 0.1}, {"max_kl": 0.004}, {"max_mult_prob_error": 1.05}, {"max_kl": 1.0}]
)
def test_each_figure_has_a_bound(bounds: dict[str, float]):
    found = measure_mismatch([SERVED], [shifted(0.2, 4)])  # KL 0.0054, factor 1.055
    if bounds == {"max_kl": 1.0}:
        require_match(found, **bounds)
        return
    with pytest.raises(MismatchError, match=next(iter(bounds)).removeprefix("max_")):
        require_match(found, **bounds)


def test_a_difference_at_the_bound_passes():
    found = measure_mismatch([SERVED], [shifted(2**-13, 4)])
    require_match(found, 2**-13)


def test_lists_of_another_length_are_refused():
    with pytest.raises(ValueError, match="segment 1 has 8 tokens"):
        measure_mismatch([SERVED, SERVED], [SERVED.logprobs, SERVED.logprobs[1:]])


def test_nothing_to_compare_is_no_mismatch():
    found = measure_mismatch([], [])
    assert (found.total.tokens, found.by_version, found.by_position, found.by_engine) == (0, {}, {}, {})
    require_match(found, 0.0)
