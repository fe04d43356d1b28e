"""Index of the oracle's rows by the task text in a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import prorl_gym
from prorl_gym.environments import registry
from prorl_gym.environments.playback import gold_steps, task_text, wrong_steps
from prorl_gym.environments.protocol import Environment, ScriptedStep
from prorl_gym.environments.row_format import DiskRow, read_rows
from prorl_gym.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KnownRow:
    """A row and the environment that can play it."""

    name: str
    task_text: str
    environment: Environment[Any]
    task: dict[str, Any]

    def gold_steps(self) -> list[ScriptedStep]:
        """Return the turns that solve it."""
        return gold_steps(self.environment, self.task)

    def wrong_steps(self, seed: int) -> list[ScriptedStep]:
        """Return turns that do not solve it."""
        return wrong_steps(self.environment, self.task, seed)


class RowIndex:
    """Rows by task text.

    Args:
        rows: the rows to find.
    """

    def __init__(self, rows: Sequence[KnownRow]) -> None:
        self._rows = sorted(rows, key=lambda row: len(row.task_text), reverse=True)
        self.find = lru_cache(maxsize=4096)(self._find)
        """Return the row whose text a user turn contains, or ``None``; the longest text wins."""

    def __len__(self) -> int:
        return len(self._rows)

    def _find(self, user_text: str) -> KnownRow | None:
        return next((row for row in self._rows if row.task_text in user_text), None)


def load_rows(files: Sequence[Path]) -> RowIndex:
    """Read files of rows.

    Raises:
        ConfigError: a file cannot be read, or a row does not name its environment.
        TaskError: a row is bad, or its environment is unknown.
    """
    return RowIndex([_known_row(row) for file in files for row in read_rows(file)])


def example_files() -> list[Path]:
    """Return the example rows that ship with the package."""
    root = Path(prorl_gym.__file__).parent / "gym_root" / "environments"
    return sorted(root.glob("*/data/example.jsonl"))


def _known_row(row: DiskRow) -> KnownRow:
    if row.environment is None:
        raise ConfigError(f"{row.where}: 'environment' is missing.", "Give rows in NeMo Gym's form.")
    environment = registry.get(row.environment)
    text = task_text(row.task)
    if not text:
        raise ConfigError(f"{row.where}: no task text to find the row by.", "The oracle needs rows with a 'question'.")
    known = KnownRow(row.name, text, environment, dict(row.task))
    known.gold_steps()  # refuse a row without gold now, not in the middle of a demo
    return known
