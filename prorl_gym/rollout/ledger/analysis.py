"""Lists and aggregates for people, over rollouts that match a filter.

Each reads at most the newest ``MAX_ANALYZED`` outcomes of a run (or of all), which an index finds, so that its time is
bounded however long the service has run. Columns of the selection: ``_FINISHED``.
"""

import json
import math
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from prorl_gym.client import wire_models
from prorl_gym.rollout.ledger.encoding import clamp_int64
from prorl_gym.rollout.ledger.queries import IN_JSON_LIST, SUMMARY_COLUMNS, summary_of
from prorl_gym.rollout.protocol import ListPage, ProblemOrder, RolloutFilter, RolloutState

MAX_ANALYZED = 100_000
"""Finished rollouts that one list or aggregate reads."""

_MAX_POINTS = 5_000
_MAX_ENDS = 200
_MAX_NAMES = 200
_MAX_MEMBERS = 64

_FINISHED = f"""{SUMMARY_COLUMNS}, o.row_id AS problem
FROM outcomes o JOIN rollouts r USING (seq)"""

_PENDING = """
SELECT r.seq, rollout_id, run_id, group_id, group_size, replica, environment, evaluation,
    coalesce(CASE WHEN json_valid(b.body) THEN
        coalesce(json_extract(b.body, '$.task.id'), json_extract(b.body, '$.task.instance_id')) END,
        group_id, rollout_id) AS problem,
    coalesce(begun, attempt) AS attempt, accepted_at
FROM rollouts r LEFT JOIN bodies b USING (seq) WHERE cursor IS NULL"""
"""A row without an id of its own has its group's name: only its record has the hash of its task."""

_PENDING_SORTS = {"rollout": "rollout_id", "run": "run_id", "environment": "environment", "problem": "problem"}

_SORTS = _PENDING_SORTS | {
    "finished": "cursor",
    "took": "finished_at - accepted_at",
    "waited": "begun_at - accepted_at",
    "reward": "reward",
    "turns": "turns",
    "tokens": "sampled_tokens",
    "version": "oldest_version",
    "outcome": "status || detail",
    "why": "why",
}

_PROBLEM_ORDERS = {
    "newest": "newest DESC",
    "worst": "mean IS NULL, mean, rewarded DESC, newest DESC",
    "best": "mean IS NULL, mean DESC, rewarded DESC, newest DESC",
    "problem": "run_id, environment, problem",
}

_SPREADS = {name: _SORTS[name] for name in ("waited", "took", "turns", "tokens")}

_REWARD_CLASSES = {"above": "reward > 0", "zero": "reward <= 0", "none": "reward IS NULL"}


