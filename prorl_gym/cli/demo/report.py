"""What a run came to: the table, and NeMo-RL's verdict on every row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from prorl_gym.trainers.nemo_rl import TrainerContractError, check_group, check_result

Results = Sequence[Mapping[str, Any]]

_STAGES = {"queue": "queued", "INIT": "init", "RUN": "run", "EVAL": "eval"}
"""Columns of seconds, and what their keys in a row are called."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a trainer could use the rows."""

    complaints: list[str]
    masked: int
    """Rows without a reward: something that the model is not to blame for went wrong."""

    @property
    def ok(self) -> bool:
        """All rows usable, none masked."""
        return not self.complaints and not self.masked


def judge(results: Results, expected: int) -> Verdict:
    """Apply NeMo-RL's checks to every row and every group.

    Args:
        results: the rows.
        expected: how many there must be.
    """
    complaints = [] if len(results) == expected else [f"{len(results)} rows came back, {expected} were sent"]
    for result in results:
        try:
            check_result(result)
        except TrainerContractError as error:
            complaints.append(str(error))
    for group in _groups(results).values():
        try:
            check_group(group)
        except TrainerContractError as error:
            complaints.append(str(error))
    return Verdict(complaints, sum(bool(result.get("mask_sample")) for result in results))


def table(results: Results) -> Table:
    """Return the table: one line per environment."""
    repeats = max((len(group) for group in _groups(results).values()), default=1)
    caption = "reward: mean; queue, INIT, RUN, EVAL: mean seconds per rollout"
    out = Table(box=None, padding=(0, 1, 0, 0), caption=caption)
    for name in ("environment", "rollouts", "reward", "pass@1", f"pass@{repeats}", "turns", "tokens", *_STAGES):
        out.add_column(name, justify="left" if name == "environment" else "right", no_wrap=True)
    for name in sorted({str(result.get("environment")) for result in results}):
        out.add_row(*_line(name, [r for r in results if str(r.get("environment")) == name]))
    return out


def pass_at(results: Results, any_of: bool) -> float:
    """Return the share of solved rollouts, or, with ``any_of``, of tasks that some rollout solved.

    A rollout solves its task when its reward is 1 or more. Masked rows are no measurement and do not count.
    """
    groups = [[_solved(r) for r in group if not r.get("mask_sample")] for group in _groups(results).values()]
    groups = [group for group in groups if group]
    if not groups:
        return 0.0
    return fmean(any(group) if any_of else fmean(group) for group in groups)


def _line(name: str, rows: Results) -> list[str]:
    def mean(key: str) -> float:
        return fmean(float(row.get(key) or 0.0) for row in rows)

    measured = [float(row["reward"]) for row in rows if not row.get("mask_sample")]
    return [
        name,
        str(len(rows)),
        f"{fmean(measured):.2f}" if measured else "-",
        f"{pass_at(rows, any_of=False):.2f}",
        f"{pass_at(rows, any_of=True):.2f}",
        f"{mean('prorl_turns'):.1f}",
        f"{mean('prorl_sampled_tokens'):.0f}",
        *(f"{mean(f'prorl_{stage}_seconds'):.1f}" for stage in _STAGES.values()),
    ]


def _groups(results: Results) -> dict[Any, list[Mapping[str, Any]]]:
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault(result.get("_ng_task_index"), []).append(result)
    return groups


def _solved(result: Mapping[str, Any]) -> bool:
    return float(result.get("reward") or 0.0) >= 1.0
