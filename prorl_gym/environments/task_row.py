"""Strict models of rows, and the scripted trajectories in them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prorl_gym.config import config_error_of
from prorl_gym.environments.protocol import ScriptedStep
from prorl_gym.errors import FailureKind, TaskError


class RowStep(BaseModel):
    """One turn of a scripted trajectory in a row; see ``ScriptedStep``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str = ""
    tool: str | None = None
    arguments: dict[str, Any] | None = None

    def to_scripted_step(self) -> ScriptedStep:
        """Return the step for players."""
        return ScriptedStep(self.text, self.tool, self.arguments)


class TaskRow(BaseModel):
    """Fields of every row."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    id: str = ""
    """Name of the row in messages."""
    question: str = Field(min_length=1)
    """What the user asks; part of the prompt, verbatim."""
    gold_steps: tuple[RowStep, ...] = ()
    """Turns that solve the row, for ``validate`` and the oracle."""
    wrong_steps: tuple[RowStep, ...] = ()
    """Plausible turns that do not."""


Row = TypeVar("Row", bound=TaskRow)


def parse_row(model: type[Row], environment: str, row: Mapping[str, Any]) -> Row:
    """Read a row strictly.

    Raises:
        TaskError: ``BAD_ROW``, naming the row and the missing, unknown or wrong field.
    """
    try:
        return model.model_validate(row)
    except ValidationError as error:
        name = str(row.get("id") or "without id")[:80]
        complaint = config_error_of(error, model, f"{environment} row {name}")
        raise TaskError(FailureKind.BAD_ROW, complaint.what, complaint.fix) from None


def to_scripted_steps(steps: Sequence[RowStep]) -> list[ScriptedStep]:
    """Return the steps for players."""
    return [step.to_scripted_step() for step in steps]
