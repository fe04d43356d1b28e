"""``prorl-gym prepare`` and ``import-tasks``: rows of public data sets, source distributions and task directories."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prorl_gym.cli.validate import BackendName
from prorl_gym.errors import ConfigError

if TYPE_CHECKING:
    from prorl_gym.data.pipeline import LocatedRow
    from prorl_gym.data.sdist.row_maker import ProjectReport, RowOptions
    from prorl_gym.data.task_layouts import ImportedTask
    from prorl_gym.environments.protocol import Environment
    from prorl_gym.sandbox.config import SandboxConfig

_TASKDIR_AGENT = "prorl_taskdir_agent"


def prepare(
    name: Annotated[str, typer.Argument(help="Name of the environment or benchmark: swe, prorl_aime25.")],
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of a data set: .jsonl, .json or .parquet. A benchmark's is downloaded otherwise."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File of rows to write: rows.jsonl, or where NeMo Gym looks for the benchmark's."
        ),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="Format of the inputs; detected from the fields by default.")
    ] = "auto",
    leave_out: Annotated[
        list[str] | None, typer.Option(help="Field of the inputs that changes neither question nor answer. Repeatable.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Most rows to write; 0: all.")] = 0,
    agent: Annotated[str, typer.Option(help="Name of the NeMo Gym agent instance that the rows name.")] = "",
    gym: Annotated[bool, typer.Option("--gym/--bare", help="Rows in NeMo Gym's flat form, or bare.")] = True,
    force: Annotated[bool, typer.Option(help="Replace the output when it exists.")] = False,
    from_sdist: Annotated[
        list[str] | None, typer.Option(help="swe: make rows from this source distribution, NAME==VERSION. Repeatable.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="swe, from a distribution: rows to make from each.")] = 1,
    seed: Annotated[int, typer.Option(help="swe, from a distribution: selects which faults are seeded.")] = 0,
    max_failing: Annotated[
        int, typer.Option(min=1, help="swe, from a distribution: most tests that a fault may break.")
    ] = 20,
    needs: Annotated[
        list[str] | None,
        typer.Option("--with", help="swe, from a distribution: package that its tests import. Repeatable."),
    ] = None,
    index: Annotated[str, typer.Option(help="Package index; by default the one pip is configured for.")] = "",
    backend: Annotated[BackendName, typer.Option(help="Sandbox backend for the tests of distributions.")] = "auto",
    allow_unsafe_local: Annotated[bool, typer.Option(help="Permit the backend without isolation.")] = False,
) -> None:
    """Make rows of an environment or benchmark from a public data set, or SWE rows from source distributions."""
    from prorl_gym.data.benchmarks import BENCHMARKS, benchmark_file, read_benchmark
    from prorl_gym.data.pipeline import open_row_file, read_dataset
    from prorl_gym.data.sdist.row_maker import RowOptions
    from prorl_gym.environments import registry
    from prorl_gym.sandbox.config import SandboxConfig

    benchmark = BENCHMARKS.get(name)
    if benchmark is None and bool(inputs) == bool(from_sdist):
        raise ConfigError("Nothing to prepare, or two things.", "Give files of a data set, or --from-sdist.")
    if from_sdist and name != "swe":
        raise ConfigError(f"Rows of '{name}' cannot be made from source distributions.", "Use `prepare swe`.")
    environment = registry.get(benchmark.environment if benchmark else name)
    if benchmark:
        agent, form = agent or f"{name}_agent", benchmark.form
        output = output or benchmark_file(name)
        output.parent.mkdir(parents=True, exist_ok=True)
    output = output or Path("rows.jsonl")
    with open_row_file(output, force=force) as write:
        if from_sdist:
            row_options = RowOptions(rows, seed, max_failing)
            config = SandboxConfig(backend=backend, allow_unsafe_local=allow_unsafe_local)
            made = _rows_from_sdists(from_sdist, needs or (), index, row_options, config)
        else:
            files = inputs or ()
            located = read_benchmark(benchmark, files) if benchmark else chain.from_iterable(map(read_dataset, files))
            made = _rows_from_dataset(environment, located, form, limit, frozenset(leave_out or ()))
        count = asyncio.run(_write_rows(write, environment, made, (agent or f"prorl_{name}_agent") if gym else ""))
        if not count:
            raise ConfigError("No row was made, so no file is written.", "The reasons are printed above.")
    typer.echo(f"{_row_count_text(count)} {'is' if count == 1 else 'are'} in {output}.")
    if benchmark:
        output.with_name(f"{output.stem}_metrics.json").unlink(missing_ok=True)  # Gym's figures of the rows before
        if benchmark.size not in (None, count):
            typer.echo(f"Published are {benchmark.size}: figures of these rows are not those of the whole benchmark.")


async def _write_rows(
    write: Callable[[Mapping[str, Any]], object],
    environment: "Environment[Any]",
    made: AsyncIterator[Mapping[str, Any]],
    agent: str,
) -> int:
    """Write rows as they are made, in NeMo Gym's form if an agent is named; return their number."""
    from prorl_gym.environments.row_format import to_gym_row

    count = 0
    async for row in made:
        write(await to_gym_row(environment, row, agent) if agent else row)
        count += 1
    return count


async def _rows_from_dataset(
    environment: "Environment[Any]", located: "Iterable[LocatedRow]", form: str, limit: int, leave_out: frozenset[str]
) -> AsyncIterator[Mapping[str, Any]]:
    from prorl_gym.cli.service_client.service_connection import printable
    from prorl_gym.data.converters import select_converters
    from prorl_gym.data.pipeline import ConversionReport, convert_rows

    report, converters = ConversionReport(), select_converters(environment.name, form)
    for row in islice(convert_rows(located, converters, environment, report, leave_out), limit or None):
        yield row
    typer.echo(printable("\n".join(report.lines())))


