r"""The base class of ``math`` and ``stem``: the answer is what the last ``\boxed{}`` holds."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments.answers.grading import wrong_score
from prorl_gym.environments.answers.tex import NoAnswerError, last_boxed
from prorl_gym.environments.protocol import Leases, ScriptedStep
from prorl_gym.environments.simple import SimpleEnvironment
from prorl_gym.environments.task_row import Row, to_scripted_steps
from prorl_gym.records import GradedSubmission, Score, bounded_text
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.settings import ResolvedSettings


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
        """Return the grade of the last boxed answer, 0.0 without one; raises as ``grade``."""
        try:
            answer = last_boxed(artifacts.answer or "")
            artifacts.submission = GradedSubmission(text=answer)
            score = await self.grade(task, answer, leases)
        except NoAnswerError as error:
            score = wrong_score(str(error), **self.score_detail)
        return score.model_copy(update={"expected": bounded_text("\n".join(self.accepted_answers(task)))})

    def gold_steps(self, row: Mapping[str, Any]) -> Sequence[ScriptedStep]:
        """Return the row's own trajectory, or the bare answer."""
        task = self.parse_row(row)
        return to_scripted_steps(task.gold_steps) or [
            ScriptedStep(f"The answer is $\\boxed{{{self.gold_answer(task)}}}$.")
        ]

    def wrong_steps(self, row: Mapping[str, Any], seed: int) -> Sequence[ScriptedStep]:
        """Return turns that do not solve the row: its own, or a guess that depends on the seed."""
        task = self.parse_row(row)
        return to_scripted_steps(task.wrong_steps) or [
            ScriptedStep(f"{self.guess} $\\boxed{{{self.wrong_answer(task, seed)}}}$.")
        ]
