"""``prorl-gym prepare NAME``: make rows out of public data sets, or out of a project on a package index."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prorl_gym.cli.validate import BackendName
from prorl_gym.errors import ConfigError

if TYPE_CHECKING:
    from prorl_gym.environments.prepare.writer import RowsFile
    from prorl_gym.environments.protocol import Environment
    from prorl_gym.environments.swe.sdist.make import Outcome


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("prepare")(prepare)


def prepare(
    name: Annotated[str, typer.Argument(help="Name of the environment, for example swe.")],
    inputs: Annotated[list[Path] | None, typer.Argument(help="Files of a data set: .jsonl, .json or .parquet.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File of rows to write.")] = Path("rows.jsonl"),
    form: Annotated[
        str, typer.Option("--format", help="Format of the inputs; by default seen from the fields.")
    ] = "auto",
    limit: Annotated[int, typer.Option(min=0, help="Rows to write at most; 0: all.")] = 0,
    agent: Annotated[str, typer.Option(help="Name of the NeMo Gym agent instance, for rows in its form.")] = "",
    gym: Annotated[bool, typer.Option("--gym/--bare", help="Rows in NeMo Gym's flat form, or bare.")] = True,
    force: Annotated[bool, typer.Option(help="Replace the output when it exists.")] = False,
    from_sdist: Annotated[
        list[str] | None, typer.Option(help="swe: make rows from this source distribution, NAME==VERSION. Repeatable.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="swe, from a distribution: rows to make of each.")] = 1,
    seed: Annotated[int, typer.Option(help="swe, from a distribution: decides which faults are seeded.")] = 0,
    max_failing: Annotated[
        int, typer.Option(min=1, help="swe, from a distribution: tests that a fault may break.")
    ] = 20,
    needs: Annotated[
        list[str] | None, typer.Option("--with", help="swe, from a distribution: what its tests import. Repeatable.")
    ] = None,
    index: Annotated[str, typer.Option(help="Package index; by default the one pip is configured for.")] = "",
    backend: Annotated[BackendName, typer.Option(help="Sandbox backend for the tests of distributions.")] = "auto",
    allow_unsafe_local: Annotated[bool, typer.Option(help="Permit the backend without isolation.")] = False,
) -> None:
    """Make rows of an environment out of a public data set, or SWE rows out of source distributions."""
    from prorl_gym.environments import registry
    from prorl_gym.environments.prepare.writer import RowsFile

    if bool(inputs) == bool(from_sdist):
        raise ConfigError("Nothing to prepare, or two things.", "Give files of a data set, or --from-sdist.")
    if from_sdist and name != "swe":
        raise ConfigError(f"Rows of '{name}' cannot be made from source distributions.", "Use `prepare swe`.")
    environment = registry.get(name)
    with RowsFile(output, force=force) as file:
        if from_sdist:
            wanted = _Distributions(
                from_sdist, needs or (), index, rows, seed, max_failing, backend, allow_unsafe_local
            )
            made = _from_sdists(wanted)
        else:
            made = _from_files(environment, inputs or (), form, limit)
        count = asyncio.run(_write(file, environment, made, (agent or f"prorl_{name}_agent") if gym else ""))
        if not count:
            raise ConfigError("No row was made, so no file is written.", "The reasons stand above.")
    typer.echo(f"{_rows(count)} {'is' if count == 1 else 'are'} in {output}.")


@dataclass(frozen=True, slots=True)
class _Distributions:
    names: Sequence[str]
    needs: Sequence[str]
    index: str
    rows: int
    seed: int
    max_failing: int
    backend: BackendName
    allow_unsafe_local: bool


async def _write(
    file: "RowsFile", environment: "Environment[Any]", made: AsyncIterator[Mapping[str, Any]], agent: str
) -> int:
    """Write rows as they come, in NeMo Gym's form when an agent is named; return how many."""
    from prorl_gym.environments.gym_rows import to_gym_row

    count = 0
    async for row in made:
        file.write(await to_gym_row(environment, row, agent) if agent else row)
        count += 1
    return count


async def _from_files(
    environment: "Environment[Any]", inputs: Sequence[Path], form: str, limit: int
) -> AsyncIterator[Mapping[str, Any]]:
    from prorl_gym.environments import prepare as converters
    from prorl_gym.environments.prepare.pipeline import Report, convert
    from prorl_gym.environments.prepare.readers import read

    report = Report()
    placed = chain.from_iterable(map(read, inputs))
    for row in islice(convert(placed, converters.choose(environment.name, form), environment, report), limit or None):
        yield row
    typer.echo(f"{_rows(report.read)} read, {report.written} written, {report.skipped.total()} left out.")
    if report.unsolved:
        typer.echo(f"  {report.unsolved} of these without a solution: `prorl-gym validate` cannot prove them.")
    for reason, count in sorted(report.skipped.items()):
        typer.echo(f"  {count} left out: {reason} (the first: {report.first[reason]})")


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


async def _from_sdists(wanted: _Distributions) -> AsyncIterator[Mapping[str, Any]]:
    """Make rows of each distribution; one that cannot be used is named and left out."""
    from prorl_gym.environments.swe.sdist.make import Wish, open_project
    from prorl_gym.rollout.leases import SandboxLeases
    from prorl_gym.sandbox.choose import open_backend
    from prorl_gym.sandbox.config import SandboxConfig

    wish = Wish(wanted.rows, wanted.seed, wanted.max_failing)
    config = SandboxConfig(backend=wanted.backend, allow_unsafe_local=wanted.allow_unsafe_local)
    backend = await open_backend(config)
    try:
        for name in wanted.names:
            leases = SandboxLeases(backend)
            try:
                cache = config.ipython_cache().with_name("sdists")
                project = await open_project(name, wanted.needs, cache, wanted.index, leases, wish)
                async for row in project.rows():
                    yield row
                _tell(name, project.outcome)
            except ConfigError as error:
                typer.echo(f"{name} is left out: {error}", err=True)
            finally:
                await leases.close()
    finally:
        await backend.close()


def _tell(name: str, outcome: "Outcome") -> None:
    typer.echo(f"{name}: {outcome.tests} tests pass twice; {outcome.rejected.total()} mutants were not used.")
    for reason, count in sorted(outcome.rejected.items()):
        typer.echo(f"  {count} not used: {reason}")
    for row, plan in outcome.coverage.items():
        sealed, controlled = len(plan.sealed), len(plan.controlled)
        typer.echo(
            f"  {row}: of {plan.total} tests that show the fault {sealed} are sealed, {controlled} have controls."
        )
        if plan.uncovered:
            typer.echo(f"    with neither: {', '.join(plan.uncovered)}")
        if plan.unknown:
            typer.echo(f"    {len(plan.unknown)} of them are made when the tests run: no body can be changed.")
    if outcome.flaky:
        typer.echo(f"  flaky, left out: {', '.join(outcome.flaky)}")
