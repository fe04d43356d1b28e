"""``prorl-gym watch``: rollouts as they finish; a table that is updated on a terminal, lines in a pipe."""

import asyncio
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from prorl_gym.cli.service_client.service_connection import (
    CONNECT_SECONDS,
    LOCAL_URL,
    OUTAGE_SECONDS,
    UrlOption,
    connect,
    outcome_label,
    printable,
    rollout_summary,
)

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from prorl_gym.client import Client, DeliveredRecord, ServiceStatus
    from prorl_gym.records import Rollout

_REFRESH_SECONDS = 0.25
"""Seconds between two updates of the table."""

_STATUS_SECONDS = 2.0
"""Seconds between two requests for the service's queues, which are in no stream."""

_RATE_WINDOW_SECONDS = 30.0
"""Seconds over which rollouts per second are counted."""


def watch(
    run: Annotated[str | None, typer.Option("--run", help="Only rollouts of this run.")] = None,
    cursor: Annotated[int, typer.Option(min=0, help="Only records after this cursor.")] = 0,
    follow: Annotated[bool, typer.Option(help="Wait for further ones.")] = True,
    as_json: Annotated[bool, typer.Option("--full", help="Print whole records, one JSON object a line.")] = False,
    lines: Annotated[
        bool | None,
        typer.Option("--lines/--table", help="Print a line for each, or a table; a table on terminals by default."),
    ] = None,
    url: UrlOption = LOCAL_URL,
) -> None:
    """Watch rollouts finish until Ctrl-C (exit code 130). Exit code 1: with --no-follow, none has finished."""
    if run is not None and follow:
        _note_unknown_run(run, url)
    in_lines = as_json or (not sys.stdout.isatty() if lines is None else lines)
    seen = _watch_lines(run, cursor, follow, as_json, url) if in_lines else _watch_table(run, cursor, follow, url)
    if not (seen or follow or cursor):  # with a cursor, no news is no error
        typer.echo(f"nothing to show: no rollout{f' of run {run}' if run else ''} is finished", err=True)
        raise typer.Exit(1)


def _note_unknown_run(run: str, url: str) -> None:
    """Say so if no rollout of the run was ever submitted: it may be misspelt, or begin later."""
    with connect(url) as client:
        if client.rollouts(run, limit=1).rollouts or client.unacknowledged(run).rollouts:
            return
        known = dict.fromkeys(one.run_id for one in client.rollouts(limit=1000).rollouts)
    others = f" Runs with finished rollouts: {', '.join(list(known)[:10])}." if known else ""
    typer.echo(f"no rollout of run {run} was submitted yet: waiting for the first.{others}", err=True)


def _watch_lines(run: str | None, cursor: int, follow: bool, full: bool, url: str) -> int:
    seen = 0
    with connect(url, survive_restarts=follow) as client:
        for one in client.stream(run, cursor, follow=follow):
            seen += 1
            typer.echo(one.rollout.model_dump_json() if full else f"{one.cursor:>6} {rollout_summary(one.rollout)}")
    return seen


def _watch_table(run: str | None, cursor: int, follow: bool, url: str) -> int:
    stats = _RolloutStats()
    try:
        asyncio.run(_show(stats, run, cursor, follow, url))
    except KeyboardInterrupt:
        sys.exit(130)
    return stats.finished


async def _show(stats: "_RolloutStats", run: str | None, cursor: int, follow: bool, url: str) -> None:
    from rich.live import Live

    from prorl_gym.client import Client

    async with Client(url, retry_seconds=CONNECT_SECONDS) as first:
        stats.status = await first.status()
    async with Client(url, retry_seconds=OUTAGE_SECONDS) as client:
        with Live(_render_table(stats, run), auto_refresh=False) as live:
            status_task = asyncio.create_task(_poll_status(client, stats))
            refresh_task = asyncio.create_task(_refresh_table(live, stats, run))
            try:
                async for one in client.stream(run, cursor, follow=follow):
                    stats.add_rollout(one, outcome_label(one.rollout))
            finally:
                status_task.cancel()
                refresh_task.cancel()
                await asyncio.wait({status_task, refresh_task})
                live.update(_render_table(stats, run), refresh=True)


