"""``prorl-gym submit`` and ``cancel``: what goes into a running service."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prorl_gym.cli.service_client.service_connection import LOCAL_URL, RunOption, UrlOption, connect, rollout_summary
from prorl_gym.errors import ConfigError

if TYPE_CHECKING:
    from prorl_gym.client import SyncClient


def submit(
    file: Annotated[Path, typer.Argument(help="JSONL: requests, or NeMo Gym rows with 'environment' and 'task'.")],
    run: RunOption = "default",
    group_size: Annotated[int, typer.Option(min=1, help="Rollouts of each line (a GRPO group).")] = 1,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the results, and print them instead of the ids.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(help="Check each row with its environment first; off: for environments only the service has."),
    ] = True,
    url: UrlOption = LOCAL_URL,
) -> None:
    """Submit rollouts; print their ids once the service has stored them. Nothing is sent if a row is wrong.

    Exit code 1: with --wait, one of them ended without a reward.
    """
    from prorl_gym.cli.request_file import read_requests

    requests = read_requests(file, run, group_size, check=check)
    with connect(url, survive_restarts=wait) as client:
        accepted = client.submit(requests)
        if wait:
            _wait([one.rollout_id for one in accepted], client)
            return
        for one in accepted:
            typer.echo(one.rollout_id)


def _wait(rollout_ids: list[str], client: "SyncClient") -> None:
    from prorl_gym.errors import GoneError

    unrewarded = 0
    for rollout_id in dict.fromkeys(rollout_ids):
        try:
            rollout = client.result(rollout_id)
        except GoneError as error:  # an old id, whose record was acknowledged
            typer.echo(f"{rollout_id} {error.what}")
            continue
        typer.echo(rollout_summary(rollout))
        unrewarded += rollout.reward is None
    if unrewarded:
        typer.echo(f"{unrewarded} of {len(rollout_ids)} rollouts ended without a reward", err=True)
        raise typer.Exit(1)


def cancel(
    rollout_ids: Annotated[list[str] | None, typer.Argument(help="Ids of rollouts.")] = None,
    group: Annotated[list[str] | None, typer.Option("--group", help="All rollouts of a group.")] = None,
    run: Annotated[list[str] | None, typer.Option("--run", help="All rollouts of a run.")] = None,
    url: UrlOption = LOCAL_URL,
) -> None:
    """Cancel rollouts by id, group or run; print those cancelled. Exit code 1: there was nothing to cancel."""
    if not (rollout_ids or group or run):
        raise ConfigError("cancel: nothing is named.", "Give rollout ids, --group or --run.")
    cancelled = 0
    with connect(url) as client:
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
