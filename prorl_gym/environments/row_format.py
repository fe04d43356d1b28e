"""Strict models of rows, the scripted trajectories in them, and files of rows.

A file has one JSON object per line, in NeMo Gym's flat form, as environment and task, or bare. The flat form is
``{"responses_create_params": {"input", "tools"}, "agent_ref", "environment", "task"}``: the first field is the model's
prompt, ``task`` is our row with the gold answer, which never enters the prompt.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prorl_gym.config import config_error_of
from prorl_gym.environments.protocol import Environment, Episode, Leases, ScriptedStep
from prorl_gym.errors import ConfigError, FailureKind, TaskError
from prorl_gym.settings import ResolvedSettings, resolve_settings


class StrictModel(BaseModel):
    """A part of a row."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RowStep(StrictModel):
    """One turn of a scripted trajectory in a row; see ``ScriptedStep``."""

    text: str = ""
    tool: str | None = None
    arguments: dict[str, Any] | None = None


class TaskRow(StrictModel):
    """Fields of every row."""

    id: str = ""
    """Name of the row in messages."""
    question: str = Field(min_length=1)
    """The user's question; part of the prompt, verbatim."""
    gold_steps: tuple[RowStep, ...] = ()
    """Turns that solve the row, for ``validate`` and the oracle."""
    wrong_steps: tuple[RowStep, ...] = ()
    """Plausible turns that do not."""


Row = TypeVar("Row", bound=TaskRow)
Model = TypeVar("Model", bound=BaseModel)


def parse_row(model: type[Model], environment: str, row: Mapping[str, Any]) -> Model:
    """Read a row strictly. Raises ``TaskError`` (BAD_ROW) with the missing, unknown or wrong field."""
    try:
        return model.model_validate(row)
    except ValidationError as error:
        name = str(row.get("id") or "without id")[:80]
        complaint = config_error_of(error, model, f"{environment} row {name}")
        raise TaskError(FailureKind.BAD_ROW, complaint.what, complaint.fix) from None


def to_scripted_steps(steps: Sequence[RowStep]) -> list[ScriptedStep]:
    return [ScriptedStep(step.text, step.tool, step.arguments) for step in steps]


@dataclass(frozen=True, slots=True)
class DiskRow:
    """A row and its place."""

    where: str
    """File and line, for messages."""
    environment: str | None
    """``None`` in a bare row."""
    task: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The row's own id, or its place."""
        return str(self.task.get("id") or self.where)


def read_rows(path: Path) -> list[DiskRow]:
    """Read a file of rows. Raises ``ConfigError``: it cannot be read, holds no rows, or a line is no JSON object."""
    rows = [_read_row(line, where) for where, line in read_json_lines(path)]
    if not rows:
        raise ConfigError(f"{path}: holds no rows.", "Give a JSONL file with one row per line.")
    return rows


def read_json_lines(path: Path) -> list[tuple[str, str]]:
    """Return place and text of each line of a JSONL file that is not empty. Raises ``ConfigError``.

    Only a line feed ends a line: a JSON string may hold other line ends of Python's (U+2028, U+0085).
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ConfigError(f"{path}: cannot be read ({why}).", "Check the path.") from None
    return [(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _read_row(line: str, where: str) -> DiskRow:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON ({error}).", "Each line must be one JSON object.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object.", "Each line must be one JSON object.")
    row = cast(dict[str, Any], value)
    if isinstance(row.get("task"), dict) and isinstance(row.get("environment"), str):
        return DiskRow(where, row["environment"], row["task"])
    if "responses_create_params" not in row:
        return DiskRow(where, None, row)
    if not isinstance(row.get("task"), dict):
        raise ConfigError(f"{where}: 'task' is missing.", "A NeMo Gym row of ours has its row there.")
    return DiskRow(where, None, row["task"])


@runtime_checkable
class SupportsEpisodePlan(Protocol):
    """An environment that makes its prompt and tools without a sandbox, even if its ``init`` starts one."""

    def plan_episode(self, task: Any, leases: Leases, settings: ResolvedSettings) -> Episode:
        """Return what ``init`` would, without preparing anything."""
        ...


class _NoLeases:
    """For prompts; refuses every lease."""

    async def get_agent_sandbox(self, spec: Any) -> Any:
        raise ConfigError("This environment's prompt needs a sandbox.", "Make its rows with its own converter.")

    start_clean_sandbox = enter_context = get_agent_sandbox


async def to_gym_row(environment: Environment[Any], task: Mapping[str, Any], agent: str) -> dict[str, Any]:
    """Return a task as a flat NeMo Gym row for the agent instance of this name. Raises ``TaskError``."""
    settings = resolve_settings(environment.settings)
    parsed, leases = environment.parse_row(task), cast(Leases, _NoLeases())
    if isinstance(environment, SupportsEpisodePlan):
        episode = environment.plan_episode(parsed, leases, settings)
    else:
        episode = await environment.init(parsed, leases, settings)
    return {
        "responses_create_params": {
            "input": [{"role": message.role, "content": message.content} for message in episode.messages],
            "tools": [
                {
                    "type": "function",
                    "name": tool.spec.name,
                    "description": tool.spec.description,
                    "parameters": dict(tool.spec.parameters),
                    "strict": False,
                }
                for tool in episode.tools
            ],
        },
        "agent_ref": {"type": "responses_api_agents", "name": agent},
        "environment": environment.name,
        "task": dict(task),
    }
