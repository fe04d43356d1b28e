"""``prorl-gym submit``, ``cancel``, ``demand``, ``ack``, ``hold``, ``release``, ``policy``, ``engines``.

Commands that change a running service.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from prorl_gym.cli.service_client.service_connection import (
    LOCAL_URL,
    RunOption,
    UrlOption,
    connect,
    printable,
    rollout_summary,
)
from prorl_gym.errors import ConfigError, GoneError

if TYPE_CHECKING:
    from prorl_gym.client import EngineStatus

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run.")]
PauseMode = Literal["abort", "drain", "keep"]

policy = typer.Typer(no_args_is_help=True, help="Inspect and control the policy that rollouts sample from.")
engines = typer.Typer(no_args_is_help=True, help="List, register and deregister the engines that serve the policy.")


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
        ids = [one.rollout_id for one in accepted]
        if not wait:
            typer.echo("\n".join(ids))
            return
        unrewarded = 0
        for rollout_id in dict.fromkeys(ids):
            try:
                rollout = client.result(rollout_id)
            except GoneError as error:  # an old id, whose record was acknowledged
                typer.echo(f"{rollout_id} {error.what}")
                continue
            typer.echo(rollout_summary(rollout))
            unrewarded += rollout.reward is None
    if unrewarded:
        typer.echo(f"{unrewarded} of {len(ids)} rollouts ended without a reward", err=True)
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


def demand(
    run: RunArgument,
    groups: Annotated[int | None, typer.Option(min=0, help="Informative groups still needed; 0: none.")] = None,
    after: Annotated[
        int, typer.Option(min=0, help="Cursor of the last record used: groups up to it no longer count.")
    ] = 0,
    spare: Annotated[int, typer.Option(min=0, help="Further groups to complete beyond --groups.")] = 0,
    version: Annotated[
        int | None, typer.Option(min=0, help="Policy version of the step that needs the groups.")
    ] = None,
    max_staleness: Annotated[
        int | None, typer.Option(min=0, help="Versions that a group may be behind --version.")
    ] = None,
    redundant: Annotated[
        Literal["finish", "park", "kill"],
        typer.Option(help="What happens to running agents that are no longer needed."),
    ] = "park",
    replace: Annotated[
        int, typer.Option(min=0, max=16, help="Replacements per group for members that infrastructure failed.")
    ] = 2,
    extra: Annotated[int, typer.Option(min=0, max=16, help="Extra replicas per group that may race slow members.")] = 0,
    file: Annotated[
        Path | None, typer.Option("--file", help="YAML or JSON file with a whole demand, instead of the options above.")
    ] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove the demand: cancel parked agents, run the rest.")
    ] = False,
    url: UrlOption = LOCAL_URL,
) -> None:
    """Set a run's demand, or show the state of its groups when none of --groups, --file and --clear is given."""
    from prorl_gym.config import load_config
    from prorl_gym.demand import Demand, RedundantHandling

    if clear + (groups is not None) + (file is not None) > 1:
        raise ConfigError("demand: --clear, --groups and --file contradict each other.", "Give one of them.")
    wanted = None if file is None else load_config(Demand, file)
    if groups is not None:
        wanted = Demand(
            groups=groups,
            after=after,
            spare=spare,
            version=version,
            max_staleness=max_staleness,
            redundant=RedundantHandling(run=redundant),
            replace=replace,
            extra=extra,
        )
    with connect(url) as client:
        if clear:
            client.clear_demand(run)
        elif wanted is not None:
            client.set_demand(run, wanted)
        current = client.demand(run)
        status = client.groups(run)
    if current is None:
        typer.echo(f"run {run} has no demand: everything that was accepted of it is made, and groups are not counted")
        return
    for name, value in status.model_dump(mode="json").items():
        typer.echo(f"{name}: {printable(str(value))}")


def ack(
    run: RunArgument,
    cursor: Annotated[int, typer.Argument(min=0, help="Cursor of the last record received.")],
    url: UrlOption = LOCAL_URL,
) -> None:
    """Acknowledge a run's records up to a cursor; the service may then delete them."""
    with connect(url) as client:
        typer.echo(f"{client.acknowledge(run, cursor)} records released")


