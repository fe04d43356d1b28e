"""Labelled corpora for graders: reading them, and counting false positives and false negatives apart."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from prorl_gym.environments.gym_rows import json_lines
from prorl_gym.environments.math.boxed import NoAnswerError, last_boxed
from prorl_gym.errors import ConfigError


class Pair(BaseModel):
    """What every line of a corpus has: an answer of a kind, and what a careful corrector says."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    id: str
    """Name of the line."""
    correct: bool
    """Whether the answer deserves the reward."""
    why: str
    """What the line tries."""


class MathPair(Pair):
    """A message of an agent to a question with a known answer."""

    gold: str
    """The gold answer, as LaTeX."""
    response: str
    """The whole last message."""
    bare: bool = False
    """The message has no box, and all of it is the answer."""
    source: str = ""
    """The published test that the answers come from; ``altered``: with another label than there."""


PairT = TypeVar("PairT", bound=Pair)


@dataclass(slots=True)
class Confusion(Generic[PairT]):
    """What a grader got wrong, the two signs apart."""

    positives: int = 0
    negatives: int = 0
    false_positives: list[PairT] = field(default_factory=list[PairT])
    false_negatives: list[PairT] = field(default_factory=list[PairT])

    @property
    def false_positive_rate(self) -> float:
        """Share of the wrong answers that were rewarded."""
        return len(self.false_positives) / max(1, self.negatives)

    @property
    def false_negative_rate(self) -> float:
        """Share of the right answers that were not."""
        return len(self.false_negatives) / max(1, self.positives)


def read_corpus(path: Path, model: type[PairT]) -> list[PairT]:
    """Read a corpus strictly.

    Raises:
        ConfigError: a line is no such pair, or two have the same id.
    """
    pairs: list[PairT] = []
    seen: set[str] = set()
    for where, line in json_lines(path):
        try:
            value: Any = json.loads(line)
            pair = model.model_validate(value)
        except (ValueError, ValidationError) as error:
            raise ConfigError(f"{where}: not a labelled pair ({error}).", "Correct the line.") from None
        if pair.id in seen:
            raise ConfigError(f"{where}: the id '{pair.id}' is taken.", "Give each line its own id.")
        seen.add(pair.id)
        pairs.append(pair)
    return pairs


def count(pairs: Sequence[PairT], verdicts: Sequence[bool]) -> Confusion[PairT]:
    """Compare the verdicts of a grader with the labels."""
    found = Confusion[PairT]()
    for pair, said in zip(pairs, verdicts, strict=True):
        found.positives += pair.correct
        found.negatives += not pair.correct
        if said and not pair.correct:
            found.false_positives.append(pair)
        elif pair.correct and not said:
            found.false_negatives.append(pair)
    return found


def final_answer(pair: MathPair) -> str | None:
    """Return what a message answers, as the environment finds it; a bare one is its own answer."""
    message = pair.response.rpartition("</think>")[2]
    try:
        return last_boxed(message)
    except NoAnswerError:
        return message if pair.bare and "\\boxed" not in message else None
