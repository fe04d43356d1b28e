"""Labelled answers to STEM questions, and grading one."""

from typing import Any

from prorl_gym.environments.corpus import Pair
from prorl_gym.environments.math.boxed import NoAnswerError, last_boxed
from prorl_gym.environments.rows import parse_row
from prorl_gym.environments.stem.grader import StemGrader
from prorl_gym.environments.stem.rows import StemRow


class StemPair(Pair):
    """A message of an agent to a question with a known answer."""

    row: dict[str, Any]
    """The row, without scripted trajectories."""
    response: str
    """The whole last message."""
    source: str = ""
    """The published test that the answer comes from, or that it is of our own."""

    @property
    def answer(self) -> str:
        """What the message hands in: thoughts are no part of it."""
        return self.response.rpartition("</think>")[2]


async def grade(pair: StemPair, grader: StemGrader) -> bool:
    """Return whether the rules reward an answer, as the environment finds it.

    Raises:
        GraderError, TaskError: see ``StemGrader.by_rules``.
    """
    try:
        answer = last_boxed(pair.answer)
    except NoAnswerError:
        return False
    return (await grader.by_rules(parse_row(StemRow, "stem", pair.row), answer)).verdict == "right"
