"""The math grader: a labelled corpus, hostile answers, and failures that are not the answer's."""

import json
from pathlib import Path
from typing import Any

import pytest
from grader_corpus import MathPair, read_corpus

from prorl_gym.environments.answers.tex import NoAnswerError, last_boxed
from prorl_gym.environments.math.environment import MAX_ANSWER, MathGrader
from prorl_gym.environments.worker_pool import (
    WorkerDiedError,
    WorkerError,
    WorkerFailedError,
    WorkerPool,
    WorkerStuckError,
    WorkerTimeoutError,
    WorkerUnavailableError,
)
from prorl_gym.errors import Cause, FailureKind, GraderError, TaskError
from tests.environments.worker_support import ScriptedWorkers

CORPORA = Path(__file__).parents[1] / "corpora"
CLASSES = CORPORA / "math_classes.jsonl"
BOXES = [json.loads(line) for line in (CORPORA / "boxes.jsonl").read_text(encoding="utf-8").splitlines()]
"""Messages, and the content of their last box or why they have none."""


@pytest.fixture(scope="module")
def pool():
    workers = WorkerPool("prorl_gym.environments.math.answer_equality:grade")
    yield workers
    workers.close()


@pytest.mark.parametrize("row", BOXES, ids=lambda row: row["text"])
def test_last_box_is_found(row: dict[str, str]):
    if "why" in row:
        with pytest.raises(NoAnswerError, match=row["why"]):
            last_boxed(row["text"])
    else:
        assert last_boxed(row["text"]) == row["content"]


def test_a_model_that_repeats_a_box_takes_no_time_that_grows_with_its_square():
    assert last_boxed("\\boxed{" * 50_000 + "7" + "}" * 50_000) == last_boxed("{" * 1000 + "\\boxed{7}") == "7"
    with pytest.raises(NoAnswerError, match="not closed"):
        last_boxed("\\boxed{" * 50_000)


async def test_right_and_wrong_are_scored_in_a_worker(pool: WorkerPool):
    grader = MathGrader(pool)
    assert (await grader.score("\\frac{1}{2}", "0.5")).reward == 1.0
    score = await grader.score("\\frac{1}{2}", "0.6")
    assert (score.reward, score.detail["why"]) == (0.0, "the answer differs")


