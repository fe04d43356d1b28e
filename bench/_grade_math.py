"""How long a grading of a mathematical answer takes, and what an answer that never ends costs."""

import asyncio
import time
from collections.abc import Sequence

from _grade_corpora import FOLDER, HALVES
from _report import SHORT, Figure, figure

from prorl_gym.environments.grader_corpus import MathExample, extract_answer, read_corpus
from prorl_gym.environments.math.environment import MathGrader
from prorl_gym.environments.worker_pool import WorkerPool

GRADINGS = 100 if SHORT else 1000
P50_MS, P99_MS = 5.0, 200.0
DEADLINE = 1.0
"""CPU seconds given to an answer that never ends; the service gives more, the point is that it ends then."""

GOLD = r"\sum_{k=1}^{3} 7 k"
"""A sum: in an answer, one is evaluated only where gold holds one too."""
PATHOLOGICAL = (
    r"\sum_{k=1}^{10^{10}} \sin(k^{k})",
    r"\sum_{k=1}^{10^{8}} \frac{1}{k!+\sqrt{k}}",
    "(" * 900 + "2" + ")" * 900,
)


async def run() -> list[Figure]:
    """Return the figures.

    Raises:
        RuntimeError: an answer that never ends was rewarded, or no grading worked after it.
    """
    pool = WorkerPool("prorl_gym.environments.math.answer_equality:grade")
    try:
        times = await gradings(MathGrader(pool), _answers())
        killed = [await _killed(MathGrader(pool, DEADLINE), answer) for answer in PATHOLOGICAL]
    finally:
        pool.close()
    times.sort()
    ordinary, slow = times[len(times) // 2], times[len(times) * 99 // 100]
    what = f"of {GRADINGS} gradings, two at a time"
    return [
        figure(f"math: p50 {what}", [ordinary], "ms", better="lower", target=P50_MS),
        figure(f"math: p99 {what}", [slow], "ms", better="lower", target=P99_MS),
        figure("math: an answer that never ends, per CPU second given", killed, "s", better="lower"),
    ]


def _answers() -> list[tuple[str, str]]:
    pairs = [pair for half in HALVES for pair in read_corpus(FOLDER / f"math_{half}.jsonl", MathExample)]
    found = [(pair.gold, answer) for pair in pairs if (answer := extract_answer(pair)) is not None]
    return [found[index % len(found)] for index in range(GRADINGS)]


async def gradings(grader: MathGrader, answers: Sequence[tuple[str, str]]) -> list[float]:
    """Return ms of every grading, by two callers at the same time, workers already started."""
    await asyncio.gather(grader.score("1", "2"), grader.score("1", "3"))
    left = list(reversed(answers))
    times: list[float] = []

    async def caller() -> None:
        while left:
            gold, answer = left.pop()
            began = time.perf_counter()
            await grader.score(gold, answer)
            times.append((time.perf_counter() - began) * 1000)

    await asyncio.gather(caller(), caller())
    return times


async def _killed(grader: MathGrader, answer: str) -> float:
    began = time.perf_counter()
    score = await grader.score(GOLD, answer)
    took = time.perf_counter() - began
    if score.reward or score.detail["why"] != "grading timed out":
        raise RuntimeError(f"{answer}: {score}")
    if (await grader.score(GOLD, "6 \\cdot 7")).reward != 1.0:
        raise RuntimeError("nothing was graded after an answer that never ends")
    return took / DEADLINE
