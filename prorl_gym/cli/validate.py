"""``prorl-gym validate NAME FILE``: proves that each row of a data set can be solved, and by nothing but a solution."""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from prorl_gym.errors import Cause, RolloutError

if TYPE_CHECKING:
    from prorl_gym.environments.protocol import Environment, ScriptedStep
    from prorl_gym.environments.row_format import DiskRow
    from prorl_gym.records import Message
    from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
    from prorl_gym.sandbox.config import SandboxConfig
    from prorl_gym.sandbox.protocol import SandboxBackend

_LONGEST_TABLE = 1000
"""Rows of a table with good ones: a table is held in memory as a whole."""

Result = TypeVar("Result")
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
    infrastructure: bool = False
    """Whether ``problem`` is a failure of infrastructure, which says nothing about the row."""
    constant: float | None = None
    """Reward of the file's commonest gold trajectory on a good row; ``None`` where no two rows have the same."""


def validate(
    name: Annotated[str, typer.Argument(help="Name of the environment, for example math.")],
    file: Annotated[Path, typer.Argument(help="JSONL file of rows, in NeMo Gym's flat form or bare.")],
    runs: Annotated[int, typer.Option(min=1, help="Number of times to play each trajectory.")] = 3,
    backend: Annotated[BackendName, typer.Option(help="Sandbox backend.")] = "auto",
    image: Annotated[str, typer.Option(help="Image for rows that name none; as sandbox.image.")] = "",
    allow_unsafe_local: Annotated[bool, typer.Option(help="Permit the backend without isolation.")] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Rows played at a time; by default, the cores of this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Play each row's gold, empty and wrong trajectories in real sandboxes: 1.0, 0.0 and 0.0, every time.

    Tests that a row of swe names in fail_to_pass must also fail without the repair. Where the prompt of a row of math
    or stem asks for an answer form, the gold answer in that form must score 1.0. The commonest gold answer of the file
    is tried on every row, to see how much of the file one constant answer is paid for.

    Standard error has a line for each row as it ends. Exit code 1: a row is bad, or infrastructure failed.
    """
    from prorl_gym.cli.request_file import read_rows_of
    from prorl_gym.environments import registry
    from prorl_gym.sandbox.config import ImagesConfig, SandboxConfig

    config = SandboxConfig(backend=backend, allow_unsafe_local=allow_unsafe_local, images=ImagesConfig())
    config = config.model_copy(update={"image": image}) if image else config
    rows, environment = read_rows_of(name, file), registry.get(name)
    constant = _commonest_gold(environment, rows)
    reports = asyncio.run(play_rows(environment, rows, runs, config, jobs or len(os.sched_getaffinity(0)), constant))
    tried = [report.constant for report in reports if report.constant is not None]
    paid = sum(reward > 0 for reward in tried)
    said = _line(constant[-1].text or str(constant[-1].arguments))[:80] if constant else ""
    if as_json:
        share = {"answer": said, "paid": paid, "rows": len(tried)} if tried else None
        typer.echo(json.dumps({"rows": [asdict(report) for report in reports], "constant": share}, indent=2))
    else:
        _show(reports)
    if tried:
        typer.echo(f"The same answer on every row, '{said}', is paid on {paid} of {len(tried)} good rows.", err=True)
    if 2 * paid > len(tried):
        typer.echo("Most rows are paid without a look at their tasks: check the gold answers, or add rows.", err=True)
    lost = [report for report in reports if report.infrastructure]
    bad = [report for report in reports if report.problem and not report.infrastructure]
    for found, what in ((bad, "failed"), (lost, "could not be checked, for infrastructure failed")):
        if found:
            names = ", ".join(_line(report.name) for report in found)
            typer.echo(f"{len(found)} of {len(reports)} rows {what}: {names}", err=True)
    if bad or lost:
        raise typer.Exit(1)
    if not as_json:
        typer.echo(f"All {len(reports)} rows are good: gold scores 1.0 and an empty answer 0.0, {runs} times over.")
        typer.echo("A wrong answer scored 0.0 as often.")


def _commonest_gold(environment: "Environment[Any]", rows: "list[DiskRow]") -> "Sequence[ScriptedStep]":
    """Return the gold trajectory of most rows, the first of equally many; none if no two rows have the same."""
    counts: Counter[bytes] = Counter()
    firsts: dict[bytes, DiskRow] = {}
    for row in rows:
        with suppress(RolloutError):  # reported when the row is played
            digest = sha256(repr(environment.gold_steps(row.task)).encode(errors="replace")).digest()
            counts[digest] += 1
            firsts.setdefault(digest, row)
    digest, count = max(counts.items(), key=lambda item: item[1], default=(b"", 0))
    return environment.gold_steps(firsts[digest].task) if count > 1 else ()


async def play_rows(
    environment: "Environment[Any]",
    rows: "list[DiskRow]",
    runs: int,
    config: "SandboxConfig",
    jobs: int,
    constant: "Sequence[ScriptedStep]",
) -> list[RowReport]:
    """Return the report of each row, in the order of the rows; print each as its row ends."""
    from prorl_gym.concurrency import for_each
    from prorl_gym.sandbox.backend_selection import open_backend

    backend = await open_backend(config)
    reports: dict[int, RowReport] = {}

    async def check(place: int) -> None:
        row = rows[place]
        report = reports[place] = await validate_row(environment, row.name, row.task, backend, runs, constant)
        verdict = _line(report.problem) or f"good ({report.seconds:.1f} s)"
        typer.echo(f"{len(reports)}/{len(rows)} {_line(report.name)}: {verdict}", err=True)

    try:
        await for_each(range(len(rows)), jobs, check)
    finally:
        await backend.close()
    return [reports[place] for place in range(len(rows))]


async def validate_row(
    environment: "Environment[Any]",
    name: str,
    row: Mapping[str, Any],
    backend: "SandboxBackend",
    runs: int,
    constant: "Sequence[ScriptedStep]" = (),
) -> RowReport:
    """Play gold, an empty and a wrong answer, ``runs`` times each; report what is wrong with the row.

    If nothing is, play ``constant``, the gold trajectory of other rows.
    """
    from prorl_gym.environments.playback import find_row_problem, play_script, wrong_steps
    from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases

    started = time.monotonic()
    gold: list[float] = []
    empty: list[float] = []
    wrong: list[float] = []
    prompts: list[tuple[Message, ...]] = []
    reason = ""
    turns = 0
    infrastructure, paid = False, None

    async def with_leases(work: "Callable[[SandboxLeases], Awaitable[Result]]") -> Result:
        leases = SandboxLeases(backend)
        try:
            return await work(leases)
        finally:
            await leases.close()

    try:
        steps = environment.gold_steps(row)
        for run in range(runs):
            plays = ((steps, gold), ((), empty), (wrong_steps(environment, row, run), wrong))
            for script, rewards in plays:
                played = await with_leases(partial(play_script, environment, row, script))
                rewards.append(played.score.reward)
                if rewards is gold:
                    said = [" ".join(each.content.split()) for each in played.artifacts.messages if each.role == "tool"]
                    reason = str(played.score.detail.get("why", "")) + "".join(f"; {each[-300:]}" for each in said[-1:])
                prompts.append(played.episode.messages)
                turns = max(turns, played.turns)
        problem = _find_problem(gold, empty, wrong, reason, same_prompt=prompts.count(prompts[0]) == len(prompts))
        problem = problem or await with_leases(partial(find_row_problem, environment, row))
        if not problem and constant:
            played = await with_leases(partial(play_script, environment, row, constant))
            paid = played.score.reward
    except RolloutError as error:
        problem = f"{error.kind.value}: {error.what} {error.fix}".rstrip()
        infrastructure = error.cause is Cause.INFRASTRUCTURE
    seconds = time.monotonic() - started
    return RowReport(name, tuple(gold), tuple(empty), tuple(wrong), turns, seconds, problem, infrastructure, paid)


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
    from rich.markup import escape
    from rich.table import Table

    if len(reports) > _LONGEST_TABLE:
        reports = [report for report in reports if report.problem]
        typer.echo("The table leaves out the good rows.")
    table = Table("row", "gold", "empty", "wrong", "turns", "seconds", "verdict")
    for report in reports:
        verdict = f"[red]{escape(_line(report.problem))}[/red]" if report.problem else "[green]good[/green]"
        kinds = (report.gold, report.empty, report.wrong)
        table.add_row(
            escape(_line(report.name)),
            *(" ".join(f"{reward:g}" for reward in rewards) or "-" for rewards in kinds),
            str(report.turns),
            f"{report.seconds:.1f}",
            verdict,
        )
    Console().print(table)


def _line(text: str) -> str:
    """Return a row's text in one line, without control characters: rows are not trusted."""
    from prorl_gym.cli.service_client.service_connection import printable

    return " ".join(printable(text).split())
