"""``prorl-gym submit``, ``show``, ``watch``, ``cancel``: talk to a running service."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from prorl_gym.client import DEFAULT_URL
from prorl_gym.errors import ConfigError

if TYPE_CHECKING:
    from prorl_gym.records import Rollout, RolloutRequest

Url = Annotated[str, typer.Option(envvar="PRORL_GYM_URL", help="Address of the service.")]
Run = Annotated[str, typer.Option("--run", help="Run: the unit of cancelling and watching.")]

_BATCH = 256


def submit(
    file: Annotated[Path, typer.Argument(help="JSONL: requests, or NeMo Gym rows with 'environment' and 'task'.")],
    run: Run = "default",
    group_size: Annotated[int, typer.Option(min=1, help="Rollouts of each line (a GRPO group).")] = 1,
    url: Url = DEFAULT_URL,
) -> None:
    """Submit rollouts; print their ids once the service has them on its disk."""
    from prorl_gym.client import SyncClient

    requests = [request for where, line in _objects(file) for request in _requests(line, where, run, group_size)]
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
    """Print rollouts as they finish."""
    from prorl_gym.client import SyncClient

    with SyncClient(url) as client:
        try:
            for position, rollout in client.stream(run, cursor, follow=follow):
                typer.echo(rollout.model_dump_json() if full else f"{position:>6} {summary(rollout)}")
        except KeyboardInterrupt:
            sys.exit(130)


def cancel(
    rollout_ids: Annotated[list[str] | None, typer.Argument(help="Ids of rollouts.")] = None,
    group: Annotated[list[str] | None, typer.Option("--group", help="All of a group.")] = None,
    run: Annotated[list[str] | None, typer.Option("--run", help="All of a run.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Cancel rollouts by id, group or run; print those that this stopped."""
    from prorl_gym.client import SyncClient

    if not (rollout_ids or group or run):
        raise ConfigError("cancel: nothing is named.", "Give rollout ids, --group or --run.")
    with SyncClient(url) as client:
        for rollout_id in client.cancel(rollout_ids or (), groups=group or (), runs=run or ()):
            typer.echo(rollout_id)


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


def _requests(line: dict[str, Any], where: str, run: str, group_size: int) -> Iterator["RolloutRequest"]:
    """Turn a line into requests; a NeMo Gym row lends its environment and its task."""
    from prorl_gym.config import load_config
    from prorl_gym.records import RolloutRequest, new_id

    fields = {name: value for name, value in line.items() if name in RolloutRequest.model_fields}
    if group_size > 1:
        fields |= {"group_id": fields.get("group_id") or new_id(), "group_size": group_size}
        fields.pop("rollout_id", None)
    for replica in range(group_size):
        yield load_config(RolloutRequest, {"run_id": run, **fields, **({"replica": replica} if replica else {})}, where)


def _objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line's place and content."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}).", "Check the path.") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{file}:{number}"
            yield where, _object(line, where)


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        found = TypeAdapter(dict[str, Any]).validate_json(line)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise ConfigError(f"{where}: no JSON object ({reason}).", "Each line is one JSON object.") from None
    for name in ("environment", "task"):
        if name not in found:
            raise ConfigError(f"{where}: '{name}' is missing.", "Each line needs 'environment' and 'task'.")
    return found