class LedgerAnalysis:
    """Reads on a connection of its own, or the writer's. Raises ``sqlite3.Error`` where the file fails."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def list_rollouts(
        self, wanted: RolloutFilter, state: RolloutState, page: ListPage, running: Sequence[str]
    ) -> wire_models.RolloutListResponse:
        finished = self._list_finished(wanted, page) if state == "finished" else []
        is_last = len(finished) < page.limit or (page.sort, page.descending) != ("finished", True)
        return wire_models.RolloutListResponse(
            rollouts=tuple(finished),
            before=None if is_last else finished[-1].cursor,
            pending=() if state == "finished" else tuple(self._list_pending(wanted, page, running, state)),
            counts=self._count_states(wanted, running),
        )

    def _list_finished(self, wanted: RolloutFilter, page: ListPage) -> list[wire_models.RolloutSummary]:
        direction = "DESC" if page.descending else "ASC"
        limits = (clamp_int64(page.limit), clamp_int64(page.offset))
        if page.sort == "finished":  # by the index, without the bound: it ends with the page
            where, values = _conditions(wanted, finished=True)
            if page.before:
                where, values = [*where, "cursor < ?"], [*values, clamp_int64(page.before)]
            query = f"SELECT * FROM ({_FINISHED}) {_where(where)} ORDER BY cursor {direction} LIMIT ? OFFSET ?"
            return [summary_of(row) for row in self._db.execute(query, (*values, *limits))]
        source, values = _selection(wanted)
        order = f"{_SORTS[page.sort]} {direction} NULLS LAST, cursor DESC"
        query = f"SELECT * FROM {source} ORDER BY {order} LIMIT ? OFFSET ?"
        return [summary_of(row) for row in self._db.execute(query, (*values, *limits))]

    def _list_pending(
        self, wanted: RolloutFilter, page: ListPage, running: Sequence[str], state: wire_models.PendingState
    ) -> list[wire_models.PendingSummary]:
        where, values = _conditions(wanted, finished=False)
        where.append(f"rollout_id {'' if state == 'running' else 'NOT '}{IN_JSON_LIST}")
        order = _PENDING_SORTS.get(page.sort, "seq")
        # Without a column of their own, the oldest come first: they have taken longest.
        direction = "DESC" if page.descending == (page.sort in _PENDING_SORTS) else "ASC"
        rows = self._db.execute(
            "SELECT rollout_id, run_id, group_id, group_size, replica, environment, evaluation, problem, attempt,"
            f" accepted_at FROM ({_PENDING}) {_where(where)} ORDER BY {order} {direction} LIMIT ? OFFSET ?",
            (*values, json.dumps(running), clamp_int64(page.limit), clamp_int64(page.offset)),
        )
        # The service knows the place better, unless it just changed.
        place: wire_models.PendingPlace = "record" if state == "running" else "queue"
        found = _named(rows)
        for row in found:
            row["evaluation"] = bool(row["evaluation"])
        return [wire_models.PendingSummary(**row, place=place, since=None) for row in found]

    def _count_states(self, wanted: RolloutFilter, running: Sequence[str]) -> wire_models.StateCounts:
        where, values = _conditions(wanted, finished=False)
        among = f"sum(rollout_id {IN_JSON_LIST})"
        pending, begun = self._db.execute(
            f"SELECT count(*), coalesce({among}, 0) FROM ({_PENDING}) {_where(where)}", (json.dumps(running), *values)
        ).fetchone()
        source, values = _selection(wanted)
        if wanted == RolloutFilter(run_id=wanted.run_id):  # by an index alone
            run = "" if wanted.run_id is None else "WHERE run_id = ?"
            source, values = f"(SELECT 1 FROM outcomes {run} LIMIT {MAX_ANALYZED})", values[:1]
        (finished,) = self._db.execute(f"SELECT count(*) FROM {source}", values).fetchone()
        return wire_models.StateCounts(waiting=pending - begun, running=begun, finished=finished)

    def analyze(self, wanted: RolloutFilter) -> wire_models.AnalysisResponse:
        source, values = _selection(wanted)
        self._db.execute("DROP TABLE IF EXISTS temp.selected")
        self._db.execute(f"CREATE TEMP TABLE selected AS SELECT * FROM {source}", values)
        try:
            (finished,) = self._db.execute("SELECT count(*) FROM selected").fetchone()
            return wire_models.AnalysisResponse(
                finished=finished,
                rewards=tuple(self._reward_points()),
                ends=tuple(self._end_counts()),
                spreads={name: spread for name, column in _SPREADS.items() if (spread := self._spread(column))},
                runs=self._names("run_id"),
                environments=self._names("environment"),
            )
        finally:
            self._db.execute("DROP TABLE temp.selected")

    def _reward_points(self) -> list[wire_models.RewardPoint]:
        rows = self._db.execute(
            "SELECT run_id, environment, evaluation, oldest_version AS version, count(*) AS count, avg(reward) AS mean,"
            " avg(reward * reward) AS squares, sum(reward > 0) AS solved FROM selected WHERE reward IS NOT NULL"
            " GROUP BY 1, 2, 3, 4 ORDER BY oldest_version DESC, run_id, environment LIMIT ?",
            (_MAX_POINTS,),
        )
        return [
            wire_models.RewardPoint(**row, deviation=math.sqrt(max(row["squares"] - row["mean"] * row["mean"], 0.0)))
            for row in _named(rows)
        ]

    def _end_counts(self) -> list[wire_models.EndCount]:
        # Messages of failures differ too much to be counted apart. Of columns that are not grouped, SQLite takes the
        # values in the row that max(cursor) is from.
        rows = self._db.execute(
            "SELECT environment, status, detail, cause, why, reward IS NOT NULL AS zero, count(*) AS count, rollout_id,"
            " max(cursor) AS newest FROM selected WHERE reward IS NULL OR reward <= 0"
            " GROUP BY 1, 2, 3, 4, 6, CASE WHEN reward IS NOT NULL THEN why END"
            " ORDER BY count(*) DESC, max(cursor) DESC LIMIT ?",
            (_MAX_ENDS,),
        )
        return [wire_models.EndCount(**row) for row in _named(rows)]

    def _spread(self, expression: str) -> wire_models.Spread | None:
        known = f"FROM selected WHERE {expression} IS NOT NULL"
        (count,) = self._db.execute(f"SELECT count(*) {known}").fetchone()
        if not count:
            return None
        places = [max(math.ceil(share * count), 1) for share in (0.5, 0.9, 1.0)]
        ranked = f"SELECT {expression} AS value, row_number() OVER (ORDER BY {expression}) AS place {known}"
        found = dict(
            self._db.execute(f"SELECT place, value FROM ({ranked}) WHERE place {IN_JSON_LIST}", [json.dumps(places)])
        )
        p50, p90, largest = (max(found[place], 0) for place in places)
        return wire_models.Spread(p50=p50, p90=p90, max=largest)

    def _names(self, column: str) -> tuple[str, ...]:
        rows = self._db.execute(
            f"SELECT {column} FROM (SELECT seq, {column} FROM rollouts ORDER BY seq DESC LIMIT {MAX_ANALYZED})"
            f" GROUP BY 1 ORDER BY max(seq) DESC LIMIT {_MAX_NAMES}"
        )
        return tuple(name for (name,) in rows)

    def list_problems(
        self, wanted: RolloutFilter, order: ProblemOrder, offset: int, limit: int
    ) -> wire_models.ProblemsResponse:
        source, values = _selection(wanted)
        grouped = (
            "SELECT run_id, environment, problem, count(*) AS count, count(reward) AS rewarded,"
            " coalesce(sum(reward > 0), 0) AS solved, avg(reward) AS mean, max(cursor) AS newest"
            f" FROM {source} GROUP BY 1, 2, 3"
        )
        total, never, always = self._db.execute(
            "SELECT count(*), coalesce(sum(rewarded > 0 AND solved = 0), 0),"
            f" coalesce(sum(rewarded > 0 AND solved = rewarded), 0) FROM ({grouped})",
            values,
        ).fetchone()
        page = (*values, clamp_int64(limit), clamp_int64(offset))
        rows = _named(self._db.execute(f"{grouped} ORDER BY {_PROBLEM_ORDERS[order]} LIMIT ? OFFSET ?", page))
        members = self._members(source, values, [row["problem"] for row in rows])
        return wire_models.ProblemsResponse(
            problems=tuple(
                wire_models.Problem(**row, members=tuple(members[row["run_id"], row["environment"], row["problem"]]))
                for row in rows
            ),
            total=total,
            never_solved=never,
            always_solved=always,
        )

    def _members(
        self, source: str, values: Sequence[object], problems: Sequence[str]
    ) -> dict[tuple[str, str, str], list[wire_models.ProblemMember]]:
        ranked = (
            "SELECT *, row_number() OVER (PARTITION BY run_id, environment, problem ORDER BY cursor DESC) AS age"
            f" FROM {source} WHERE problem {IN_JSON_LIST}"
        )
        rows = self._db.execute(
            "SELECT run_id, environment, problem, rollout_id, group_id, group_size, replica, oldest_version AS version,"
            f" status, detail, why, reward, masked FROM ({ranked}) WHERE age <= ?"
            " ORDER BY oldest_version NULLS LAST, group_id, replica, cursor",
            (*values, json.dumps(problems), _MAX_MEMBERS),
        )
        found: defaultdict[tuple[str, str, str], list[wire_models.ProblemMember]] = defaultdict(list)
        for row in _named(rows):
            found[row["run_id"], row["environment"], row["problem"]].append(wire_models.ProblemMember(**row))
        return found


def _named(rows: sqlite3.Cursor) -> list[dict[str, Any]]:
    names = [column[0] for column in rows.description]
    return [dict(zip(names, row, strict=True)) for row in rows]


def _selection(wanted: RolloutFilter) -> tuple[str, list[object]]:
    """Return the newest finished rollouts of the run that match, as a source of rows, and its parameters."""
    bound = "" if wanted.run_id is None else "WHERE o.run_id = ?"
    newest = f"SELECT * FROM ({_FINISHED} {bound} ORDER BY o.cursor DESC LIMIT {MAX_ANALYZED})"
    where, values = _conditions(wanted, finished=True)
    return f"({newest} {_where(where)})", [*([] if wanted.run_id is None else [wanted.run_id]), *values]


def _conditions(wanted: RolloutFilter, *, finished: bool) -> tuple[list[str], list[object]]:
    """Return the SQL conditions of a filter, and their parameters. Finished-only fields match no pending rollout."""
    where: list[str] = []
    values: list[object] = []

    def demand(condition: str, *parameters: object) -> None:
        where.append(condition)
        values.extend(parameters)

    for column in ("run_id", "group_id", "environment", "problem", "evaluation"):
        value = getattr(wanted, column)
        if value is not None:
            demand(f"{column} = ?", value)
    if wanted.prefix is not None:  # a range, which the index on the ids serves; no identifier has this character
        demand("rollout_id >= ? AND rollout_id < ?", wanted.prefix, f"{wanted.prefix}\U0010ffff")
    searched = ["rollout_id", "problem", "coalesce(group_id, '')", *(["detail", "why"] if finished else [])]
    if wanted.text:
        demand(f"instr(lower({' || char(10) || '.join(searched)}), lower(?))", wanted.text)
    outcome = {"status": wanted.status, "detail": wanted.detail, "why": wanted.why, "oldest_version": wanted.version}
    for column, value in outcome.items():
        if value is not None:
            demand(f"{column} = ?" if finished else "FALSE", *([value] if finished else []))
    if wanted.reward is not None:
        demand(_REWARD_CLASSES[wanted.reward] if finished else "FALSE")
    return where, values


def _where(conditions: Sequence[str]) -> str:
    return f"WHERE {' AND '.join(conditions)}" if conditions else ""
