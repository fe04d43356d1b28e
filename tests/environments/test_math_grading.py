"""The math grader: a labelled corpus, hostile answers, and failures that are not the answer's."""

import pytest
from math_pairs import DIFFERENT, EQUAL

from prorl_gym.environments.answers.tex import NoAnswerError, last_boxed
from prorl_gym.environments.math.answer_equality import is_equal
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


@pytest.fixture(scope="module")
def pool():
    workers = WorkerPool("prorl_gym.environments.math.answer_equality:grade")
    yield workers
    workers.close()


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold: str, answer: str):
    assert is_equal(gold, answer)
    assert is_equal(answer, gold)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different(gold: str, answer: str):
    assert not is_equal(gold, answer)
    assert not is_equal(answer, gold)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("so \\boxed{42}.", "42"),
        ("\\boxed{1} or rather \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\left\\{ x \\right.}", "\\left\\{ x \\right."),
        ("\\boxed{\\boxed{7}}", "7"),
        ("$\\boxed{$7$}$", "7"),
        ("\\boxed {7}", "7"),
        ("\\boxed{日本}", "日本"),
        ("{" * 1000 + "\\boxed{7}", "7"),
    ],
)
def test_last_box_is_found(text: str, content: str):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no boxed answer"),
        ("42", "no boxed answer"),
        ("boxed{42}", "no boxed answer"),
        ("\\boxed{42", "not closed"),
        ("\\boxed{1} then \\boxed{2", "not closed"),
        ("\\boxed{42\\}", "not closed"),
        ("\\boxed{42\\", "not closed"),
        ("\\boxed{}", "empty"),
        ("\\boxed{ $ $ }", "empty"),
        ("\\boxed", "no braces"),
        ("\\boxed 42", "no braces"),
    ],
)
def test_missing_box_reports_why(text: str, why: str):
    with pytest.raises(NoAnswerError, match=why):
        last_boxed(text)


async def test_right_and_wrong_are_scored_in_a_worker(pool: WorkerPool):
    grader = MathGrader(pool)
    assert (await grader.score("\\frac{1}{2}", "0.5")).reward == 1.0
    score = await grader.score("\\frac{1}{2}", "0.6")
    assert (score.reward, score.detail["why"]) == (0.0, "the answer differs")


HANGS = [
    (r"\sum_{k=1}^{n} k", "\\sum_{k=1}^{10^{10}} \\sin(k^{k})"),
    pytest.param(r"\int_0^1 t^2 dt", "\\int_0^1 \\sin(x^{x^{x}}) dx", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("gold", "answer"), HANGS)
async def test_answer_that_hangs_the_grader_is_wrong_and_the_next_gets_a_new_worker(gold: str, answer: str):
    alone = WorkerPool("prorl_gym.environments.math.answer_equality:grade", size=1)
    grader = MathGrader(alone, cpu_seconds=1.0)
    try:
        score = await grader.score(gold, answer)
        assert (score.reward, score.detail["why"]) == (0.0, "grading timed out")
        assert (await grader.score("42", "6 \\cdot 7")).reward == 1.0
    finally:
        alone.close()


@pytest.mark.slow
async def test_deeply_nested_answer_is_wrong_however_long_it_takes():
    alone = WorkerPool("prorl_gym.environments.math.answer_equality:grade", size=1)
    grader = MathGrader(alone, cpu_seconds=1.0)
    try:
        score = await grader.score("42", "(" * 900 + "2" + ")" * 900)
        assert score.reward == 0.0
        assert score.detail["why"] in ("the answer differs", "grading timed out")  # as fast as the machine is
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


@pytest.mark.parametrize("gold", [r"\frac{1}{", "see the figure (above) + 1", r"7 \text{ rejected}", ["7", "???"]])
async def test_gold_answer_that_cannot_be_read_is_a_bad_row(pool: WorkerPool, gold: str | list[str]):
    with pytest.raises(TaskError, match="cannot be read") as caught:
        await MathGrader(pool).score(gold, gold if isinstance(gold, str) else "7")
    assert (caught.value.kind, caught.value.retryable) == (FailureKind.BAD_ROW, False)


class Scripted:
    """A pool that fails on an answer, or on the gold one too."""

    def __init__(self, *outcomes: WorkerError | bool) -> None:
        self._outcomes = list(outcomes)
        self.asked: list[dict[str, str]] = []

    async def call(self, body: dict[str, str], *, cpu_seconds: float) -> dict[str, bool]:
        self.asked.append(body)
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, WorkerError):
            raise outcome
        return {"equal": outcome, "evaluated": True}


@pytest.mark.parametrize(
    ("outcomes", "why"),
    [
        ((WorkerTimeoutError(), True), "grading timed out"),
        ((WorkerDiedError(), WorkerTimeoutError(), True), "grading timed out"),
        ((WorkerDiedError(), WorkerDiedError(), True), "grading crashed"),
        ((WorkerFailedError(), True), "the answer could not be read"),
        ((WorkerDiedError(), WorkerFailedError(), True), "the answer could not be read"),
        ((WorkerDiedError(), False), "the answer differs"),
    ],
)
async def test_answer_on_which_the_grader_breaks_is_wrong(outcomes: tuple[WorkerError | bool, ...], why: str):
    score = await MathGrader(Scripted(*outcomes)).score("1", "2")
    assert (score.reward, score.detail["why"]) == (0.0, why)


async def test_died_worker_is_no_verdict_when_the_second_try_works():
    assert (await MathGrader(Scripted(WorkerDiedError(), True)).score("1", "1")).reward == 1.0


@pytest.mark.parametrize(
    "outcomes",
    [
        (WorkerTimeoutError(), WorkerTimeoutError()),
        (WorkerTimeoutError(), WorkerDiedError()),
        (WorkerFailedError(), WorkerFailedError()),
        (WorkerDiedError(), WorkerDiedError(), WorkerDiedError()),
        (WorkerTimeoutError(), False),
    ],
)
async def test_grader_that_fails_on_gold_alone_is_infrastructure(outcomes: tuple[WorkerError | bool, ...]):
    scripted = Scripted(*outcomes)
    with pytest.raises(GraderError, match="gold answer alone") as caught:
        await MathGrader(scripted).score("1", "2")
    assert caught.value.cause is Cause.INFRASTRUCTURE
    assert scripted.asked[-1] == {"gold": "1", "answer": "1", "question": ""}


async def test_grader_without_cpu_time_is_infrastructure():
    with pytest.raises(GraderError, match="no CPU time") as caught:
        await MathGrader(Scripted(WorkerStuckError("no answer in 60 seconds"))).score("1", "2")
    assert caught.value.retryable


async def test_grader_that_cannot_start_is_infrastructure():
    with pytest.raises(GraderError, match="can be started: no_such_module") as caught:
        await MathGrader(Scripted(WorkerUnavailableError("no_such_module"))).score("1", "2")
    assert caught.value.retryable


async def test_verdict_does_not_depend_on_what_was_graded_before(pool: WorkerPool):
    grader = MathGrader(pool)
    pairs = [*EQUAL[:10], *DIFFERENT[:10]]
    forth = [(await grader.score(*pair)).reward for pair in pairs]
    back = [(await grader.score(*pair)).reward for pair in reversed(pairs)]
    assert forth == back[::-1]
