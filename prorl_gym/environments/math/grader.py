"""Grading a mathematical answer in a worker process, and telling a hostile answer from a broken grader.

An answer on which the grader hangs or dies is a wrong answer: no gold answer does that, and a policy must not be able
to buy a retry with ``9^{9^{9^9}}``. Only a grader that cannot work at all, or not even on the gold answer alone, is an
infrastructure failure.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from prorl_gym.environments.worker import (
    WorkerDiedError,
    WorkerFailedError,
    WorkerPool,
    WorkerStuckError,
    WorkerTimeoutError,
    WorkerUnavailableError,
)
from prorl_gym.errors import FailureKind, GraderError, TaskError
from prorl_gym.records import Score

MAX_ANSWER = 2000
"""Longest answer that is looked at, in characters."""

CPU_SECONDS = 5.0
"""CPU time for one comparison; an ordinary one takes milliseconds."""


class MathGrader:
    """Compares answers with the gold one.

    Args:
        pool: workers of ``prorl_gym.environments.math.equality:grade``.
        cpu_seconds: CPU time for one comparison.
    """

    def __init__(self, pool: WorkerPool, cpu_seconds: float = CPU_SECONDS) -> None:
        self._pool = pool
        self._cpu_seconds = cpu_seconds

    async def score(self, gold: str | Sequence[str], answer: str, question: str = "") -> Score:
        """Return 1.0 for an answer that is equal to the gold one, or to one of several, otherwise 0.0.

        Args:
            gold: the gold answer, or several.
            answer: what was boxed.
            question: what was asked: an answer that only repeats it is wrong.

        Raises:
            GraderError: no worker can be started or gets to work, or the gold answer alone cannot be graded.
            TaskError: ``BAD_ROW``, a gold answer cannot be read.
        """
        if len(answer) > MAX_ANSWER:
            return wrong(f"the answer is longer than {MAX_ANSWER} characters")
        try:
            return _verdict(await self._compared(gold, answer, question))
        except WorkerTimeoutError:
            complaint = "grading timed out"
        except WorkerFailedError:
            complaint = "the answer could not be read"
        except WorkerDiedError:
            # The machine may have been short of memory: a second try tells.
            try:
                return _verdict(await self._compared(gold, answer, question))
            except WorkerTimeoutError:
                complaint = "grading timed out"
            except WorkerDiedError:
                complaint = "grading crashed"
            except WorkerFailedError:
                complaint = "the answer could not be read"
        await self._check_gold(gold)
        return wrong(complaint)

    async def _check_gold(self, gold: str | Sequence[str]) -> None:
        golds = [gold] if isinstance(gold, str) else gold
        try:
            if all([(await self._compared(each, each, ""))["equal"] for each in golds]):
                return
            found = "it does not equal itself"
        except (WorkerTimeoutError, WorkerDiedError, WorkerFailedError) as error:
            found = str(error)
        raise GraderError(f"The math grader fails on the gold answer alone: {found}.", "Check the row's 'answer'.")

    async def _compared(self, gold: str | Sequence[str], answer: str, question: str) -> Mapping[str, Any]:
        accepted = gold if isinstance(gold, str) else list(gold)
        try:
            body = {"gold": accepted, "answer": answer, "question": question}
            return await self._pool.call(body, cpu_seconds=self._cpu_seconds)
        except WorkerUnavailableError as error:
            raise GraderError(
                f"No math grading worker can be started: {error}.",
                "Check that math-verify imports in this environment.",
            ) from None
        except WorkerStuckError as error:
            # An answer that hangs uses up its CPU time. One that got none says something about the machine only.
            raise GraderError(f"The math grader got no CPU time: {error}.", "Look at the load of this node.") from None


def _verdict(compared: Mapping[str, Any]) -> Score:
    if (unreadable := compared.get("unreadable")) is not None:
        raise TaskError(
            FailureKind.BAD_ROW,
            f"The gold answer '{unreadable[:80]}' cannot be read, so nothing can be compared with it.",
            "Correct the row's 'answer', or drop the row.",
        )
    if compared["equal"]:
        return Score(reward=1.0)
    return wrong("the answer differs" if compared["evaluated"] else "the answer is not evaluated")


def wrong(why: str) -> Score:
    """Return the score of an answer that is not right."""
    return Score(reward=0.0, detail={"why": why})
