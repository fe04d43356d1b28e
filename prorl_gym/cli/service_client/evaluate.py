"""``prorl-gym evaluate NAME FILE``: pass@k of a model over a file of rows."""

import json
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prorl_gym.cli.service_client.service_connection import LOCAL_URL, UrlOption, connect, printable
from prorl_gym.errors import ConfigError, ConflictError

if TYPE_CHECKING:
    from prorl_gym.client import SyncClient
    from prorl_gym.records import RolloutRequest
    from prorl_gym.settings import RolloutSettings
    from prorl_gym.trainers.evaluation import Evaluation


def evaluate(
    name: Annotated[str, typer.Argument(help="Name of the environment, for example math.")],
    file: Annotated[Path, typer.Argument(help="JSONL file of rows, in NeMo Gym's flat form or bare.")],
    k: Annotated[str, typer.Option("--k", help="Values of k, separated by commas.")] = "1",
    samples: Annotated[int, typer.Option(min=1, help="Rollouts of each row; at least the largest k.")] = 8,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="Overrides the environment's.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.001, max=1, help="Overrides the environment's.")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Overrides the environment's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Token limit of a whole trajectory.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed from which each sample derives its own.")] = None,
    threshold: Annotated[float, typer.Option(help="Smallest reward that counts as solved.")] = 1.0,
    run: Annotated[
        str | None, typer.Option("--run", help="Name of the run; the same name continues an interrupted run.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Address of an engine to evaluate, with a temporary service.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --base-url: the engine's name of the model.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="With --base-url: directory or name of the tokenizer; the model's by default.")
    ] = None,
    engine: Annotated[
        Literal["openai", "vllm", "sglang", "chat_prefix"], typer.Option(help="With --base-url: kind of engine.")
    ] = "openai",
    api_key_env: Annotated[
        str | None, typer.Option(help="With --base-url: environment variable that holds the engine's API key.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="With --base-url: context in tokens, if the engine does not report it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    url: UrlOption = LOCAL_URL,
) -> None:
    """Sample every row several times, and print pass@k with its 95 % interval.

    The rollouts are marked as evaluation: the service runs them before training, and no trainer uses them. Samples
    that infrastructure failed are left out and counted, with the first message of each kind.

    A running service continues the rollouts when this command ends; standard error names their run. Exit code 1: a row
    has fewer samples with a reward than the largest k, and is not in that figure.
    """
    from prorl_gym.records import new_rollout_id
    from prorl_gym.settings import RolloutSettings
    from prorl_gym.trainers.evaluation import Evaluation, summarize

    ks = _parse_ks(k, samples)
    settings = RolloutSettings(
        temperature=temperature, top_p=top_p, max_turns=max_turns, max_tokens=max_tokens, seed=seed
    )
    run = run or f"eval-{new_rollout_id()[:12]}"
    requests = _requests(name, file, run, samples, settings)
    inference = {
        "engine": engine,
        "model": model,
        "tokenizer": tokenizer,
        "api_key_env": api_key_env,
        "max_model_len": max_model_len,
    }
    evaluation = Evaluation(threshold)
    given = {key: value for key, value in inference.items() if value is not None}
    with _sigterm_interrupts(), _open_client(base_url, given, url) as client, _announce_run(run, kept=base_url is None):
        try:
            client.submit([request for group in requests.values() for request in group])
        except ConflictError:
            raise ConfigError(
                f"Run {run} was begun with other options or rows.", "Give the same ones again, or another --run."
            ) from None
        for row, group in requests.items():
            for request in group:
                evaluation.add_sample(row, client.result(request.rollout_id))
    if as_json:
        typer.echo(json.dumps(summarize(evaluation, ks), indent=2))
    else:
        _show(evaluation, ks)
    if any(len(row.rewards) < max(ks) for row in evaluation.rows.values()):
        raise typer.Exit(1)


def _parse_ks(text: str, samples: int) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and int(part) for part in parts):
        raise ConfigError(f"--k {text!r}: no numbers.", "Give for example --k 1,4.")
    found = sorted({int(part) for part in parts})
    if found[-1] > samples:
        raise ConfigError(
            f"--k {found[-1]} needs as many samples of a row, there are {samples}.", f"Give --samples {2 * found[-1]}."
        )
    return found


def _requests(
    name: str, file: Path, run: str, samples: int, settings: "RolloutSettings"
) -> "dict[str, list[RolloutRequest]]":
    """Return the rollouts of each row. Their ids derive from the run's name: sent again, they are the same."""
    from prorl_gym.cli.request_file import MAX_SOURCE, read_rows_of
    from prorl_gym.config import load_config
    from prorl_gym.environments import registry
    from prorl_gym.errors import TaskError
    from prorl_gym.records import RolloutRequest

    environment = registry.get(name)
    requests: dict[str, list[RolloutRequest]] = {}
    for number, row in enumerate(read_rows_of(name, file)):
        try:
            environment.parse_row(row.task)
        except TaskError as error:
            raise ConfigError(f"{row.where}: {error.what}", error.fix) from None
        shared: dict[str, Any] = {
            "run_id": run,
            "group_id": f"{run}.{number}",
            "group_size": samples,
            "environment": name,
            "task": dict(row.task),
            "row_source": row.where[-MAX_SOURCE:],
            "settings": settings,
            "evaluation": True,
        }
        requests[f"{number + 1}:{row.name}"] = [
            load_config(RolloutRequest, {**shared, "rollout_id": f"{run}.{number}.{i}", "replica": i}, row.where)
            for i in range(samples)
        ]
    return requests


@contextmanager
def _open_client(base_url: str | None, inference: dict[str, Any], url: str) -> Generator["SyncClient", None, None]:
    from prorl_gym.cli.temporary_service import temporary_service

    if base_url is None:
        given = sorted(set(inference) - {"engine"})
        if given:
            option = f"--{given[0].replace('_', '-')}"
            raise ConfigError(f"{option} belongs to --base-url.", "A running service has an engine already.")
        with connect(url, survive_restarts=True) as client:
            yield client
        return
    if "model" not in inference:
        raise ConfigError("--base-url needs --model.", "Give the name that the engine has for the model.")
    service = {"inference": {"tokenizer": inference["model"], **inference, "engines": [base_url]}}
    with temporary_service(service) as client:
        yield client


@contextmanager
def _announce_run(run: str, *, kept: bool) -> Generator[None, None, None]:
    """Print the name of the run, and what happens to it if this command is interrupted."""
    if kept:
        typer.echo(f"run {run}", err=True)
    try:
        yield
    except KeyboardInterrupt:
        if kept:
            typer.echo(
                f"\nInterrupted; the rollouts of run {run} go on. The same command with --run {run} goes on waiting, "
                f"`prorl-gym cancel --run {run}` stops them.",
                err=True,
            )
        else:
            typer.echo("\nInterrupted; the service of this command ends, and its rollouts with it.", err=True)
        raise


@contextmanager
def _sigterm_interrupts() -> Generator[None, None, None]:
    """End on SIGTERM as on Ctrl-C, so that everything that was started is stopped."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(evaluation: "Evaluation", ks: list[int]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value", "95 %", "rows")
    for k in ks:
        found = evaluation.pass_at(k)
        if found is None:
            table.add_row(f"pass@{k}", "-", "", "0")
            continue
        table.add_row(f"pass@{k}", f"{found.value:.3f}", f"{found.low:.3f} to {found.high:.3f}", str(found.rows))
    if evaluation.mean_reward is not None:
        table.add_row("mean reward", f"{evaluation.mean_reward:.3f}", "", str(len(evaluation.rows)))
    Console().print(table)
    count = evaluation.samples
    if count:
        typer.echo(
            f"{count} samples, {evaluation.turns / count:.1f} turns and {evaluation.tokens / count:.0f} tokens each"
        )
    for how, lost in evaluation.excluded.most_common():
        typer.echo(printable(f"left out: {lost} {how}"))
        if message := evaluation.first_messages[how]:
            typer.echo(printable(f"  the first: {' '.join(message.split())}"))
