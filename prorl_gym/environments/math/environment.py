r"""The ``math`` environment: think, compute with Python where it helps, answer in ``\boxed{}``."""

from collections.abc import Sequence
from typing import Annotated
from zlib import crc32

from pydantic import AfterValidator, BeforeValidator

from prorl_gym.environments.answers.environment import (
    CPU_SECONDS,
    MAX_ANSWER,
    TOO_LONG,
    AnswerWorkers,
    BoxedAnswerEnvironment,
    wrong_score,
)
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.row_format import TaskRow
from prorl_gym.environments.worker_pool import WorkerPool
from prorl_gym.errors import FailureKind, TaskError
from prorl_gym.records import Score
from prorl_gym.settings import RolloutSettings

SYSTEM_PROMPT = (
    "You solve mathematical problems. Reason step by step, and use the python tool whenever a computation is easier "
    "or safer to do by program. Give the final answer once, at the end, in \\boxed{}, either in your last message or "
    "as the answer of the finish tool. Put only the answer itself into the box, in its simplest exact form."
)

MAX_GOLD_ANSWERS = 16
"""Most gold answers of a row."""


def _check_count(answers: tuple[str, ...]) -> tuple[str, ...]:
    if not 1 <= len(answers) <= MAX_GOLD_ANSWERS:
        raise ValueError(f"there must be 1 to {MAX_GOLD_ANSWERS} answers")
    if not all(1 <= len(answer) <= MAX_ANSWER for answer in answers):
        raise ValueError(f"an answer must have 1 to {MAX_ANSWER} characters")
    return answers


class MathRow(TaskRow):
    """A mathematical question."""

    answer: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
        AfterValidator(_check_count),
    ]
    """The gold answer, as LaTeX without a box, or several of which each is accepted. Stays on the service's side."""


class MathGrader:
    """Compares answers with the gold one, in workers of ``prorl_gym.environments.math.answer_equality:grade``."""

    def __init__(self, pool: WorkerPool | None = None, cpu_seconds: float = CPU_SECONDS) -> None:
        pool = pool or WorkerPool("prorl_gym.environments.math.answer_equality:grade")
        self._workers = AnswerWorkers(pool, "math", lambda result: result["equal"], cpu_seconds)

    async def score(self, gold: str | Sequence[str], answer: str, question: str = "") -> Score:
        """Return 1.0 for an answer that is equal to the gold one, or to one of several, otherwise 0.0.

        An answer that only repeats the question is wrong. Raises as ``AnswerWorkers.compare``; ``TaskError``
        (``BAD_ROW``): a gold answer cannot be read.
        """
        if len(answer) > MAX_ANSWER:
            return wrong_score(TOO_LONG)
        accepted = [gold] if isinstance(gold, str) else list(gold)
        result = await self._workers.compare(
            {"gold": accepted, "answer": answer, "question": question},
            [{"gold": [each], "answer": each, "question": ""} for each in accepted],
        )
        if isinstance(result, str):
            return wrong_score(result)
        if (unreadable := result.get("unreadable")) is not None:
            raise TaskError(
                FailureKind.BAD_ROW,
                f"The gold answer '{unreadable[:80]}' cannot be read, so nothing can be compared with it.",
                "Correct the row's 'answer', or drop the row.",
            )
        if result["equal"]:
            return Score(reward=1.0)
        return wrong_score("the answer differs" if result["evaluated"] else "the answer is not evaluated")


class MathEnvironment(BoxedAnswerEnvironment[MathRow]):
    name = "math"
    row_model = MathRow
    prompt = SYSTEM_PROMPT
    settings = RolloutSettings(max_turns=8, eval_seconds=120.0)

    def __init__(self, grader: MathGrader | None = None) -> None:
        self._grader = grader or MathGrader()

    def normalize_answer(self, text: str) -> str:
        return text

    async def grade(self, task: MathRow, answer: str, leases: Leases) -> Score:
        return await self._grader.score(task.answer, answer, task.question)

    def gold_answer(self, task: MathRow) -> str:
        return task.answer[0]

    def accepted_answers(self, task: MathRow) -> Sequence[str]:
        return task.answer

    def wrong_answer(self, task: MathRow, seed: int) -> str:
        # No gold answer of a data set is such a sum.
        return f"{1 + crc32(f'{seed}:{task.question}'.encode()) % 97}+\\sqrt{{9973}}"
