"""The rows of a file, checked before anything is sent: an error names file and line instead of failing a rollout."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from prorl_gym.config import load_config
from prorl_gym.environments import registry
from prorl_gym.environments.row_format import DiskRow, read_json_lines, read_rows
from prorl_gym.errors import ConfigError, TaskError
from prorl_gym.records import RolloutRequest, new_rollout_id

MAX_SOURCE = 1024
"""Longest ``row_source``, in characters."""
_GYM_KEYS = ("responses_create_params", "agent_ref", "prorl")
"""Keys of a NeMo Gym row besides ``environment`` and ``task``; what its collector stamps on begins with ``_``."""


def read_requests(file: Path, run: str, group_size: int, *, check: bool = True) -> list[RolloutRequest]:
    """Return ``group_size`` requests of each line of a JSONL file; lines that name no run belong to ``run``.

    With ``check`` each task is parsed with its environment, which must be installed here. Raises ``ConfigError`` about
    the first wrong line, with the number of wrong lines, or if there are no lines.
    """
    requests: list[RolloutRequest] = []
    wrong: list[ConfigError] = []
    for where, text in read_json_lines(file):
        try:
            made = _line_requests(_parse_line(text, where), where, run, group_size)
            if check:
                registry.get(made[0].environment).parse_row(made[0].task)
            requests += made
        except ConfigError as error:
            wrong.append(error)
        except TaskError as error:
            wrong.append(ConfigError(f"{where}: {error.what}", error.fix))
    if len(wrong) > 1:
        raise ConfigError(f"{wrong[0].what} (Wrong lines: {len(wrong)}.)", wrong[0].fix)
    if wrong:
        raise wrong[0]
    if not requests:
        raise ConfigError(f"{file}: holds no rows.", "Give a JSONL file with one row per line.")
    return requests


def read_rows_of(name: str, file: Path) -> list[DiskRow]:
    """Read the rows of one environment.

    Raises ``ConfigError`` if the file cannot be read or has a row for another environment, ``TaskError`` if the
    environment is unknown.
    """
    registry.get(name)  # otherwise a slip in the name would look like rows for another environment
    rows = read_rows(file)
    for row in rows:
        if row.environment not in (None, name):
            raise ConfigError(f"{row.where}: this row is for environment '{row.environment}'.", f"Not for '{name}'.")
    return rows


def _line_requests(line: Mapping[str, Any], where: str, run: str, group_size: int) -> list[RolloutRequest]:
    """Turn a line into requests; of a NeMo Gym row, environment, task and ``prorl`` block are used."""
    block: Any = line.get("prorl") or {}
    if not isinstance(block, dict):
        raise ConfigError(f"{where}: 'prorl' is not an object.", "Give keys and values there, or leave it out.")
    fields: dict[str, Any] = {
        "row_source": where[-MAX_SOURCE:],
        **block,
        **{name: value for name, value in line.items() if _is_request_key(name, where)},
    }
    if group_size > 1:
        fields |= {"group_id": fields.get("group_id") or new_rollout_id(), "group_size": group_size}
        fields.pop("rollout_id", None)
    return [
        load_config(RolloutRequest, {"run_id": run, **fields, **({"replica": replica} if replica else {})}, where)
        for replica in range(group_size)
    ]


def _is_request_key(name: str, where: str) -> bool:
    """Return whether a key of a line is a field of a request, not a key of NeMo Gym."""
    if name in RolloutRequest.model_fields:
        return True
    if name in _GYM_KEYS or name.startswith("_"):
        return False
    known = sorted({*RolloutRequest.model_fields, *_GYM_KEYS})
    close = get_close_matches(name, known, n=1)
    hint = f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(known)}. The row's own keys go into 'task'."
    raise ConfigError(f"{where}: unknown key '{name[:80]}'.", hint)


def _parse_line(line: str, where: str) -> dict[str, Any]:
    try:
        found = TypeAdapter(dict[str, Any]).validate_json(line)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ConfigError(f"{where}: no JSON object ({reason}).", "Each line is one JSON object.") from None
    for name in ("environment", "task"):
        if name not in found:
            raise ConfigError(f"{where}: '{name}' is missing.", "Each line needs 'environment' and 'task'.")
    return found
