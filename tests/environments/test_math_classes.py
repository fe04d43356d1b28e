"""Pairs of the classes in which graders go wrong, both signs, in both orders."""

import pytest
from math_classes import DIFFERENT, EQUAL

from prorl_gym.environments.math.answer_equality import is_accepted, is_equal, is_readable


@pytest.mark.parametrize("name", EQUAL)
def test_right_answers_of_a_class_are_equal(name: str):
    wrong = [pair for pair in EQUAL[name] if not is_equal(*pair) or not is_equal(*reversed(pair))]
    assert wrong == []


@pytest.mark.parametrize("name", DIFFERENT)
def test_wrong_answers_of_a_class_differ(name: str):
    wrong = [pair for pair in DIFFERENT[name] if is_accepted(*pair) or is_accepted(*reversed(pair))]
    assert wrong == []


@pytest.mark.parametrize("name", EQUAL)
def test_gold_answers_of_a_class_are_readable(name: str):
    assert [gold for gold, _ in EQUAL[name] if not is_readable(gold)] == []


def test_each_class_has_both_signs():
    assert EQUAL.keys() == DIFFERENT.keys()
    assert all(len(pairs) >= 8 for pairs in (*EQUAL.values(), *DIFFERENT.values()))
