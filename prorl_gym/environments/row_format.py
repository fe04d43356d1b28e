"""Rows on disk: one JSON object per line, in NeMo Gym's flat form, as environment and task, or bare.

The flat form is ``{"responses_create_params": {"input", "tools"}, "agent_ref", "environment", "task"}``: the first
field is the model's prompt, ``task`` is our row with the gold answer, which never enters the prompt.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from prorl_gym.environments.protocol import Environment, Episode, Leases
from prorl_gym.errors import ConfigError
from prorl_gym.settings import ResolvedSettings, resolve_settings


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
    """Read a file of rows.

    Raises:
        ConfigError: the file cannot be read, holds no rows, or a line is not a JSON object.
    """
    rows = [_read_row(line, where) for where, line in read_json_lines(path)]
    if not rows:
        raise ConfigError(f"{path}: holds no rows.", "Give a JSONL file with one row per line.")
    return rows


def read_json_lines(path: Path) -> list[tuple[str, str]]:
    """Return place and text of each line of a JSONL file that is not empty.

    Only a line feed ends a line: a JSON string may hold other line ends of Python's (U+2028, U+0085).

    Raises:
        ConfigError: the file cannot be read.
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
    wrapped = isinstance(row.get("environment"), str) and isinstance(row.get("task"), dict)
    if wrapped:
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
    """Return a task as a flat NeMo Gym row.

    Args:
        environment: makes the prompt and the tools.
        task: our row.
        agent: name of the NeMo Gym agent instance that serves it.

    Raises:
        TaskError: the row is bad.
    """
    settings = resolve_settings(environment.settings)
    parsed, leases = environment.parse_row(task), cast(Leases, _NoLeases())
    if isinstance(environment, SupportsEpisodePlan):
        episode = environment.plan_episode(parsed, leases, settings)
    else:
        episode = await environment.init(parsed, leases, settings)
    return {
        "responses_create_params": _to_responses_params(episode),
        "agent_ref": {"type": "responses_api_agents", "name": agent},
        "environment": environment.name,
        "task": dict(task),
    }


def _to_responses_params(episode: Episode) -> dict[str, Any]:
    """Return prompt and tools in the form of the Responses API."""
    return {
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
    }