async def _poll_status(client: "Client", stats: "_RolloutStats") -> None:
    from prorl_gym.client import ServiceError

    while True:
        try:
            stats.status = await client.status()
        except ServiceError:  # the stream raises it too, if it cannot go on
            stats.status = None
        await asyncio.sleep(_STATUS_SECONDS)


async def _refresh_table(live: "Live", stats: "_RolloutStats", run: str | None) -> None:
    while True:
        live.update(_render_table(stats, run), refresh=True)
        await asyncio.sleep(_REFRESH_SECONDS)


def _render_table(stats: "_RolloutStats", run: str | None) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(f"run {run}" if run else "all runs"), show_header=False)
    for name, value in stats.table_rows(run):
        table.add_row(escape(printable(name)), escape(printable(value)))
    return table


class _RolloutStats:
    """Figures of the rollouts that have finished. Memory is bounded by the groups in progress."""

    def __init__(self) -> None:
        from prorl_gym.client.group_stream import GroupAssembler

        self.finished = 0
        self.rewarded = 0
        self.reward_sum = 0.0
        self.tokens = 0
        self.outcomes = Counter[str]()
        self.complete_groups = 0
        self.informative_groups = 0
        self.status: ServiceStatus | None = None
        """The service's own figures, as last received."""
        self._assembler = GroupAssembler()
        self._finished_by_second = Counter[int]()

    def add_rollout(self, delivered: "DeliveredRecord", outcome: str) -> None:
        """Count a rollout.

        Args:
            delivered: its record.
            outcome: its outcome in one word.
        """
        rollout = delivered.rollout
        self.finished += 1
        self.tokens += rollout.sampled_tokens
        self.outcomes[outcome] += 1
        if rollout.reward is not None:
            self.rewarded += 1
            self.reward_sum += rollout.reward
        second = int(time.monotonic())
        self._finished_by_second[second] += 1
        for old in [one for one in self._finished_by_second if one < second - _RATE_WINDOW_SECONDS]:
            del self._finished_by_second[old]
        group = self._assembler.add_record(delivered.model_copy(update={"rollout": _without_tokens(rollout)}))
        if group is not None and group.group_id is not None:
            self.complete_groups += 1
            self.informative_groups += len(set(group.rewards)) > 1

    @property
    def mean_reward(self) -> float | None:
        """Mean of the rewards so far; ``None``: there are none."""
        return self.reward_sum / self.rewarded if self.rewarded else None

    @property
    def finish_rate(self) -> float:
        """Rollouts per second over the last ``_RATE_WINDOW_SECONDS``."""
        if not self._finished_by_second:
            return 0.0
        now = time.monotonic()
        recent = sum(
            count for second, count in self._finished_by_second.items() if second >= now - _RATE_WINDOW_SECONDS
        )
        return recent / min(_RATE_WINDOW_SECONDS, max(1.0, now - min(self._finished_by_second)))

    def table_rows(self, run: str | None) -> list[tuple[str, str]]:
        """Return names and values, for a table about one run or all."""
        mean = "-" if self.mean_reward is None else f"{self.mean_reward:.3f}"
        rows = [("finished", str(self.finished)), ("per second", f"{self.finish_rate:.1f}"), ("mean reward", mean)]
        rows += [("sampled tokens", str(self.tokens))]
        if self.complete_groups:
            rows += [("groups complete", f"{self.complete_groups}, {self.informative_groups} with different rewards")]
        rows += [(how, str(count)) for how, count in self.outcomes.most_common(12)]
        if self.status is not None:
            for report in [one for one in self.status.mismatches if run in (None, one.run_id)][-1:]:
                total = report.mismatch.total
                largest = f"{total.max_abs_diff:.2g} nats at version {report.version}, KL {total.kl:.2g}"
                rows += [("mismatch", largest)]
            rows += [("service", f"{self.status.queued} queued, {self.status.running} running")]
            rows += [("", self.status.problem)] if self.status.problem else []
        return rows


def _without_tokens(rollout: "Rollout") -> "Rollout":
    return rollout.model_copy(update={"segments": [], "messages": []})
