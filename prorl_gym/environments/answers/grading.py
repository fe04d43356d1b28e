"""Grades in worker processes, and distinguishes a hostile answer from a broken grader.

An answer on which the grader hangs or dies is wrong: no gold answer does that, and a policy must not get a retry by
answering ``9^{9^{9^9}}``. Only a grader that cannot work at all, or not even on the gold answer alone, is an
infrastructure failure.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prorl_gym.environments.worker_pool import (
    WorkerDiedError,
    WorkerFailedError,
    WorkerPool,
    WorkerStuckError,
    WorkerTimeoutError,
    WorkerUnavailableError,
)
from prorl_gym.errors import GraderError
from prorl_gym.records import Score

MAX_ANSWER = 2000
"""Longest answer that is graded, in characters."""

TOO_LONG = f"the answer is longer than {MAX_ANSWER} characters"

CPU_SECONDS = 5.0
"""CPU time for one comparison; an ordinary one takes milliseconds."""


class AnswerWorkers:
    """Compares answers with gold ones in worker processes.

    Args:
        pool: workers that return a mapping for each request.
        environment: name for errors.
        is_equal: whether the answers are equal by a result.
        cpu_seconds: CPU time for one comparison.
    """

    def __init__(
        self,
        pool: WorkerPool,
        environment: str,
        is_equal: Callable[[Mapping[str, Any]], bool],
        cpu_seconds: float,
    ) -> None:
        self._pool = pool
        self._environment = environment
        self._is_equal = is_equal
        self._cpu_seconds = cpu_seconds

    async def compare(
        self, request: Mapping[str, Any], gold_requests: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any] | str:
        """Return the worker's result, or why the answer is wrong where it cannot be graded.

        Args:
            request: compares the answer.
            gold_requests: each compares a gold answer with itself.

        Raises:
            GraderError: no worker can be started or gets CPU time, or a gold answer alone cannot be graded.
        """
        try:
            try:
                return await self._call(request)
            except WorkerDiedError:  # perhaps this machine lacked memory
                return await self._call(request)
        except WorkerTimeoutError:
            why = "grading timed out"
        except WorkerDiedError:
            why = "grading crashed"
        except WorkerFailedError:
            why = "the answer could not be read"
        await self._check_gold(gold_requests)
        return why

    async def _check_gold(self, requests: Sequence[Mapping[str, Any]]) -> None:
        try:
            if all([self._is_equal(await self._call(request)) for request in requests]):
                return
            problem = "it does not equal itself"
        except (WorkerTimeoutError, WorkerDiedError, WorkerFailedError) as error:
            problem = str(error)
        raise GraderError(
            f"The {self._environment} grader fails on the gold answer alone: {problem}.", "Check the row's 'answer'."
        )

    async def _call(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return await self._pool.call(request, cpu_seconds=self._cpu_seconds)
        except WorkerUnavailableError as error:
            raise GraderError(
                f"No {self._environment} grading worker can be started: {error}.",
                "Check that prorl-gym's dependencies import in this environment.",
            ) from None
        except WorkerStuckError as error:
            # An answer that hangs uses up its CPU time; a worker that got none is a fault of the machine.
            raise GraderError(
                f"The {self._environment} grader got no CPU time: {error}.", "Look at the load of this node."
            ) from None


def wrong_score(why: str, **detail: str) -> Score:
    """Return the score of a wrong answer."""
    return Score(reward=0.0, detail={"why": why, **detail})
