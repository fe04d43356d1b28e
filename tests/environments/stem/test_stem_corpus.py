"""The labelled corpora of STEM answers: no wrong answer is rewarded, and hardly a right one is not."""

import asyncio
from pathlib import Path

import pytest
from grader_corpus import StemExample, count_confusion, is_right_by_rules, read_corpus
from stem_support import GRADER

FOLDER = Path(__file__).parents[2] / "corpora"
HALVES = ("seen", "unseen")


def pairs(name: str) -> list[StemExample]:
    return read_corpus(FOLDER / f"stem_{name}.jsonl", StemExample)


PAIRS = pairs("classes")
"""Answers of the classes that a grader gets wrong, with both signs; none of them may be misjudged."""
CLASSES = sorted({pair.why for pair in PAIRS})


@pytest.mark.parametrize("half", [*HALVES, "outside_seen", "outside_unseen"])
def test_no_false_positive_and_hardly_a_false_negative(half: str):
    async def verdicts() -> list[bool]:
        return [await is_right_by_rules(pair, GRADER) for pair in pairs(half)]

    found = count_confusion(pairs(half), asyncio.run(verdicts()))
    assert [(pair.id, pair.response) for pair in found.false_positives] == []
    assert found.false_negative_rate <= 0.01, [(pair.id, pair.response) for pair in found.false_negatives]


async def misjudged(why: str, *, correct: bool) -> list[tuple[str, str]]:
    signed = [pair for pair in PAIRS if pair.why == why and pair.correct == correct]
    return [(pair.row["answer"], pair.response) for pair in signed if await is_right_by_rules(pair, GRADER) != correct]


@pytest.mark.parametrize("why", CLASSES)
def test_no_wrong_answer_of_a_class_is_rewarded(why: str):
    assert asyncio.run(misjudged(why, correct=False)) == []


@pytest.mark.parametrize("why", CLASSES)
def test_every_right_answer_of_a_class_is_rewarded(why: str):
    assert asyncio.run(misjudged(why, correct=True)) == []


def test_every_class_has_both_signs():
    assert len(CLASSES) >= 15
    for why in CLASSES:
        assert {pair.correct for pair in PAIRS if pair.why == why} == {True, False}, why
