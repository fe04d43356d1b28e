"""Labelled corpora for graders: reading them, and counting false positives and false negatives apart."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from prorl_gym.environments.answers.tex import NoAnswerError, last_boxed
from prorl_gym.environments.code.code_row import CodeRow
from prorl_gym.environments.code.environment import grade
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.row_format import parse_row, read_json_lines
from prorl_gym.environments.stem.environment import StemGrader, StemRow

_TIME_LIMIT = 2.0
"""CPU seconds for each test of a labelled program."""
_SECONDS = 120.0


class LabelledExample(BaseModel):
    """A line of a corpus: an answer of some kind, and whether a careful human would accept it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    id: str
    """Name of the line."""
    correct: bool
    """Whether the answer deserves the reward."""
    why: str
    """What the line tests."""


class MathExample(LabelledExample):
    """An agent's last message on a question with a known answer."""

    gold: str
    """The gold answer, as LaTeX."""
    response: str
    """The whole last message."""
    bare: bool = False
    """The message has no box, and all of it is the answer."""
    source: str = ""
    """Published test that the answers are from; ``altered``: with another label than there."""


class MathPair(LabelledExample):
    r"""Two answers as inside ``\boxed{}``, ``correct`` if they are equal; ``why`` is their class."""

    gold: str
    answer: str
    one_way: bool = False
    """The gold answer is accepted where the other is the gold one: it is the closer value."""


class MathQuestion(LabelledExample):
    r"""An answer as inside ``\boxed{}`` to a question that it may only restate; ``why`` is its class."""

    question: str
    gold: str | list[str]
    answer: str


ExampleT = TypeVar("ExampleT", bound=LabelledExample)


@dataclass(slots=True)
class ConfusionCounts(Generic[ExampleT]):
    """Errors of a grader, false positives and false negatives apart."""

    positives: int = 0
    negatives: int = 0
    false_positives: list[ExampleT] = field(default_factory=list[ExampleT])
    false_negatives: list[ExampleT] = field(default_factory=list[ExampleT])

    @property
    def false_positive_rate(self) -> float:
        """Share of the wrong answers that were rewarded."""
        return len(self.false_positives) / max(1, self.negatives)

    @property
    def false_negative_rate(self) -> float:
        """Share of the right answers that were not."""
        return len(self.false_negatives) / max(1, self.positives)


def read_corpus(path: Path, model: type[ExampleT]) -> list[ExampleT]:
    """Read a corpus strictly. Raises ``ValidationError``: a line is no example of this model."""
    examples = [model.model_validate_json(line) for _, line in read_json_lines(path)]
    assert len({example.id for example in examples}) == len(examples), f"two lines of {path} have the same id"
    return examples


def count_confusion(pairs: Sequence[ExampleT], verdicts: Sequence[bool]) -> ConfusionCounts[ExampleT]:
    """Compare the verdicts of a grader with the labels."""
    found = ConfusionCounts[ExampleT]()
    for pair, said in zip(pairs, verdicts, strict=True):
        found.positives += pair.correct
        found.negatives += not pair.correct
        if said and not pair.correct:
            found.false_positives.append(pair)
        elif pair.correct and not said:
            found.false_negatives.append(pair)
    return found


class StemExample(LabelledExample):
    """A message of an agent to a question from science with a known answer."""

    row: dict[str, Any]
    """The row, without scripted trajectories."""
    response: str
    """The whole last message."""
    source: str = ""
    """The published test that the answer comes from, or that it is of our own."""

    @property
    def answer(self) -> str:
        """The message without thoughts."""
        return self.response.rpartition("</think>")[2]


async def is_right_by_rules(pair: StemExample, grader: StemGrader) -> bool:
    """Return whether the rules of ``stem`` reward an answer.

    Raises:
        GraderError, TaskError: see ``StemGrader.grade_by_rules``.
    """
    try:
        answer = last_boxed(pair.answer)
    except NoAnswerError:
        return False
    return (await grader.grade_by_rules(parse_row(StemRow, "stem", pair.row), answer)).verdict == "right"


def extract_answer(pair: MathExample) -> str | None:
    """Return the answer of a message as the environment finds it; a bare message is its own answer."""
    message = pair.response.rpartition("</think>")[2]
    try:
        return last_boxed(message)
    except NoAnswerError:
        return message if pair.bare and "\\boxed" not in message else None


class CodeExample(LabelledExample):
    """A program and tests that it passes or not."""

    tests: dict[str, Any]
    """As in a row."""
    program: str


async def is_rewarded(pair: CodeExample, leases: Leases) -> bool:
    """Return whether the grader rewards a program.

    Raises:
        SandboxError, GraderError: grading could not be done.
    """
    row = CodeRow.model_validate({"question": "?", "tests": pair.tests, "time_limit": _TIME_LIMIT})
    return (await grade(row, pair.program, leases, _SECONDS)).reward == 1.0