def hold(url: UrlOption = LOCAL_URL) -> None:
    """Start no further rollouts. Running ones go on, submissions are still accepted. A restart ends the hold."""
    with connect(url) as client:
        client.hold()


def release(url: UrlOption = LOCAL_URL) -> None:
    """End a hold: start rollouts again."""
    with connect(url) as client:
        client.release()


@policy.command("status")
def policy_status(url: UrlOption = LOCAL_URL) -> None:
    """Show the policy's version, and which engines serve it."""
    with connect(url) as client:
        found = client.policy()
    serving = sum(engine.serves for engine in found.engines)
    state = "paused" if found.paused else "running"
    if found.pool.pause_expires_at is not None:
        state += f" for {max(0.0, found.pool.pause_expires_at - time.time()):.0f} s more"
    typer.echo(f"version {found.version}, {state}, {serving} of {len(found.engines)} engines serve it")
    for engine in found.engines:
        typer.echo(_engine_line(engine))


@policy.command("pause")
def policy_pause(
    mode: Annotated[
        PauseMode, typer.Option(help="What happens to running calls: cut short, waited for, or left alone.")
    ] = "abort",
    expire_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds after which the pause ends by itself; 0: never.")
    ] = 600.0,
    url: UrlOption = LOCAL_URL,
) -> None:
    """Start no further engine calls. Rollouts wait; the pause does not count against their deadlines."""
    with connect(url, survive_restarts=True) as client:
        client.pause(mode, expire_seconds=expire_seconds or None)


@policy.command("resume")
def policy_resume(url: UrlOption = LOCAL_URL) -> None:
    """End a pause: start engine calls again."""
    with connect(url) as client:
        client.resume()


@policy.command("update")
def policy_update(
    version: Annotated[int, typer.Argument(min=0, help="Version of the new weights, above the current one.")],
    caches_dropped: Annotated[
        bool, typer.Option("--caches-dropped", help="The engines' prefix caches are empty.")
    ] = False,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help="Address of an engine; the engines named replace the current ones. Repeatable."),
    ] = None,
    url: UrlOption = LOCAL_URL,
) -> None:
    """Announce new weights, which the engines have loaded. Exit code 1: some engines do not serve them."""
    with connect(url, survive_restarts=True) as client:
        updated = client.update_policy(version, caches_dropped=caches_dropped, engines=engine or None)
    typer.echo(f"version {updated.version}: {len(updated.serving)} engines serve it")
    for name, reason in updated.quarantined.items():
        typer.echo(f"{printable(name)} does not: {printable(reason)}", err=True)
    if updated.quarantined:
        raise typer.Exit(1)


@engines.command("list")
def list_engines(url: UrlOption = LOCAL_URL) -> None:
    """List the engines of the policy. Exit code 1: none accepts calls."""
    with connect(url) as client:
        found = client.policy()
    for engine in found.engines:
        typer.echo(_engine_line(engine))
    if not any(engine.serves for engine in found.engines):
        raise typer.Exit(1)


@engines.command("add")
def add_engine(
    address: Annotated[str, typer.Argument(help="Address of the engine, on the service's allow-list.")],
    url: UrlOption = LOCAL_URL,
) -> None:
    """Register an engine."""
    with connect(url) as client:
        typer.echo(printable(client.add_engine(address).name))


@engines.command("remove")
def remove_engine(
    name: Annotated[str, typer.Argument(help="Name of the engine, as `engines list` prints it.")],
    url: UrlOption = LOCAL_URL,
) -> None:
    """Drain an engine and deregister it."""
    with connect(url) as client:
        typer.echo(f"{printable(client.remove_engine(name).name)} leaves")


def _engine_line(engine: "EngineStatus") -> str:
    state = "leaving" if engine.draining else engine.quarantine or engine.unhealthy_reason or "serves"
    hits = "-" if engine.hit_rate is None else f"{engine.hit_rate:.0%}"
    return printable(
        f"{engine.name} {engine.url or ''} version={engine.version} in_flight={engine.in_flight} hits={hits}: {state}"
    )
