"""Which engines hold the wrong weights, told from their log-probs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_gym.inference.weights.weight_check import (
    find_invalid_engines,
    has_moved,
    make_probe_token_ids,
    mean_distance,
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


def test_who_is_far_from_the_trainer_is_named():
    found = find_invalid_engines({"a": shifted(0.02), "b": shifted(0.5)}, {}, reference_logprobs=OLD)
    assert found == {"b": "its log-probs are 0.5 nats away from the trainer (tolerance 0.1)"}


def test_who_is_far_from_the_fleet_is_named():
    found = find_invalid_engines({"a": shifted(0.02), "b": shifted(-0.02), "c": shifted(1.3)}, {})
    assert found == {"c": "its log-probs are 1.28 nats away from the other engines (tolerance 0.1)"}


TINY_STEP = [shifted(by) for by in (0.01, -0.01, 0.0)], [shifted(by) for by in (0.0103, -0.0097, 0.0)]


@pytest.mark.parametrize(
    ("before", "now", "reference", "invalid"),
    [
        ([OLD, OLD], [shifted(0.4), OLD], None, "b"),
        (*TINY_STEP, None, "c"),
        (*TINY_STEP, shifted(0.0003), "c"),
        ([OLD, shifted(0.4)], [shifted(0.4), shifted(0.4)], shifted(0.4), ""),
        ([OLD, shifted(0.4)], [shifted(0.4), shifted(0.4)], None, "b"),
        ([OLD] * 4, [shifted(0.3), shifted(0.3), shifted(0.3), OLD], None, "d"),
        ([OLD] * 4, [shifted(0.3), OLD, OLD, OLD], None, "bcd"),
        ([OLD] * 3, [shifted(0.001), shifted(0.001), shifted(9.0)], None, "c"),
        ([OLD, OLD], [OLD, OLD], None, ""),
        ([OLD], [OLD], None, ""),
        ([], [], None, ""),
        ([], [[float("nan")] * 3], OLD, "a"),
    ],
    ids=[
        "of two the one that did not move",
        "a step smaller than any tolerance",
        "the same, with a reference",
        "who had the new weights before the update, as the trainer shows",
        "the same, without a reference that shows it",
        "the majority decides which weights are right",
        "who did not move at all, even in the majority",
        "one that breaks does not make the others stale",
        "a fleet that did not move",
        "one alone has no engine to disagree with",
        "no engine",
        "no number is no agreement",
    ],
)
def test_which_engines_hold_other_weights(
    before: list[list[float]], now: list[list[float]], reference: list[float] | None, invalid: str
):
    states = [dict(zip("abcd", fingerprints, strict=False)) for fingerprints in (now, before)]
    assert sorted(find_invalid_engines(*states, reference_logprobs=reference)) == list(invalid)


def test_two_that_both_moved_and_disagree_are_both_refused():
    found = find_invalid_engines({"a": shifted(0.4), "b": shifted(-0.4)}, {"a": OLD, "b": OLD})
    assert sorted(found) == ["a", "b"]
    assert "no reference that shows which one is right" in found["a"]


def test_an_engine_has_moved_if_its_log_probs_have_changed_at_all():
    assert not has_moved(OLD, OLD)
    assert has_moved(shifted(0.001), OLD)
