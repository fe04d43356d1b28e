"""The labelled corpora of STEM answers: no wrong answer is rewarded, and hardly a right one is not."""

import asyncio
from pathlib import Path

import pytest
from stem_support import GRADER

from prorl_gym.environments.grader_corpus import StemExample, count_confusion, is_right_by_rules, read_corpus

FOLDER = Path(__file__).parents[2] / "corpora"
HALVES = ("seen", "unseen")


def pairs(half: str) -> list[StemExample]:
    return read_corpus(FOLDER / f"stem_{half}.jsonl", StemExample)


@pytest.mark.parametrize("half", [*HALVES, "outside_seen", "outside_unseen"])
def test_no_false_positive_and_hardly_a_false_negative(half: str):
    async def verdicts() -> list[bool]:
        return [await is_right_by_rules(pair, GRADER) for pair in pairs(half)]

    found = count_confusion(pairs(half), asyncio.run(verdicts()))
    assert [(pair.id, pair.response) for pair in found.false_positives] == []
    assert found.false_negative_rate <= 0.01, [(pair.id, pair.response) for pair in found.false_negatives]


def test_both_halves_are_large_and_hold_both_signs_of_every_kind():
    halves = [pairs(half) for half in HALVES]
    assert all(len(half) >= 260 for half in halves)
    for kind in ("choice", "numeric", "expression", "text"):
        for half in halves:
            signs = [pair.correct for pair in half if pair.row["kind"] == kind]
            assert signs.count(True) >= 10
            assert signs.count(False) >= 10
