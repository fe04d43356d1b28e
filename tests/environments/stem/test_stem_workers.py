"""Quantities in worker processes: what hangs is killed, and a grader that cannot work is no verdict."""

from collections.abc import Mapping

import pytest
from stem_support import numeric

from prorl_gym.environments.math.environment import MathGrader
from prorl_gym.environments.stem.environment import StemGrader
from prorl_gym.environments.worker_pool import WorkerError, WorkerFailedError, WorkerPool, WorkerTimeoutError
from prorl_gym.errors import FailureKind, GraderError, TaskError
from tests.environments.worker_support import ScriptedWorkers

EQUAL = {"verdict": "equal", "why": ""}
DIFFERENT = {"verdict": "different", "why": "so"}


def grader(*outcomes: WorkerError | Mapping[str, str]) -> StemGrader:
    return StemGrader(ScriptedWorkers(*outcomes), MathGrader(ScriptedWorkers()))


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


async def test_answer_on_which_the_grader_breaks_is_wrong():
    score = await grader(WorkerTimeoutError(), EQUAL).score(numeric("5 N", judge=True), "6 N", None)  # needs no judge
    assert (score.reward, score.detail["why"]) == (0.0, "grading timed out")


async def test_grader_that_fails_on_gold_alone_is_infrastructure():
    with pytest.raises(GraderError, match="gold answer alone") as caught:
        await grader(WorkerFailedError(), DIFFERENT).score(numeric("5 N"), "6 N", None)
    assert caught.value.retryable


async def test_endless_answer_is_wrong_without_being_read():
    score = await grader().score(numeric("5 N"), "5" * 2001, None)
    assert (score.reward, score.detail["why"]) == (0.0, "the answer is longer than 2000 characters")
