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
    from prorl_gym.client import DeliveredRecord, ServiceStatus

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
    if in_lines:
        seen = 0
        with connect(url, survive_restarts=follow) as client:
            for one in client.stream(run, cursor, follow=follow):
                seen += 1
                record = one.rollout
                typer.echo(record.model_dump_json() if as_json else f"{one.cursor:>6} {rollout_summary(record)}")
    else:
        stats = _RolloutStats()
        try:
            asyncio.run(_show(stats, run, cursor, follow, url))
        except KeyboardInterrupt:
            sys.exit(130)
        seen = stats.finished
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


async def _show(stats: "_RolloutStats", run: str | None, cursor: int, follow: bool, url: str) -> None:
    from rich.live import Live
    from rich.markup import escape
    from rich.table import Table

    from prorl_gym.client import Client, ServiceError

    def render() -> Table:
        table = Table(title=escape(f"run {run}" if run else "all runs"), show_header=False)
        for name, value in stats.table_rows(run):
            table.add_row(escape(printable(name)), escape(printable(value)))
        return table

    async def poll_status(client: Client) -> None:
        while True:
            try:
                stats.status = await client.status()
            except ServiceError:  # the stream raises it too, if it cannot go on
                stats.status = None
            await asyncio.sleep(_STATUS_SECONDS)

    async def refresh(live: Live) -> None:
        while True:
            live.update(render(), refresh=True)
            await asyncio.sleep(_REFRESH_SECONDS)

    async with Client(url, retry_seconds=CONNECT_SECONDS) as first:
        stats.status = await first.status()
    async with Client(url, retry_seconds=OUTAGE_SECONDS) as client:
        with Live(render(), auto_refresh=False) as live:
            tasks = {asyncio.create_task(poll_status(client)), asyncio.create_task(refresh(live))}
            try:
                async for one in client.stream(run, cursor, follow=follow):
                    stats.add_rollout(one)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                live.update(render(), refresh=True)


class _RolloutStats:
    """Figures of the rollouts that have finished. Memory is bounded by the groups in progress."""

    def __init__(self) -> None:
        from prorl_gym.client.group_stream import GroupAssembler

        self.finished = 0
        self.status: ServiceStatus | None = None
        """The service's own figures, as last received."""
        self._rewarded = 0
        self._reward_sum = 0.0
        self._tokens = 0
        self._outcomes = Counter[str]()
        self._complete_groups = 0
        self._informative_groups = 0
        self._assembler = GroupAssembler()
        self._finished_by_second = Counter[int]()

    def add_rollout(self, delivered: "DeliveredRecord") -> None:
        rollout = delivered.rollout
        self.finished += 1
        self._tokens += rollout.sampled_tokens
        self._outcomes[outcome_label(rollout)] += 1
        if rollout.reward is not None:
            self._rewarded += 1
            self._reward_sum += rollout.reward
        second = int(time.monotonic())
        self._finished_by_second[second] += 1
        for old in [one for one in self._finished_by_second if one < second - _RATE_WINDOW_SECONDS]:
            del self._finished_by_second[old]
        without_tokens = rollout.model_copy(update={"segments": [], "messages": []})
        group = self._assembler.add_record(delivered.model_copy(update={"rollout": without_tokens}))
        if group is not None and group.group_id is not None:
            self._complete_groups += 1
            self._informative_groups += len(set(group.rewards)) > 1

    def table_rows(self, run: str | None) -> list[tuple[str, str]]:
        """Return names and values, for a table about one run or all."""
        mean = f"{self._reward_sum / self._rewarded:.3f}" if self._rewarded else "-"
        start = time.monotonic() - _RATE_WINDOW_SECONDS
        recent = {second: count for second, count in self._finished_by_second.items() if second >= start}
        age = time.monotonic() - min(recent, default=0)
        rate = sum(recent.values()) / min(_RATE_WINDOW_SECONDS, max(1.0, age))
        rows = [("finished", str(self.finished)), ("per second", f"{rate:.1f}"), ("mean reward", mean)]
        rows += [("sampled tokens", str(self._tokens))]
        if self._complete_groups:
            informative = f"{self._informative_groups} with different rewards"
            rows += [("groups complete", f"{self._complete_groups}, {informative}")]
        rows += [(how, str(count)) for how, count in self._outcomes.most_common(12)]
        if self.status is not None:
            for report in [one for one in self.status.mismatches if run in (None, one.run_id)][-1:]:
                total = report.mismatch.total
                largest = f"{total.max_abs_diff:.2g} nats at version {report.version}, KL {total.kl:.2g}"
                rows += [("mismatch", largest)]
            rows += [("service", f"{self.status.queued} queued, {self.status.running} running")]
            rows += [("", self.status.problem)] if self.status.problem else []
        return rows
