"""False positives and false negatives of the math grader on the labelled corpora, beside two simpler graders.

The halves apart: the first was written with sight of the grader, the second without. Most of the two outside ones comes
from the tests of published packages.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from _report import Figure, Peer, figure

from prorl_gym.environments.grader_corpus import (
    ConfusionCounts,
    MathExample,
    count_confusion,
    extract_answer,
    read_corpus,
)
from prorl_gym.environments.math.environment import MathGrader
from prorl_gym.environments.worker_pool import WorkerError, WorkerPool
from prorl_gym.errors import TaskError

FOLDER = Path(__file__).parents[1] / "tests" / "corpora"
HALVES = ("seen", "unseen")
OUTSIDE = ("outside_seen", "outside_unseen")
FALSE_POSITIVES, FALSE_NEGATIVES_PERCENT = 0, 1.0

Grader = Callable[[MathExample], Awaitable[bool]]


async def plain_match(pair: MathExample) -> bool:
    """Grade by comparing the strings."""
    return extract_answer(pair) == pair.gold


def bare_math_verify(pool: WorkerPool, cpu_seconds: float = 5.0) -> Grader:
    """Return a grader by math-verify's defaults; an answer on which it hangs or fails is wrong."""

    async def grade(pair: MathExample) -> bool:
        message = pair.response.rpartition("</think>")[2]
        body = {"gold": pair.gold, "response": f"${message}$" if pair.bare else message}
        try:
            return bool((await pool.call(body, cpu_seconds=cpu_seconds))["equal"])
        except WorkerError:
            return False

    return grade


def ours(grader: MathGrader) -> Grader:
    """Return our grader, as the environment uses it."""

    async def grade(pair: MathExample) -> bool:
        answer = extract_answer(pair)
        try:
            return answer is not None and (await grader.score(pair.gold, answer)).reward == 1.0
        except TaskError:
            return False  # a gold answer that cannot be read rewards nothing

    return grade


async def math_confusions() -> dict[str, dict[str, ConfusionCounts[MathExample]]]:
    """Return what each grader got wrong, by half and grader: ``ours``, ``math-verify``, ``string match``."""
    own, bare = WorkerPool("prorl_gym.environments.math.answer_equality:grade"), WorkerPool("bench._grade_bare:grade")
    graders: dict[str, Grader] = {
        "ours": ours(MathGrader(own)),
        "math-verify": bare_math_verify(bare),
        "string match": plain_match,
    }
    try:
        return {
            half: {name: await grade_half(half, grader) for name, grader in graders.items()}
            for half in (*HALVES, *OUTSIDE)
        }
    finally:
        own.close()
        bare.close()


async def grade_half(half: str, grader: Grader) -> ConfusionCounts[MathExample]:
    """Grade one half, two pairs at a time."""
    pairs = read_corpus(FOLDER / f"math_{half}.jsonl", MathExample)
    turns = asyncio.Semaphore(2)

    async def one(pair: MathExample) -> bool:
        async with turns:
            return await grader(pair)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(pair)) for pair in pairs]
    return count_confusion(pairs, [task.result() for task in tasks])


async def run() -> list[Figure]:
    """Return the figures, the other graders as peers."""
    return [row for half, found in (await math_confusions()).items() for row in _figures(half, found)]


def half_name(half: str, domain: str) -> str:
    """Return what a half is called: the unseen one of two domains was looked at, and mended by, after its first run."""
    mended = half.endswith("unseen") and domain != "code"
    return half.replace("_", ", ") + " half" + (", mended since first sight" if mended else "")


def _figures(half: str, found: dict[str, ConfusionCounts[MathExample]]) -> Sequence[Figure]:
    own = found.pop("ours")
    size = f"{own.positives} right and {own.negatives} wrong answers"
    wrong = [Peer(name=name, value=len(each.false_positives), target=None) for name, each in found.items()]
    missed = [Peer(name=name, value=100 * each.false_negative_rate, target=None) for name, each in found.items()]
    return (
        figure(
            *(f"math, {half_name(half, 'math')} ({size}): false positives", [len(own.false_positives)], ""),
            better="lower",
            target=FALSE_POSITIVES,
            peers=wrong,
        ),
        figure(
            *(f"math, {half_name(half, 'math')}: false negatives", [100 * own.false_negative_rate], "%"),
            better="lower",
            target=FALSE_NEGATIVES_PERCENT,
            peers=missed,
        ),
    )
