"""``prorl-gym demo``: roll out four environments through NeMo Gym and write a page of the results."""

import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prorl_gym.cli.installation import gym_root

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from prorl_gym.cli.demo.stack import DemoFolders, DemoStack, LoggedProcess, ProcessSupervisor

Results = Sequence[Mapping[str, Any]]

_COLUMNS = ("turns", "tokens", "queue", "INIT", "RUN", "EVAL")
_MEANS = {
    "turns": ".1f",
    "sampled_tokens": ".0f",
    "queued_seconds": ".1f",
    "init_seconds": ".1f",
    "run_seconds": ".1f",
    "eval_seconds": ".1f",
}
"""Keys of a row whose means these columns show, without ``prorl_``, and their formats."""


def demo(
    base_url: Annotated[str, typer.Option(help="A vLLM server's /v1 address; oracle engines when omitted.")] = "",
    model: Annotated[str, typer.Option(help="Name of the model on that server.")] = "",
    tokenizer: Annotated[
        str, typer.Option(help="That model's tokenizer: a directory or a hub name. Default: the model's name.")
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Rollouts of each row.")] = 4,
    output: Annotated[Path, typer.Option(help="Directory of the results, logs and page.")] = Path("outputs"),
) -> None:
    """Roll out the example rows of four environments through NeMo Gym and show the results."""
    if bool(base_url) != bool(model):
        raise typer.BadParameter("--base-url and --model (make: BASE_URL and MODEL) come together")
    raise typer.Exit(asyncio.run(_interruptible(_run(base_url, model, tokenizer or model, repeats, output))))


async def _interruptible(work: Coroutine[Any, Any, int]) -> int:
    """Run to the end; the first SIGINT or SIGTERM cancels it, further ones do not interrupt the clean-up."""
    task = asyncio.ensure_future(work)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            print("\ndemo: stopping everything ...", file=sys.stderr)
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        print("demo: interrupted", file=sys.stderr)
        return 130


async def _run(base_url: str, model: str, tokenizer: str, repeats: int, output: Path) -> int:
    """Run the demo; return the exit code. Raises ``DemoError`` if a part did not start or did not finish."""
    from rich.console import Console

    from prorl_gym.cli.demo.stack import DemoStack
    from prorl_gym.cli.service_client.show import read_results, write_page

    console = Console()
    started = time.monotonic()
    async with _folders(output) as folders:
        async with _supervised_processes(folders, console) as supervisor:
            stack = DemoStack(supervisor, folders)
            console.print("[1/3] engines", "(yours)" if base_url else "(two oracles: scripted policies)")
            engines = await (stack.check_server(base_url, model, tokenizer) if base_url else stack.start_oracles(2))
            console.print("[2/3] NeMo Gym: rollout service, four environments")
            await stack.start_gym(engines, lambda name: console.print(f"  {name} is ready", highlight=False))
            rows = folders.scratch / "rows.jsonl"
            expected = _interleave_rows(rows) * repeats
            console.print("[3/3] rollouts")
            await _collect(stack, await stack.start_eval(rows, repeats), folders, expected, console)
        results = read_results(folders.results)
        page = folders.output / "rollouts.html"
        write_page(folders.results, engines.tokenizer, page)
    errors, masked = check_results(results, expected)
    console.print(results_table(results))
    for error in errors[:10]:
        console.print(f"[red]{error}[/red]", highlight=False)
    if masked:
        console.print(f"[red]{masked} rollouts have no reward; see failure_kind and failure_reason.[/red]")
    said = "every row passes" if not errors else f"{len(errors)} complaints"
    console.print(f"NeMo-RL's checks (token continuity, triples, groups, masks): {said}", highlight=False)
    console.print(f"results: {folders.results}\npage:    {page}", highlight=False, soft_wrap=True)
    console.print(f"{time.monotonic() - started:.0f} s in all", highlight=False)
    return 1 if errors or masked else 0


def _interleave_rows(path: Path) -> int:
    """Write the example rows of all environments into one file, interleaved; return their number."""
    from prorl_gym.cli.demo.stack import ENVIRONMENTS

    files = [gym_root() / f"environments/prorl_{name}/data/example.jsonl" for name in ENVIRONMENTS]
    columns = [[line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()] for file in files]
    lines = [json.dumps(json.loads(line)) for row in zip(*columns, strict=True) for line in row]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


async def _collect(
    stack: "DemoStack", child: "LoggedProcess", folders: "DemoFolders", expected: int, console: "Console"
) -> None:
    """Show progress while the collection runs: by rows written, since Gym reports nothing else to another process."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    def count_rows() -> int:
        return folders.results.read_bytes().count(b"\n") if folders.results.exists() else 0

    async def watch() -> None:
        while True:
            progress.update(bar, completed=count_rows())
            await asyncio.sleep(0.3)

    columns = (TextColumn("  rollouts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=expected)
        watcher = asyncio.create_task(watch())
        try:
            async with asyncio.timeout(60 + 30 * expected):
                code = await child.process.wait()
        except TimeoutError:
            raise stack.program_error(child, "did not finish in time") from None
        finally:
            watcher.cancel()
        if code != 0:
            raise stack.program_error(child, f"ended with code {code}")
        progress.update(bar, completed=count_rows())


@asynccontextmanager
async def _folders(output: Path) -> "AsyncGenerator[DemoFolders]":
    """Make the folders of this run; the scratch one is removed."""
    from prorl_gym.cli.demo.stack import DemoFolders

    kept = (output / time.strftime("demo-%Y%m%d-%H%M%S")).resolve()
    number = 1
    while kept.exists():
        number += 1
        kept = kept.with_name(f"{kept.name.split('_')[0]}_{number}")
    kept.mkdir(parents=True)
    scratch = Path(tempfile.mkdtemp(prefix="prorl-", dir="/tmp"))
    try:
        yield DemoFolders(kept, scratch)
    except asyncio.CancelledError:
        print(f"demo: what there is so far: {kept}", file=sys.stderr)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@asynccontextmanager
async def _supervised_processes(folders: "DemoFolders", console: "Console") -> "AsyncGenerator[ProcessSupervisor]":
    """Supervise the programs: when the block ends, however it ends, nothing that was started is left."""
    from prorl_gym.cli.demo.stack import DemoError, ProcessSupervisor
    from prorl_gym.sandbox.syscalls import set_child_subreaper

    set_child_subreaper()
    supervisor = ProcessSupervisor(folders.output)
    try:
        yield supervisor
    finally:
        left = await asyncio.shield(asyncio.ensure_future(supervisor.stop_all()))
        if left:
            console.print(f"[red]{left} processes could not be ended[/red]")
            raise DemoError(f"{left} processes outlived the demo.", "Look for them with `ps -ef --forest`.")


def check_results(results: Results, expected: int) -> tuple[list[str], int]:
    """Apply NeMo-RL's checks to every row and every group; there must be ``expected`` rows.

    Returns what fails, and how many rows have no reward: failures that the model did not cause.
    """
    from prorl_gym.trainers.nemo_rl import TrainerContractError, check_group, check_result

    errors = [] if len(results) == expected else [f"{len(results)} rows came back, {expected} were sent"]
    checks: list[Callable[[], object]] = [partial(check_result, result) for result in results]
    checks += [partial(check_group, group) for group in _groups(results).values()]
    for check in checks:
        try:
            check()
        except TrainerContractError as error:
            errors.append(str(error))
    return errors, sum(bool(result.get("mask_sample")) for result in results)


def results_table(results: Results) -> "Table":
    """Return the table: one line per environment."""
    from rich.table import Table

    repeats = max((len(group) for group in _groups(results).values()), default=1)
    caption = "reward: mean; queue, INIT, RUN, EVAL: mean seconds per rollout"
    out = Table(box=None, padding=(0, 1, 0, 0), caption=caption)
    for name in ("environment", "rollouts", "reward", "pass@1", f"pass@{repeats}", *_COLUMNS):
        out.add_column(name, justify="left" if name == "environment" else "right", no_wrap=True)
    for name in sorted({str(result.get("environment")) for result in results}):
        rows = [result for result in results if str(result.get("environment")) == name]
        rewards = [float(row["reward"]) for row in rows if not row.get("mask_sample")]
        means = {key: fmean(float(row.get(f"prorl_{key}") or 0.0) for row in rows) for key in _MEANS}
        out.add_row(
            name,
            str(len(rows)),
            f"{fmean(rewards):.2f}" if rewards else "-",
            f"{pass_at(rows, any_of=False):.2f}",
            f"{pass_at(rows, any_of=True):.2f}",
            *(format(mean, _MEANS[key]) for key, mean in means.items()),
        )
    return out


def pass_at(results: Results, any_of: bool) -> float:
    """Return the share of solved rollouts, or, with ``any_of``, of tasks that some rollout solved.

    A rollout solves its task when its reward is 1 or more. Masked rows are no measurement and do not count.
    """
    measured = [[row for row in group if not row.get("mask_sample")] for group in _groups(results).values()]
    groups = [[float(row.get("reward") or 0.0) >= 1.0 for row in group] for group in measured if group]
    if not groups:
        return 0.0
    return fmean(any(group) if any_of else fmean(group) for group in groups)


def _groups(results: Results) -> dict[Any, list[Mapping[str, Any]]]:
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault(result.get("_ng_task_index"), []).append(result)
    return groups
