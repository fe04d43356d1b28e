"""Which engines hold the wrong weights, told from their log-probs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.inference.weights.weight_check import (
    find_invalid_engines,
    find_stale_engines,
    has_moved,
    make_probe_token_ids,
    mean_distance,
    median_fingerprint,
)

OLD = [-1.0, -2.0, -3.0]


def shifted(by: float) -> list[float]:
    return [value + by for value in OLD]


@given(st.integers(1, 300_000))
def test_the_prompt_is_fixed_and_inside_the_vocabulary(size: int):
    ids = make_probe_token_ids(size)
    assert ids == make_probe_token_ids(size)
    assert len(ids) == 48
    assert all(0 <= token < size for token in ids)


def test_the_prompt_uses_the_whole_vocabulary():
    assert max(make_probe_token_ids(150_000)) > 120_000
    assert len(set(make_probe_token_ids(150_000))) == 48


def test_distance_is_a_mean():
    assert mean_distance([-1.0, -2.0], [-1.5, -2.0]) == 0.25
    with pytest.raises(ValueError, match="zip"):
        mean_distance([-1.0], [-1.0, -2.0])


def test_the_median_ignores_one_that_is_far_off():
    assert median_fingerprint([[-1.0], [-1.2], [-9.0]]) == [-1.2]


def test_who_is_far_from_the_trainer_is_named():
    found = find_invalid_engines({"a": shifted(0.02), "b": shifted(0.5)}, {}, reference_logprobs=OLD)
    assert found == {"b": "its log-probs are 0.5 nats away from the trainer (tolerance 0.1)"}


def test_who_is_far_from_the_fleet_is_named():
    found = find_invalid_engines({"a": shifted(0.02), "b": shifted(-0.02), "c": shifted(1.3)}, {})
    assert found == {"c": "its log-probs are 1.28 nats away from the other engines (tolerance 0.1)"}


def test_of_two_the_one_that_did_not_move_is_stale():
    before = {"a": OLD, "b": OLD}
    assert list(find_invalid_engines({"a": shifted(0.4), "b": OLD}, before)) == ["b"]


def test_a_step_smaller_than_any_tolerance_shows_who_is_stale():
    before = {"a": shifted(0.01), "b": shifted(-0.01), "c": OLD}
    now = {"a": shifted(0.0103), "b": shifted(-0.0097), "c": OLD}
    assert list(find_invalid_engines(now, before)) == ["c"]
    assert list(find_invalid_engines(now, before, reference_logprobs=shifted(0.0003))) == ["c"]


def test_who_had_the_new_weights_before_the_update_is_not_stale():
    before = {"a": OLD, "b": shifted(0.4)}
    now = {"a": shifted(0.4), "b": shifted(0.4)}
    assert find_invalid_engines(now, before, reference_logprobs=shifted(0.4)) == {}
    assert list(find_invalid_engines(now, before)) == ["b"]


def test_two_that_both_moved_and_disagree_are_both_refused():
    found = find_invalid_engines({"a": shifted(0.4), "b": shifted(-0.4)}, {"a": OLD, "b": OLD})
    assert sorted(found) == ["a", "b"]
    assert "no reference that shows which one is right" in found["a"]


def test_a_fleet_that_did_not_move_is_not_stale():
    same = {"a": OLD, "b": OLD}
    assert find_stale_engines(same, same) == {}
    assert find_invalid_engines(same, same) == {}
    assert not has_moved(OLD, OLD)
    assert has_moved(shifted(0.001), OLD)


def test_one_alone_has_no_engine_to_disagree_with():
    assert find_invalid_engines({"a": OLD}, {"a": OLD}) == {}
    assert find_invalid_engines({}, {}) == {}


def test_the_majority_decides_which_weights_are_right():
    before = dict.fromkeys("abcd", OLD)
    now = {"a": shifted(0.3), "b": shifted(0.3), "c": shifted(0.3), "d": OLD}
    assert list(find_invalid_engines(now, before)) == ["d"]


def test_who_did_not_move_at_all_is_stale_even_in_the_majority():
    before = dict.fromkeys("abcd", OLD)
    now = {"a": shifted(0.3), "b": OLD, "c": OLD, "d": OLD}
    assert sorted(find_invalid_engines(now, before)) == ["b", "c", "d"]


def test_one_that_breaks_does_not_make_the_others_stale():
    before = dict.fromkeys("abc", OLD)
    now = {"a": shifted(0.001), "b": shifted(0.001), "c": shifted(9.0)}
    assert list(find_invalid_engines(now, before)) == ["c"]


def test_no_number_is_no_agreement():
    assert list(find_invalid_engines({"a": [float("nan")] * 3}, {}, reference_logprobs=OLD)) == ["a"]
