import math

import pytest
from rollout_samples import segment

from prorl_gym.records import NOT_SAMPLED, Segment
from prorl_gym.trainers.mismatch import Mismatch, MismatchError, mismatch_by_version, require_match

pytest.importorskip("numpy", reason="prorl-gym[trainers] is not installed in this environment")

SERVED = segment()  # mask 0 0 0 1 1 0 1 1, log-probs -0.5 and -0.25 for each turn


def of_versions(*versions: int) -> Segment:
    """The sample segment, its sampled tokens labelled in turn."""
    left = iter(versions)
    return SERVED.model_copy(
        update={"policy_versions": [next(left) if sampled else NOT_SAMPLED for sampled in SERVED.mask]}
    )


def shifted(by: float, at: int | None = None) -> list[float]:
    """The served log-probs, all of them or one moved."""
    return [value + (by if at in (None, place) else 0.0) for place, value in enumerate(SERVED.logprobs)]


def test_equal_log_probs_differ_by_nothing():
    assert mismatch_by_version([SERVED], [SERVED.logprobs]) == {0: Mismatch(4, 0.0, 0.0, 1.0)}


def test_the_figures_are_those_of_their_formulas():
    found = mismatch_by_version([SERVED], [shifted(-0.2, at=4)])[0]
    assert found.max_abs_diff == pytest.approx(0.2)
    assert found.kl == pytest.approx((math.exp(-0.2) + 0.2 - 1) / 4)
    assert found.mult_prob_error == pytest.approx((3 + math.exp(0.2)) / 4)


def test_each_version_has_figures_of_its_own():
    found = mismatch_by_version([of_versions(3, 3, 3, 4), of_versions(4, 4, 4, 4)], [shifted(0.1, at=7), shifted(0.0)])
    assert {version: one.tokens for version, one in found.items()} == {3: 3, 4: 5}
    assert (found[3].max_abs_diff, found[4].max_abs_diff) == (0.0, pytest.approx(0.1))


def test_a_single_token_in_a_large_batch_is_seen():
    others = [SERVED] * 500
    found = mismatch_by_version([*others, SERVED], [*(one.logprobs for one in others), shifted(2e-3, at=3)])
    assert found[0].kl < 1e-8
    with pytest.raises(MismatchError, match="differ by up to"):
        require_match(found, 1e-4)


def test_log_probs_of_tokens_without_loss_are_not_read():
    own = [math.nan if not sampled else value for sampled, value in zip(SERVED.mask, SERVED.logprobs, strict=True)]
    require_match(mismatch_by_version([SERVED], [own]), 1e-4)


def test_an_observation_that_carries_loss_is_named_even_where_the_log_probs_agree():
    everything = [0, 0, 0, 1, 1, 1, 1, 1]
    found = mismatch_by_version([SERVED], [SERVED.logprobs], [everything])
    assert found[NOT_SAMPLED].tokens == 1
    with pytest.raises(MismatchError, match="1 tokens that carry loss were not sampled"):
        require_match(found, 1e-4)


def test_a_mask_that_is_shifted_is_seen():
    found = mismatch_by_version([SERVED], [SERVED.logprobs], [[0, *SERVED.mask[:-1]]])
    with pytest.raises(MismatchError, match="not sampled"):
        require_match(found, 1e-4)


def test_tokens_that_the_trainer_leaves_out_do_not_count():
    found = mismatch_by_version([SERVED, SERVED], [shifted(1.0), SERVED.logprobs], [[0] * 8, SERVED.mask])
    assert found == {0: Mismatch(4, 0.0, 0.0, 1.0)}


@pytest.mark.parametrize("wrong", [math.nan, -math.inf, 0.0])
def test_what_is_no_log_prob_of_the_token_does_not_pass(wrong: float):
    own = [wrong if place == 6 else value for place, value in enumerate(SERVED.logprobs)]
    with pytest.raises(MismatchError, match="version 0"):
        require_match(mismatch_by_version([SERVED], [own]), 1e-4)


def test_a_difference_at_the_bound_passes():
    require_match({7: Mismatch(1, 1e-4, 0.0, 1.0)}, 1e-4)


def test_lists_of_another_length_are_refused():
    with pytest.raises(ValueError, match="segment 1 has 8 tokens"):
        mismatch_by_version([SERVED, SERVED], [SERVED.logprobs, SERVED.logprobs[1:]])


def test_nothing_to_compare_is_no_mismatch():
    assert mismatch_by_version([], []) == {}