def _row_count_text(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


async def _rows_from_sdists(
    names: Sequence[str], needs: Sequence[str], index: str, row_options: "RowOptions", config: "SandboxConfig"
) -> AsyncIterator[Mapping[str, Any]]:
    """Make rows of each distribution; report and skip one that cannot be used."""
    from prorl_gym.data.sdist.row_maker import open_project
    from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
    from prorl_gym.sandbox.backend_selection import open_backend

    backend = await open_backend(config)
    try:
        for name in names:
            leases = SandboxLeases(backend)
            try:
                cache = config.ipython_cache_dir().with_name("sdists")
                project = await open_project(name, needs, cache, index, leases, row_options)
                async for row in project.make_rows():
                    yield row
                _print_outcome(name, project.outcome)
            except ConfigError as error:
                typer.echo(f"{name} is left out: {error}", err=True)
            finally:
                await leases.close()
    finally:
        await backend.close()


def _print_outcome(name: str, outcome: "ProjectReport") -> None:
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


def import_tasks(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Tasks, or directories of tasks.")],
    output: Annotated[Path, typer.Option(help="JSONL file of rows to write.")],
    image_map: Annotated[
        list[str] | None,
        typer.Option(metavar="FROM=IMAGE", help="Image in place of a Dockerfile's FROM; '*' for all others."),
    ] = None,
    dockerfile_run: Annotated[
        Literal["refuse", "setup", "built"],
        typer.Option(
            "--run", help="RUN is refused, run before each rollout without network, or part of the mapped image."
        ),
    ] = "refuse",
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Directory to grade: only these are copied to the clean sandbox that runs the tests."),
    ] = None,
    test_command: Annotated[
        str, typer.Option(help="Command instead of each task's script; exit code 0: reward 1.")
    ] = "",
    force: Annotated[bool, typer.Option(help="Replace the output when it exists.")] = False,
) -> None:
    """Turn task directories into rows of the environment `taskdir`, for `validate` and `submit`.

    Exit code 1: some tasks could not be imported. Standard error names the reasons; the other tasks are written.
    """
    from prorl_gym.cli.service_client.service_connection import printable
    from prorl_gym.config import load_config
    from prorl_gym.data.pipeline import ConversionReport, open_row_file
    from prorl_gym.data.task_layouts import read_task
    from prorl_gym.environments.taskdir.container import ImportOptions

    pairs = [entry.rpartition("=") for entry in image_map or []]
    for image, mark, mapped in pairs:
        if not image or not mapped:
            entry = f"{image}{mark}{mapped}"
            raise ConfigError(f"--image-map {entry!r} is no pair.", "Write FROM=IMAGE, for example ubuntu:24.04=host.")
    given: dict[str, Any] = {"run": dockerfile_run, "keep": tuple(keep or ()), "test_command": test_command}
    options = load_config(ImportOptions, {**given, "image_map": {image: to for image, _, to in pairs}}, "import-tasks")
    tasks = [task for directory in directories for task in _find_tasks(directory)]
    report, places = ConversionReport(read=len(tasks)), dict[str, Path]()
    with open_row_file(output, force=force) as write:
        for task in tasks:
            try:
                imported = read_task(task, options)
                if places.setdefault(imported.row.id, task) is not task:
                    first = places[imported.row.id]
                    raise ConfigError(f"{task}: has the name of {first}.", "Rename one: it is the row's id.")
            except ConfigError as error:
                typer.echo(printable(f"{task.name}: {error}"), err=True)
                report.skip(_reason(error, task), task.name)
                continue
            write(_gym_row(imported))
            report.written += 1
            report.unproven += imported.row.solution is None
            for note in imported.notes:
                typer.echo(printable(f"{task.name}: {note}"), err=True)
            report.notes.update(imported.notes)
        typer.echo(printable("\n".join(report.lines())))
        if not report.written:
            typer.echo("no task was imported")
            raise typer.Exit(1)  # leaves the output as it was
    typer.echo(f"{report.written} of {len(tasks)} tasks are in {output}")
    if report.skipped:
        raise typer.Exit(1)


def _reason(error: ConfigError, task: Path) -> str:
    """Return what is wrong with a task, without its name, lines and commands: equal for all tasks of that kind."""
    text = str(error).partition("\n")[0].replace(f"{task}/", "").replace(f"{task}: ", "")
    text = re.sub(r"'[^']*'", lambda found: "'...'" if " " in found[0] else found[0], text)
    return re.sub(r":\d+:", ":", text)


def _gym_row(imported: "ImportedTask") -> dict[str, Any]:
    from prorl_gym.environments.row_format import to_gym_row
    from prorl_gym.environments.taskdir.environment import TaskDirEnvironment

    task = imported.row.model_dump(mode="json", exclude_defaults=True)
    task["setup"] = [step.model_dump(mode="json") for step in imported.row.setup]  # a default tells files from commands
    row = asyncio.run(to_gym_row(TaskDirEnvironment(), task, _TASKDIR_AGENT))
    return row | {"prorl": {"settings": imported.settings.model_dump(mode="json", exclude_none=True)}}


def _find_tasks(directory: Path) -> list[Path]:
    from prorl_gym.data.task_layouts import is_task

    if not directory.is_dir():
        raise ConfigError(f"{directory}: is no directory.", "Give a task, or a directory of tasks.")
    if is_task(directory):
        return [directory]
    found = sorted(entry for entry in directory.iterdir() if is_task(entry))
    if not found:
        raise ConfigError(f"{directory}: holds no tasks.", "A task has a task.toml or a task.yaml.")
    return found