TIMED_OUT = ("grading timed out",)
HANGS = [
    (r"\sum_{k=1}^{n} k", "\\sum_{k=1}^{10^{10}} \\sin(k^{k})", TIMED_OUT),
    pytest.param(r"\int_0^1 t^2 dt", "\\int_0^1 \\sum_{k=1}^{10^9} \\sin(x^{k}) dx", TIMED_OUT, marks=pytest.mark.slow),
    # Deep nesting takes as long as the machine needs.
    pytest.param("42", "(" * 900 + "2" + ")" * 900, (*TIMED_OUT, "the answer differs"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("gold", "answer", "reasons"), HANGS)
async def test_answer_that_hangs_the_grader_is_wrong_and_the_next_gets_a_new_worker(
    gold: str, answer: str, reasons: tuple[str, ...]
):
    alone = WorkerPool("prorl_gym.environments.math.answer_equality:grade", size=1)
    grader = MathGrader(alone)  # with its whole limit: on a slow machine the first gold costs over a second
    try:
        score = await grader.score(gold, answer)
        assert score.reward == 0.0
        assert score.detail["why"] in reasons
        assert (await grader.score("42", "6 \\cdot 7")).reward == 1.0
    finally:
        alone.close()


TOO_LARGE = [
    "9^{9^{9^{9}}}",
    "(10^{10^{10}})!",
    "2^" * 900 + "2",
    "e^{e^{e^{e^{e}}}}",
    "((5000!)!)!",
    "\\sin" * 300 + "1",
]


@pytest.mark.parametrize("answer", TOO_LARGE)
async def test_answer_that_is_too_large_to_compute_is_wrong_at_once(pool: WorkerPool, answer: str):
    score = await MathGrader(pool, cpu_seconds=1.0).score("42", answer)
    assert (score.reward, score.detail["why"]) == (0.0, "the answer differs")


async def test_any_of_several_gold_answers_counts(pool: WorkerPool):
    grader = MathGrader(pool)
    assert (await grader.score(["\\frac{1}{2}", "2"], "0.5")).reward == 1.0
    assert (await grader.score(["\\frac{1}{2}", "2"], "2")).reward == 1.0
    assert (await grader.score(["\\frac{1}{2}", "2"], "2.5")).reward == 0.0


async def test_huge_answer_is_wrong_without_being_read(pool: WorkerPool):
    score = await MathGrader(pool).score("1", "1" * (MAX_ANSWER + 1))
    assert (score.reward, score.detail["why"]) == (0.0, f"the answer is longer than {MAX_ANSWER} characters")


async def test_long_expression_is_graded(pool: WorkerPool):
    assert (await MathGrader(pool, cpu_seconds=20.0).score("100", "+".join(["1"] * 100))).reward == 1.0


@pytest.mark.parametrize(
    "gold", [r"\frac{1}{", "see the figure (above) + 1", r"7 \text{ rejected}", "20000!+1", ["7", "???"]]
)
async def test_gold_answer_that_cannot_be_read_is_a_bad_row(pool: WorkerPool, gold: str | list[str]):
    with pytest.raises(TaskError, match="cannot be read") as caught:
        await MathGrader(pool).score(gold, gold if isinstance(gold, str) else "7")
    assert (caught.value.kind, caught.value.retryable) == (FailureKind.BAD_ROW, False)


EQUAL = {"equal": True, "evaluated": True}
DIFFERENT = {"equal": False, "evaluated": True}


@pytest.mark.parametrize(
    ("outcomes", "why"),
    [
        ((WorkerTimeoutError(), EQUAL), "grading timed out"),
        ((WorkerDiedError(), WorkerTimeoutError(), EQUAL), "grading timed out"),
        ((WorkerDiedError(), WorkerDiedError(), EQUAL), "grading crashed"),
        ((WorkerFailedError(), EQUAL), "the answer could not be read"),
        ((WorkerDiedError(), WorkerFailedError(), EQUAL), "the answer could not be read"),
        ((WorkerDiedError(), DIFFERENT), "the answer differs"),
        ((WorkerDiedError(), EQUAL), None),
    ],
)
async def test_answer_on_which_the_grader_breaks_twice_is_wrong(outcomes: tuple[Any, ...], why: str | None):
    score = await MathGrader(ScriptedWorkers(*outcomes)).score("1", "2")
    assert (score.reward, score.detail.get("why")) == (float(why is None), why)


@pytest.mark.parametrize(
    "outcomes",
    [
        (WorkerTimeoutError(), WorkerTimeoutError()),
        (WorkerTimeoutError(), WorkerDiedError()),
        (WorkerFailedError(), WorkerFailedError()),
        (WorkerDiedError(), WorkerDiedError(), WorkerDiedError()),
        (WorkerTimeoutError(), DIFFERENT),
    ],
)
async def test_grader_that_fails_on_gold_alone_is_infrastructure(outcomes: tuple[Any, ...]):
    workers = ScriptedWorkers(*outcomes)
    with pytest.raises(GraderError, match="gold answer alone") as caught:
        await MathGrader(workers).score("1", "2")
    assert caught.value.cause is Cause.INFRASTRUCTURE
    assert workers.requests[-1] == {"gold": ["1"], "answer": "1", "question": ""}


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (WorkerStuckError("it neither ran nor waited"), "hung: it neither ran"),
        (WorkerUnavailableError("no_such_module"), "can be started: no_such_module"),
    ],
)
async def test_grader_that_cannot_work_is_infrastructure(failure: WorkerError, message: str):
    with pytest.raises(GraderError, match=message) as caught:
        await MathGrader(ScriptedWorkers(failure)).score("1", "2")
    assert caught.value.retryable


async def test_verdict_does_not_depend_on_what_was_graded_before(pool: WorkerPool):
    grader = MathGrader(pool)
    pairs = read_corpus(CLASSES, MathPair)[::90]
    forth = [(await grader.score(pair.gold, pair.answer)).reward for pair in pairs]
    back = [(await grader.score(pair.gold, pair.answer)).reward for pair in reversed(pairs)]
    assert forth == back[::-1]
