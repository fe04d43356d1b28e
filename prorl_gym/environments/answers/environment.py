r"""The base of ``math`` and ``stem``: the answer is the content of the last ``\boxed{}``, graded by worker processes.

An answer on which the grader hangs or dies is wrong: no gold answer does that, and a policy must not get a retry by
answering ``9^{9^{9^9}}``. Only a grader that cannot work at all, or not even on the gold answer alone, is an
infrastructure failure.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments.answers.tex import NoAnswerError, last_boxed
from prorl_gym.environments.protocol import Leases, ScriptedStep
from prorl_gym.environments.row_format import Row, to_scripted_steps
from prorl_gym.environments.simple import SimpleEnvironment
from prorl_gym.environments.worker_pool import (
    WorkerDiedError,
    WorkerFailedError,
    WorkerPool,
    WorkerStuckError,
    WorkerTimeoutError,
    WorkerUnavailableError,
)
from prorl_gym.errors import GraderError
from prorl_gym.records import GradedSubmission, Score, bounded_text
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.settings import ResolvedSettings, resolve_settings

MAX_ANSWER = 2000
"""Longest answer that is graded, in characters."""

TOO_LONG = f"the answer is longer than {MAX_ANSWER} characters"

CPU_SECONDS = 5.0
"""CPU time for one comparison; an ordinary one takes milliseconds."""

_PLACEHOLDER = r"(?:\$\\?\{?(?:answer|ans|letter|number|result)\b|[<\[{][a-z]|\.{3}|…|(?-i:\(?X\b))"
_QUOTE = "[\"'`*\u201c\u2018]"
_FORMS = {
    form: re.compile(pattern, re.IGNORECASE)
    for form, pattern in {
        "Answer: {}": (
            rf"{_QUOTE}\s?(?:final\s)?answer\s?:|\banswer(?:\s?:|\sis:?)\s?{_PLACEHOLDER}"
            r"|\b(?-i:Answer):\s*+\\?[$<\[{]"
        ),
        "#### {}": (rf"[^\n#]####(?!#)|\b(?:after|with|by|form|format)\s\s?####(?!#)|####\s?{_PLACEHOLDER}"),
        "<answer>{}</answer>": "</?answer>",
    }.items()
}
"""Forms of an answer, of which ours is a box, by the words with which published prompts ask for them."""


def asked_forms(question: str) -> list[str]:
    """Return the forms other than a box, with ``{}`` for the answer, that a question asks for."""
    return [form for form, pattern in _FORMS.items() if pattern.search(question)]


class BoxedAnswerEnvironment(SimpleEnvironment[Row]):
    """Implements ``Environment[Row]`` but for ``grade``, which gets the boxed answer."""

    sandbox = SandboxSpec(limits=SandboxLimits(output=16 << 10))
    finish = "Hand in the final answer, in \\boxed{}, and end."
    score_detail: ClassVar[Mapping[str, str]] = {}
    """Detail of the score of a message without an answer, in addition to the reason."""
    guess = "I believe that the answer is"
    """Words of a scripted agent before its wrong answer."""

    def accepted_answers(self, task: Row) -> Sequence[str]:
        """Return the gold answers, for people; each is accepted."""
        return [self.gold_answer(task)]

    async def evaluate(self, task: Row, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        try:
            answer = last_boxed(artifacts.answer or "")
            artifacts.submission = GradedSubmission(text=answer)
            score = await self.grade(task, answer, leases)
        except NoAnswerError as error:
            score = wrong_score(str(error), **self.score_detail)
        return score.model_copy(update={"expected": bounded_text("\n".join(self.accepted_answers(task)))})

    def gold_steps(self, row: Mapping[str, Any]) -> Sequence[ScriptedStep]:
        task = self.parse_row(row)
        return to_scripted_steps(task.gold_steps) or [
            ScriptedStep(f"The answer is $\\boxed{{{self.gold_answer(task)}}}$.")
        ]

    def wrong_steps(self, row: Mapping[str, Any], seed: int) -> Sequence[ScriptedStep]:
        task = self.parse_row(row)
        return to_scripted_steps(task.wrong_steps) or [
            ScriptedStep(f"{self.guess} $\\boxed{{{self.wrong_answer(task, seed)}}}$.")
        ]

    async def check_row(self, row: Mapping[str, Any], leases: Leases) -> str:
        """Return the first form of the answer that the question asks for and that is not rewarded."""
        task = self.parse_row(row)
        asked = "\n".join(message.content for message in self.messages(task) if message.content != self.prompt)
        gold = self.gold_answer(task)
        gold = f"\\boxed{{{gold}}}" if "\\boxed" in asked else gold
        for form in asked_forms(asked):
            answered = Artifacts(answer=form.format(gold))
            score = await self.evaluate(task, answered, leases, resolve_settings(self.settings))
            if score.reward != 1.0:
                why = score.detail.get("why", "a part of the reward")
                fix = "Take that out of 'question': the environment asks for \\boxed{} itself."
                return f"the question asks for the form '{form.format('X')}', which is not rewarded ({why}). {fix}"
        return ""


class AnswerWorkers:
    """Compares answers with gold ones in worker processes.

    The pool's workers return a mapping for each request, of which ``is_equal`` tells whether the answers are equal.
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

        Each of ``gold_requests`` compares a gold answer with itself. Raises ``GraderError``: no worker can be started
        or gets CPU time, or a gold answer alone cannot be graded.
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
        try:
            if all([self._is_equal(await self._call(gold)) for gold in gold_requests]):
                return why
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
            # An answer that takes for ever uses up its CPU time; a worker that hangs is a fault of the machine.
            raise GraderError(
                f"The {self._environment} grader hung: {error}.", "Look at this node's disks and memory."
            ) from None


def wrong_score(why: str, **detail: str) -> Score:
    return Score(reward=0.0, detail={"why": why, **detail})
