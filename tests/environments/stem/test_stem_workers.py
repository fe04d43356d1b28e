"""Quantities in worker processes: what hangs is killed, and a grader that cannot work is no verdict."""

import pytest
from stem_support import numeric

from prorl_gym.environments.math.environment import MathGrader
from prorl_gym.environments.stem.environment import StemGrader
from prorl_gym.environments.worker_pool import (
    WorkerDiedError,
    WorkerError,
    WorkerFailedError,
    WorkerPool,
    WorkerStuckError,
    WorkerTimeoutError,
    WorkerUnavailableError,
)
from prorl_gym.errors import FailureKind, GraderError, TaskError


class Scripted:
    def __init__(self, *outcomes: WorkerError | str) -> None:
        self._outcomes = list(outcomes)
        self.asked: list[str] = []

    async def call(self, body: dict[str, str], *, cpu_seconds: float) -> dict[str, str]:
        self.asked.append(body["answer"])
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, WorkerError):
            raise outcome
        return {"verdict": outcome, "why": "so"}


def grader(*outcomes: WorkerError | str) -> StemGrader:
    return StemGrader(Scripted(*outcomes), MathGrader(Scripted()))


async def test_quantities_are_graded_in_a_real_worker():
    pool = WorkerPool("prorl_gym.environments.stem.quantity:grade")
    try:
        real = StemGrader(pool, MathGrader(pool))
        assert (await real.score(numeric("9.81 m/s^2"), r"981\,\mathrm{cm\,s^{-2}}", None)).reward == 1.0
        score = await real.score(numeric("9.81 m/s^2"), "9.81", None)
        assert (score.reward, score.detail["why"]) == (0.0, "the unit is missing")
        for hostile in ("9^{9^{9^{9}}} m", "5 " + "m" * 1900, "(" * 900, "1" * 1990 + " m", "5 m" + "^2" * 900):
            assert (await real.score(numeric("9.81 m/s^2"), hostile, None)).reward == 0.0
        with pytest.raises(TaskError, match="no single quantity") as caught:
            await real.score(numeric("a lot"), "5 N", None)
        assert caught.value.kind is FailureKind.BAD_ROW
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("outcomes", "why"),
    [
        ((WorkerTimeoutError(), "equal"), "grading timed out"),
        ((WorkerDiedError(), WorkerDiedError(), "equal"), "grading crashed"),
        ((WorkerFailedError(), "equal"), "the answer could not be read"),
        ((WorkerDiedError(), "different"), "so"),
    ],
)
async def test_answer_on_which_the_grader_breaks_is_wrong(outcomes: tuple[WorkerError | str, ...], why: str):
    score = await grader(*outcomes).score(numeric("5 N", judge=True), "6 N", None)  # no judge is asked about it
    assert (score.reward, score.detail["why"]) == (0.0, why)


@pytest.mark.parametrize(
    ("outcomes", "what"),
    [
        ((WorkerTimeoutError(), WorkerTimeoutError()), "gold answer alone"),
        ((WorkerFailedError(), "different"), "gold answer alone"),
        ((WorkerUnavailableError("no pint"),), "can be started: no pint"),
        ((WorkerStuckError("no answer"),), "no CPU time"),
    ],
)
async def test_grader_that_cannot_work_is_infrastructure(outcomes: tuple[WorkerError | str, ...], what: str):
    with pytest.raises(GraderError, match=what) as caught:
        await grader(*outcomes).score(numeric("5 N"), "6 N", None)
    assert caught.value.retryable


async def test_endless_answer_is_wrong_without_being_read():
    score = await grader().score(numeric("5 N"), "5" * 2001, None)
    assert (score.reward, score.detail["why"]) == (0.0, "the answer is longer than 2000 characters")
