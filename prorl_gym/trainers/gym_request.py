"""A NeMo Gym dataset row as a ``RolloutRequest``, and the group it belongs to.

Rows are flat Gym rows: ``responses_create_params``, ``agent_ref``, our ``environment`` and ``task``, optionally a
``prorl`` block, plus whatever index fields the caller stamped on them (``_ng_task_index`` and ``_ng_rollout_index`` by
Gym's collector and NeMo-RL's asynchronous trainer, ``_rowidx`` by every NeMo-RL trainer).
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prorl_gym.errors import FailureKind, TaskError
from prorl_gym.records import Identifier, RolloutRequest
from prorl_gym.settings import RolloutSettings

GROUP_IDLE_SECONDS = 600.0
GROUP_IDLE_ROWS = 4096

_INDEX_FIELDS = ("_ng_task_index", "_ng_rollout_index", "_ng_attempt_index", "_ng_rollout_id", "_rowidx")
_NOT_TASK = ("responses_create_params", "agent_ref", "environment", "prorl", "task", *_INDEX_FIELDS)


class ProrlBlock(BaseModel):
    """The optional ``prorl`` block of a row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_id: Identifier | None = None
    group_id: Identifier | None = None
    group_size: Annotated[int, Field(ge=1)] | None = None
    replica: Annotated[int, Field(ge=0)] | None = None
    evaluation: bool | None = None
    settings: RolloutSettings = RolloutSettings()


@dataclass(frozen=True, slots=True)
class RowDefaults:
    """Values of the agent server for rows that lack them."""

    environment: str | None = None
    run_id: str = "gym"
    settings: RolloutSettings = field(default_factory=RolloutSettings)
    evaluation: bool = False


