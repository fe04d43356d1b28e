"""False positives and false negatives of the STEM grader on the labelled corpora, beside plain string match.

The halves apart: the first was written with sight of the grader, the second without. About half of the two outside ones
comes from the tests of published packages.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from _grade_corpora import FALSE_NEGATIVES_PERCENT, FALSE_POSITIVES, HALVES, OUTSIDE, half_name
from _report import Figure, Peer, figure

from prorl_gym.environments.answers.tex import NoAnswerError, last_boxed
from prorl_gym.environments.grader_corpus import (
    ConfusionCounts,
    StemExample,
    count_confusion,
    is_right_by_rules,
    read_corpus,
)
from prorl_gym.environments.math.environment import MathGrader
from prorl_gym.environments.stem.environment import StemGrader
from prorl_gym.environments.worker_pool import WorkerPool

FOLDER = Path(__file__).parents[1] / "tests" / "corpora"


def string_match(pair: StemExample) -> bool:
    """Grade by comparing what is boxed with the gold answer, letter for letter."""
    try:
        return last_boxed(pair.answer) == pair.row["answer"]
    except NoAnswerError:
        return False


async def stem_confusions() -> dict[str, dict[str, ConfusionCounts[StemExample]]]:
    """Return what each grader got wrong, by half and grader: ``ours``, ``string match``."""
    quantities = WorkerPool("prorl_gym.environments.stem.quantity:grade")
    expressions = WorkerPool("prorl_gym.environments.math.answer_equality:grade")
    grader = StemGrader(quantities, MathGrader(expressions))
    found: dict[str, dict[str, ConfusionCounts[StemExample]]] = {}
    try:
        for half in (*HALVES, *OUTSIDE):
            pairs = read_corpus(FOLDER / f"stem_{half}.jsonl", StemExample)
            found[half] = {
                "ours": count_confusion(pairs, await _graded(pairs, grader)),
                "string match": count_confusion(pairs, [string_match(pair) for pair in pairs]),
            }
    finally:
        quantities.close()
        expressions.close()
    return found


async def _graded(pairs: Sequence[StemExample], grader: StemGrader) -> list[bool]:
    turns = asyncio.Semaphore(2)

    async def one(pair: StemExample) -> bool:
        async with turns:
            return await is_right_by_rules(pair, grader)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(pair)) for pair in pairs]
    return [task.result() for task in tasks]


async def run() -> list[Figure]:
    """Return the figures, string match as a peer."""
    return [row for half, found in (await stem_confusions()).items() for row in _figures(half, found)]


def _figures(half: str, found: dict[str, ConfusionCounts[StemExample]]) -> list[Figure]:
    own, plain = found["ours"], found["string match"]
    size = f"{own.positives} right and {own.negatives} wrong answers"
    return [
        figure(
            *(f"stem, {half_name(half, 'stem')} ({size}): false positives", [len(own.false_positives)], ""),
            better="lower",
            target=FALSE_POSITIVES,
            peers=[Peer(name="string match", value=len(plain.false_positives), target=None)],
        ),
        figure(
            *(f"stem, {half_name(half, 'stem')}: false negatives", [100 * own.false_negative_rate], "%"),
            better="lower",
            target=FALSE_NEGATIVES_PERCENT,
            peers=[Peer(name="string match", value=100 * plain.false_negative_rate, target=None)],
        ),
    ]
