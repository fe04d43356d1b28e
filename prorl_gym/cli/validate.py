"""``prorl-gym validate NAME FILE``: prove that every row of a data set can be solved, and by nothing but a solution."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prorl_gym.errors import RolloutError

if TYPE_CHECKING:
    from prorl_gym.environments.protocol import Environment
    from prorl_gym.environments.row_format import DiskRow
    from prorl_gym.records import Message
    from prorl_gym.sandbox.config import SandboxConfig
    from prorl_gym.sandbox.protocol import SandboxBackend

BackendName = Literal["auto", "apptainer", "userns", "local"]


@dataclass(frozen=True, slots=True)
class RowReport:
    """Result of one row: the rewards of each kind of trajectory."""

    name: str
    gold: tuple[float, ...] = ()
    empty: tuple[float, ...] = ()
    wrong: tuple[float, ...] = ()
    turns: int = 0
    seconds: float = 0.0
    problem: str = ""
    """Empty when the row is good."""


def validate(
    name: Annotated[str, typer.Argument(help="Name of the environment, for example math.")],
    file: Annotated[Path, typer.Argument(help="JSONL file of rows, in NeMo Gym's flat form or bare.")],
    runs: Annotated[int, typer.Option(min=1, help="Number of times to play each trajectory.")] = 3,
    backend: Annotated[BackendName, typer.Option(help="Sandbox backend.")] = "auto",
    image: Annotated[str, typer.Option(help="Image for rows that name none; as sandbox.image.")] = "",
    allow_unsafe_local: Annotated[bool, typer.Option(help="Permit the backend without isolation.")] = False,
) -> None:
    """Play each row's gold, empty and wrong trajectories in real sandboxes: 1.0, 0.0 and 0.0, every time.

    Tests that a row of swe names in fail_to_pass must also fail without the repair.
    """
    from prorl_gym.cli.request_file import read_rows_of
    from prorl_gym.sandbox.config import SandboxConfig
    from prorl_gym.sandbox.images.config import ImagesConfig

    config = SandboxConfig(backend=backend, allow_unsafe_local=allow_unsafe_local, images=ImagesConfig())
    config = config.model_copy(update={"image": image}) if image else config
    reports = asyncio.run(_validate(name, read_rows_of(name, file), runs, config))
    _show(reports)
    bad = [report for report in reports if report.problem]
    if bad:
        typer.echo(f"{len(bad)} of {len(reports)} rows failed: {', '.join(report.name for report in bad)}", err=True)
        raise typer.Exit(1)
    typer.echo(f"All {len(reports)} rows are good: gold scores 1.0 and an empty answer 0.0, {runs} times over.")
    typer.echo("A wrong answer scored 0.0 as often.")


async def _validate(name: str, rows: "list[DiskRow]", runs: int, config: "SandboxConfig") -> list[RowReport]:
    from prorl_gym.environments import registry
    from prorl_gym.sandbox.backend_selection import open_backend

    environment = registry.get(name)
    backend = await open_backend(config)
    try:
        return [await validate_row(environment, row.name, row.task, backend, runs) for row in rows]
    finally:
        await backend.close()


async def validate_row(
    environment: "Environment[Any]", name: str, row: Mapping[str, Any], backend: "SandboxBackend", runs: int
) -> RowReport:
    """Play gold, an empty and a wrong answer, ``runs`` times each; report what is wrong with the row."""
    from prorl_gym.environments.playback import find_row_problem, play_script, wrong_steps
    from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases

    started = time.monotonic()
    gold: list[float] = []
    empty: list[float] = []
    wrong: list[float] = []
    prompts: list[tuple[Message, ...]] = []
    reason = ""
    turns = 0
    try:
        steps = environment.gold_steps(row)
        for run in range(runs):
            plays = ((steps, gold), ((), empty), (wrong_steps(environment, row, run), wrong))
            for script, rewards in plays:
                leases = SandboxLeases(backend)
                try:
                    played = await play_script(environment, row, script, leases)
                finally:
                    await leases.close()
                rewards.append(played.score.reward)
                if rewards is gold:
                    reason = str(played.score.detail.get("why", "")) or reason
                prompts.append(played.episode.messages)
                turns = max(turns, played.turns)
        problem = _find_problem(gold, empty, wrong, reason, same_prompt=prompts.count(prompts[0]) == len(prompts))
        if not problem:
            leases = SandboxLeases(backend)
            try:
                problem = await find_row_problem(environment, row, leases)
            finally:
                await leases.close()
    except RolloutError as error:
        problem = f"{error.kind.value}: {error.what} {error.fix}".rstrip()
    seconds = time.monotonic() - started
    return RowReport(name, tuple(gold), tuple(empty), tuple(wrong), turns, seconds, problem)


def _find_problem(gold: list[float], empty: list[float], wrong: list[float], reason: str, *, same_prompt: bool) -> str:
    if len(set(gold)) > 1 or len(set(empty)) > 1:
        return "the reward differs between runs"
    if gold[0] != 1.0:
        return "the gold trajectory does not score 1.0" + (f" ({reason})" if reason else "")
    if empty[0] != 0.0:
        return "an empty answer does not score 0.0"
    if any(wrong):
        return "a wrong answer does not score 0.0"
    return "" if same_prompt else "the prompt differs between runs"


def _show(reports: list[RowReport]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("row", "gold", "empty", "wrong", "turns", "seconds", "verdict")
    for report in reports:
        verdict = f"[red]{_escape(report.problem)}[/red]" if report.problem else "[green]good[/green]"
        table.add_row(
            _escape(report.name),
            _rewards(report.gold),
            _rewards(report.empty),
            _rewards(report.wrong),
            str(report.turns),
            f"{report.seconds:.1f}",
            verdict,
        )
    Console().print(table)


def _rewards(rewards: tuple[float, ...]) -> str:
    return " ".join(f"{reward:g}" for reward in rewards) or "-"


def _escape(text: str) -> str:
    """Return a row's text without mark-up or control characters: rows are not trusted."""
    from rich.markup import escape

    return escape("".join(character for character in text if character.isprintable()))