def row_digest(row: Any) -> str:
    """Return a digest of everything in a row, or in a task: the same row posted again has the same key."""
    text = json.dumps(row, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def to_rollout_request(
    row: Mapping[str, Any], rollout_id: str, defaults: RowDefaults, group_resolver: "GroupResolver"
) -> RolloutRequest:
    """Read a row. Raises ``TaskError`` (``BAD_ROW``), naming the key."""
    try:
        block = ProrlBlock.model_validate(row.get("prorl") or {})
        environment = row.get("environment") or defaults.environment
        if not isinstance(environment, str):
            raise TaskError(FailureKind.BAD_ROW, "row: 'environment' is missing.", "Name one, for example 'math'.")
        group_id, group_size, replica = group_resolver.resolve(row, block)
        return RolloutRequest(
            rollout_id=rollout_id,
            run_id=block.run_id or defaults.run_id,
            group_id=group_id,
            group_size=group_size,
            replica=replica,
            environment=environment,
            task=row_task(row),
            settings=_merge_settings(row.get("responses_create_params"), block.settings, defaults.settings),
            evaluation=defaults.evaluation if block.evaluation is None else block.evaluation,
        )
    except ValidationError as error:
        raise _bad_row(error) from None


def row_settings(row: Mapping[str, Any]) -> RolloutSettings:
    """Return the sampling and limits that a row sets. Raises ``TaskError`` (``BAD_ROW``), naming the key."""
    try:
        block = ProrlBlock.model_validate(row.get("prorl") or {})
        return _merge_settings(row.get("responses_create_params"), block.settings, RolloutSettings())
    except ValidationError as error:
        raise _bad_row(error) from None


def _bad_row(error: ValidationError) -> TaskError:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return TaskError(FailureKind.BAD_ROW, f"row: '{where}' is wrong: {first['msg']}.")


def row_task(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task: the ``task`` object, or, for rows of other makers, every field that is not plumbing."""
    task = row.get("task")
    if task is None:
        return {key: value for key, value in row.items() if key not in _NOT_TASK}
    if not isinstance(task, Mapping):
        raise TaskError(FailureKind.BAD_ROW, f"row: 'task' is {type(task).__name__}, not an object.")
    return dict(task)  # pyright: ignore[reportUnknownArgumentType]


def _merge_settings(params: object, block: RolloutSettings, defaults: RolloutSettings) -> RolloutSettings:
    """Merge: the row's ``prorl.settings`` > what the trainer wrote into ``responses_create_params`` > defaults.

    ``max_output_tokens`` bounds one model call in the Responses API, so it becomes ``max_turn_tokens``.
    """
    names = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_turn_tokens"}
    written: Mapping[str, Any] = cast(Mapping[str, Any], params) if isinstance(params, Mapping) else {}
    given = {ours: written[theirs] for theirs, ours in names.items() if written.get(theirs) is not None}
    merged = defaults.model_dump(exclude_none=True) | given | block.model_dump(exclude_none=True)
    return RolloutSettings.model_validate(merged)


@dataclass(slots=True)
class _OpenGroup:
    name: str
    members: set[int] = field(default_factory=set[int])
    last_row_at: float = 0.0
    """When the last row came."""
    last_row_number: int = 0
    """How many rows had been placed by then."""


@dataclass(slots=True)
class GroupResolver:
    """Finds the group of a row; never guesses.

    In this order: the row's own ``prorl.group_id``; ``_ng_task_index`` (one index per group); the task's content, when
    the number of replicas is known: rows of one task fill a group in the order they come, a new one opens when it is
    full or already holds that ``_rowidx``. Otherwise the row is not grouped.

    The rows of a group are posted in one burst. One that is not full (a row was dropped, or retried on its own) is
    therefore closed when ``GROUP_IDLE_SECONDS`` have passed since its last row, or ``GROUP_IDLE_ROWS`` rows of others
    were placed since: a later epoch of the same task must not fill it up.
    """

    run_id: str
    size: int | None = None
    """How many rollouts the trainer makes of one prompt (``num_generations_per_prompt``)."""
    clock: Callable[[], float] = monotonic
    open_groups: dict[str, _OpenGroup] = field(default_factory=dict[str, _OpenGroup])
    """Groups that wait for rows, by task; the one that was joined longest ago comes first."""
    _opened: int = 0
    _placed: int = 0

    def resolve(self, row: Mapping[str, Any], block: ProrlBlock) -> tuple[str | None, int, int]:
        """Return group id, group size and replica of a row."""
        index = _integer(row, "_ng_rollout_index")
        row_index = _integer(row, "_rowidx")
        replica = next((r for r in (block.replica, index, row_index) if r is not None), 0)
        size = block.group_size or self.size
        if block.replica is None and size is not None:
            replica %= size
        group = block.group_id
        if group is None and size is not None:
            task_index = _integer(row, "_ng_task_index")
            if task_index is not None:
                group = f"{self.run_id}-{row_digest(row_task(row))[:12]}-{task_index}"
            elif row_index is not None:
                group = self._resolve_by_content(row, row_index, size)
        return group, max(size or 1, replica + 1), replica

    def _resolve_by_content(self, row: Mapping[str, Any], row_index: int, size: int) -> str:
        self._close_idle()
        task = row_digest(row_task(row))[:12]
        group = self.open_groups.pop(task, None)
        if group is None or row_index in group.members:
            self._opened += 1
            group = _OpenGroup(f"{self.run_id}-{task}-g{self._opened}")
        group.members.add(row_index)
        self._placed += 1
        group.last_row_at, group.last_row_number = self.clock(), self._placed
        if len(group.members) < size:
            self.open_groups[task] = group
        return group.name

    def _close_idle(self) -> None:
        now = self.clock()
        while self.open_groups:
            task, oldest = next(iter(self.open_groups.items()))
            if (
                now - oldest.last_row_at < GROUP_IDLE_SECONDS
                and self._placed - oldest.last_row_number < GROUP_IDLE_ROWS
            ):
                return
            del self.open_groups[task]


def _integer(row: Mapping[str, Any], key: str) -> int | None:
    value = row.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
