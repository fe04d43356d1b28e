"""Classes of answers that a grader gets wrong: each has right and wrong ones, and none of them may be misjudged."""

import asyncio
from pathlib import Path

import pytest
from stem_support import GRADER

from prorl_gym.environments.grader_corpus import StemExample, is_right_by_rules, read_corpus

PAIRS = read_corpus(Path(__file__).parents[2] / "corpora" / "stem_classes.jsonl", StemExample)
CLASSES = sorted({pair.why for pair in PAIRS})


async def misjudged(why: str, *, correct: bool) -> list[tuple[str, str]]:
    pairs = [pair for pair in PAIRS if pair.why == why and pair.correct == correct]
    return [(pair.row["answer"], pair.response) for pair in pairs if await is_right_by_rules(pair, GRADER) != correct]


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
