"""The math grader on its labelled corpora: no false positive, and hardly a false negative.

The unseen half was written by someone who had not seen the grader, and most of the outside ones comes from the tests of
published packages. What the grader said at first sight is in the README of ``environments/prorl_math``.
"""

from collections import Counter
from pathlib import Path

import pytest
from grader_corpus import MathExample, MathPair, count_confusion, extract_answer, read_corpus

from prorl_gym.environments.math.answer_equality import is_accepted, is_equal

CORPORA = Path(__file__).parents[1] / "corpora"
HALVES = ("seen", "unseen")
OUTSIDE = ("outside_seen", "outside_unseen")

PAIRS = read_corpus(CORPORA / "math_classes.jsonl", MathPair)
"""Pairs of the classes in which graders go wrong, both signs."""
CLASSES = sorted({pair.why for pair in PAIRS})


@pytest.fixture(scope="module", params=(*HALVES, *OUTSIDE))
def half(request: pytest.FixtureRequest) -> list[MathExample]:
    return read_corpus(CORPORA / f"math_{request.param}.jsonl", MathExample)


def verdict(pair: MathExample) -> bool:
    answer = extract_answer(pair)
    return answer is not None and is_accepted(pair.gold, answer)


def ids(pairs: list[MathExample]) -> list[str]:
    return [f"{pair.id}: {pair.gold} / {extract_answer(pair)} ({pair.why})" for pair in pairs]


def test_verdicts_are_the_labels(half: list[MathExample]):
    assert min(Counter(pair.correct for pair in half).values()) >= 150
    found = count_confusion(half, [verdict(pair) for pair in half])
    assert ids(found.false_positives) == []
    assert found.false_negative_rate <= 0.01, ids(found.false_negatives)


@pytest.mark.slow
def test_equality_is_symmetric(half: list[MathExample]):
    answers = [(pair.gold, answer) for pair in half if (answer := extract_answer(pair)) is not None]
    assert [pair for pair in answers if is_equal(*pair) != is_equal(*reversed(pair))] == []


def test_every_gold_answer_equals_itself(half: list[MathExample]):
    no_value = {r"\frac{0}{0}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"}  # a determinant is to be computed
    assert [pair.id for pair in half if not is_accepted(pair.gold, pair.gold) and pair.gold not in no_value] == []


def is_joined(pair: MathPair) -> bool:
    """Return whether a pair counts as the same answer in any way."""
    if is_equal(pair.gold, pair.answer) or is_equal(pair.answer, pair.gold) or is_accepted(pair.gold, pair.answer):
        return True
    return is_accepted(pair.answer, pair.gold) and not pair.one_way


@pytest.mark.parametrize("why", CLASSES)
def test_right_answers_of_a_class_are_equal(why: str):
    right = [pair for pair in PAIRS if pair.why == why and pair.correct]
    assert len(right) >= 8
    wrong = [pair for pair in right if not is_equal(pair.gold, pair.answer) or not is_equal(pair.answer, pair.gold)]
    assert wrong == []


@pytest.mark.parametrize("why", CLASSES)
def test_wrong_answers_of_a_class_differ(why: str):
    pairs = [pair for pair in PAIRS if pair.why == why and not pair.correct]
    assert len(pairs) >= 8
    assert [pair for pair in pairs if is_joined(pair)] == []
