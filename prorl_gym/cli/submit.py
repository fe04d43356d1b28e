"""``prorl-gym submit``, ``show``, ``watch``, ``cancel``: talk to a running service."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prorl_gym.client import DEFAULT_URL
from prorl_gym.errors import ConfigError

if TYPE_CHECKING:
    from prorl_gym.records import Rollout

_URL_HELP = (
    "Address of the service. Its token is read from PRORL_GYM_TOKEN, from the file that PRORL_GYM_TOKEN_FILE names, or "
    "from where a service of this user puts it."
)
Url = Annotated[str, typer.Option(envvar="PRORL_GYM_URL", help=_URL_HELP)]
Run = Annotated[str, typer.Option("--run", help="Run: the unit of cancelling and watching.")]

_BATCH = 256


def submit(
    file: Annotated[Path, typer.Argument(help="JSONL: requests, or NeMo Gym rows with 'environment' and 'task'.")],
    run: Run = "default",
    group_size: Annotated[int, typer.Option(min=1, help="Rollouts of each line (a GRPO group).")] = 1,
    check: Annotated[
        bool, typer.Option(help="Read each row with its environment first; off: for environments of the service only.")
    ] = True,
    url: Url = DEFAULT_URL,
) -> None:
    """Submit rollouts; print their ids once the service has them on its disk. Nothing is sent if a row is wrong."""
    from prorl_gym.cli.rows import read_requests
    from prorl_gym.client import SyncClient

    requests = read_requests(file, run, group_size, check=check)
    with SyncClient(url) as client:
        for start in range(0, len(requests), _BATCH):
            for submission in client.submit(requests[start : start + _BATCH]):
                typer.echo(submission.rollout_id)


def show(
    rollout_id: str,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the end.")] = 0.0,
    full: Annotated[bool, typer.Option("--full", help="The whole record as JSON.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Show how a rollout ended."""
    from prorl_gym.client import SyncClient

    with SyncClient(url) as client:
        try:
            rollout = client.result(rollout_id, wait) if wait else client.look(rollout_id)
        except TimeoutError:
            rollout = None
    if rollout is None:
        typer.echo(f"{rollout_id} is not finished")
        raise typer.Exit(1)
    typer.echo(rollout.model_dump_json(indent=2) if full else summary(rollout))


def watch(
    run: Annotated[str | None, typer.Option("--run", help="Only of this run.")] = None,
    cursor: Annotated[int, typer.Option(min=0, help="Go on after this one.")] = 0,
    follow: Annotated[bool, typer.Option(help="Wait for more.")] = True,
    full: Annotated[bool, typer.Option("--full", help="Whole records as lines of JSON.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Print rollouts as they finish. Exit code 1: with --no-follow, none is there from the beginning."""
    from prorl_gym.client import SyncClient

    shown = False
    with SyncClient(url) as client:
        try:
            for position, rollout in client.stream(run, cursor, follow=follow):
                shown = True
                typer.echo(rollout.model_dump_json() if full else f"{position:>6} {summary(rollout)}")
        except KeyboardInterrupt:
            sys.exit(130)
    if not (shown or follow or cursor):  # who asks from a cursor on knows what there is
        typer.echo(f"nothing to show: no rollout{f' of run {run}' if run else ''} is finished", err=True)
        raise typer.Exit(1)


def cancel(
    rollout_ids: Annotated[list[str] | None, typer.Argument(help="Ids of rollouts.")] = None,
    group: Annotated[list[str] | None, typer.Option("--group", help="All of a group.")] = None,
    run: Annotated[list[str] | None, typer.Option("--run", help="All of a run.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Cancel rollouts by id, group or run; print those that this stopped. Exit code 1: there was nothing to cancel."""
    from prorl_gym.client import SyncClient

    if not (rollout_ids or group or run):
        raise ConfigError("cancel: nothing is named.", "Give rollout ids, --group or --run.")
    cancelled = 0
    with SyncClient(url) as client:
        found = client.cancel(rollout_ids, groups=(), runs=()) if rollout_ids else []
        answers = [(f"rollout {name}", [name] if name in found else []) for name in rollout_ids or ()]
        answers += [(f"group {name}", client.cancel((), groups=[name], runs=())) for name in group or ()]
        answers += [(f"run {name}", client.cancel((), groups=(), runs=[name])) for name in run or ()]
    for name, stopped in answers:
        for rollout_id in stopped:
            typer.echo(rollout_id)
        if not stopped:
            typer.echo(f"nothing to cancel: {name} is unknown or finished", err=True)
        cancelled += len(stopped)
    if not cancelled:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (submit, show, watch, cancel):
        app.command(command.__name__)(command)


def summary(rollout: "Rollout") -> str:
    """Return a rollout in one line."""
    outcome = rollout.outcome
    detail = outcome.kind or outcome.limit or outcome.reason
    how = outcome.status if detail is None else f"{outcome.status}({detail.value})"
    reward = "-" if rollout.reward is None else f"{rollout.reward:g}"
    seconds = sum(stage.seconds for stage in rollout.stages.values())
    line = f"{rollout.rollout_id} {rollout.environment} {how} reward={reward} turns={rollout.turns}"
    line += f" tokens={rollout.sampled_tokens} attempt={rollout.attempt} seconds={seconds:.2f}"
    return line + (f"\n    {outcome.message}" if outcome.message else "")
