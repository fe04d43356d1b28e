"""``prorl-gym watch``: rollouts as they finish; a table that moves on a terminal, lines in a pipe."""

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from prorl_gym.cli.service import AT_ONCE, HERE, LASTING, Url, connect, how, plain, summary

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from prorl_gym.cli.tally import Tally
    from prorl_gym.client import Client

_TICK = 0.25
"""Seconds between two pictures."""

_LOOK = 2.0
"""Seconds between two looks at the service's queues, of which no stream tells."""


def watch(
    run: Annotated[str | None, typer.Option("--run", help="Only of this run.")] = None,
    cursor: Annotated[int, typer.Option(min=0, help="Go on after this one.")] = 0,
    follow: Annotated[bool, typer.Option(help="Wait for more.")] = True,
    full: Annotated[bool, typer.Option("--full", help="Whole records as lines of JSON.")] = False,
    lines: Annotated[
        bool | None, typer.Option("--lines/--table", help="A line for each, or a table. A table on terminals.")
    ] = None,
    url: Url = HERE,
) -> None:
    """Watch rollouts finish; Ctrl-C ends it (130). Exit code 1: with --no-follow, none is there from the beginning."""
    in_lines = full or (not sys.stdout.isatty() if lines is None else lines)
    seen = _lines(run, cursor, follow, full, url) if in_lines else _table(run, cursor, follow, url)
    if not (seen or follow or cursor):  # who asks from a cursor on knows what there is
        typer.echo(f"nothing to show: no rollout{f' of run {run}' if run else ''} is finished", err=True)
        raise typer.Exit(1)


def _lines(run: str | None, cursor: int, follow: bool, full: bool, url: str) -> int:
    seen = 0
    with connect(url, lasting=follow) as client:
        for one in client.stream(run, cursor, follow=follow):
            seen += 1
            typer.echo(one.rollout.model_dump_json() if full else f"{one.cursor:>6} {summary(one.rollout)}")
    return seen


def _table(run: str | None, cursor: int, follow: bool, url: str) -> int:
    from prorl_gym.cli.tally import Tally

    tally = Tally()
    try:
        asyncio.run(_show(tally, run, cursor, follow, url))
    except KeyboardInterrupt:
        sys.exit(130)
    return tally.done


async def _show(tally: "Tally", run: str | None, cursor: int, follow: bool, url: str) -> None:
    from rich.live import Live

    from prorl_gym.client import Client

    async with Client(url, patience=AT_ONCE) as first:
        tally.status = await first.status()
    async with Client(url, patience=LASTING) as client:
        with Live(_picture(tally, run), auto_refresh=False) as live:
            looks = asyncio.create_task(_look(client, tally))
            draws = asyncio.create_task(_draw(live, tally, run))
            try:
                async for one in client.stream(run, cursor, follow=follow):
                    tally.add(one, how(one.rollout))
            finally:
                looks.cancel()
                draws.cancel()
                await asyncio.wait({looks, draws})
                live.update(_picture(tally, run), refresh=True)


async def _look(client: "Client", tally: "Tally") -> None:
    from prorl_gym.client import ServiceError

    while True:
        try:
            tally.status = await client.status()
        except ServiceError:  # the stream tells, when it cannot go on either
            tally.status = None
        await asyncio.sleep(_LOOK)


async def _draw(live: "Live", tally: "Tally", run: str | None) -> None:
    while True:
        live.update(_picture(tally, run), refresh=True)
        await asyncio.sleep(_TICK)


def _picture(tally: "Tally", run: str | None) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(f"run {run}" if run else "all runs"), show_header=False)
    for name, value in tally.lines():
        table.add_row(escape(plain(name)), escape(plain(value)))
    return table


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(watch)
