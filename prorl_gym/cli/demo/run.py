"""The demo from beginning to end."""

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from prorl_gym.cli.demo.process_supervisor import LoggedProcess, ProcessSupervisor
from prorl_gym.cli.demo.stack import ENVIRONMENTS, DemoError, DemoFolders, DemoStack, PolicyEndpoint
from prorl_gym.cli.installation import gym_root
from prorl_gym.cli.service_client.show import read_results, write_page
from prorl_gym.sandbox.syscalls import set_child_subreaper
from prorl_gym.trainers.nemo_rl import TrainerContractError, check_group, check_result

Results = Sequence[Mapping[str, Any]]

_STAGES = {"queue": "queued", "INIT": "init", "RUN": "run", "EVAL": "eval"}
"""Columns of seconds, and their keys in a row."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the command line."""

    base_url: str
    model: str
    tokenizer: str
    repeats: int
    output: Path


async def run(options: DemoOptions) -> int:
    """Run the demo; returns the exit code.

    Raises:
        DemoError: a part did not start or did not finish. Everything is stopped all the same.
    """
    console = Console()
    started = time.monotonic()
    async with _folders(options.output) as folders:
        async with _supervised_processes(folders, console) as supervisor:
            stack = DemoStack(supervisor, folders)
            console.print("[1/3] engines", "(yours)" if options.base_url else "(two oracles: scripted policies)")
            engines = await _engines(options, stack)
            console.print("[2/3] NeMo Gym: rollout service, four environments")
            await stack.start_gym(engines, lambda name: console.print(f"  {name} is ready", highlight=False))
            rows = folders.scratch / "rows.jsonl"
            expected = _interleave_rows(rows) * options.repeats
            console.print("[3/3] rollouts")
            await _collect(stack, await stack.start_eval(rows, options.repeats), folders, expected, console)
        results = read_results(folders.results)
        page = folders.output / "rollouts.html"
        write_page(folders.results, engines.tokenizer, page)
    verdict = check_results(results, expected)
    console.print(results_table(results))
    for error in verdict.errors[:10]:
        console.print(f"[red]{error}[/red]", highlight=False)
    if verdict.masked:
        console.print(f"[red]{verdict.masked} rollouts have no reward; see failure_kind and failure_reason.[/red]")
    said = "every row passes" if not verdict.errors else f"{len(verdict.errors)} complaints"
    console.print(f"NeMo-RL's checks (token continuity, triples, groups, masks): {said}", highlight=False)
    console.print(f"results: {folders.results}\npage:    {page}", highlight=False, soft_wrap=True)
    console.print(f"{time.monotonic() - started:.0f} s in all", highlight=False)
    return 0 if verdict.passed else 1


async def _engines(options: DemoOptions, stack: DemoStack) -> PolicyEndpoint:
    if options.base_url:
        return await stack.check_server(options.base_url, options.model, options.tokenizer)
    return await stack.start_oracles(2)


def _interleave_rows(path: Path) -> int:
    """Write the example rows of all environments into one file, interleaved; return their number."""
    files = [gym_root() / f"environments/prorl_{name}/data/example.jsonl" for name in ENVIRONMENTS]
    columns = [[line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()] for file in files]
    lines = [json.dumps(json.loads(line)) for row in zip(*columns, strict=True) for line in row]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


async def _collect(
    stack: DemoStack, child: LoggedProcess, folders: DemoFolders, expected: int, console: Console
) -> None:
    """Show progress while the collection runs.

    Raises:
        DemoError: it failed, or took too long.
    """
    columns = (TextColumn("  rollouts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=expected)
        watcher = asyncio.create_task(_show_progress(folders.results, progress, bar))
        try:
            async with asyncio.timeout(60 + 30 * expected):
                code = await child.process.wait()
        except TimeoutError:
            raise stack.program_error(child, "did not finish in time") from None
        finally:
            watcher.cancel()
        if code != 0:
            raise stack.program_error(child, f"ended with code {code}")
        progress.update(bar, completed=_count_rows(folders.results))


async def _show_progress(results: Path, progress: Progress, bar: TaskID) -> None:
    """Show how many rows Gym has written: it reports no other progress to another process."""
    while True:
        progress.update(bar, completed=_count_rows(results))
        await asyncio.sleep(0.3)


def _count_rows(results: Path) -> int:
    return results.read_bytes().count(b"\n") if results.exists() else 0


@asynccontextmanager
async def _folders(output: Path) -> AsyncGenerator[DemoFolders]:
    """Make the folders of this run; the scratch one is removed."""
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
async def _supervised_processes(folders: DemoFolders, console: Console) -> AsyncGenerator[ProcessSupervisor]:
    """Supervise the programs: when the block ends, however it ends, nothing that was started is left."""
    set_child_subreaper()
    supervisor = ProcessSupervisor(folders.output)
    try:
        yield supervisor
    finally:
        left = await asyncio.shield(asyncio.ensure_future(supervisor.stop_all()))
        if left:
            console.print(f"[red]{left} processes could not be ended[/red]")
            raise DemoError(f"{left} processes outlived the demo.", "Look for them with `ps -ef --forest`.")


@dataclass(frozen=True, slots=True)
class TrainerCheck:
    """Whether a trainer could use the rows."""

    errors: list[str]
    masked: int
    """Rows without a reward: a failure that the model did not cause."""

    @property
    def passed(self) -> bool:
        """Whether all rows are usable and none is masked."""
        return not self.errors and not self.masked


def check_results(results: Results, expected: int) -> TrainerCheck:
    """Apply NeMo-RL's checks to every row and every group.

    Args:
        results: the rows.
        expected: number of rows that there must be.
    """
    errors = [] if len(results) == expected else [f"{len(results)} rows came back, {expected} were sent"]
    for result in results:
        try:
            check_result(result)
        except TrainerContractError as error:
            errors.append(str(error))
    for group in _groups(results).values():
        try:
            check_group(group)
        except TrainerContractError as error:
            errors.append(str(error))
    return TrainerCheck(errors, sum(bool(result.get("mask_sample")) for result in results))


def results_table(results: Results) -> Table:
    """Return the table: one line per environment."""
    repeats = max((len(group) for group in _groups(results).values()), default=1)
    caption = "reward: mean; queue, INIT, RUN, EVAL: mean seconds per rollout"
    out = Table(box=None, padding=(0, 1, 0, 0), caption=caption)
    for name in ("environment", "rollouts", "reward", "pass@1", f"pass@{repeats}", "turns", "tokens", *_STAGES):
        out.add_column(name, justify="left" if name == "environment" else "right", no_wrap=True)
    for name in sorted({str(result.get("environment")) for result in results}):
        out.add_row(*_table_row(name, [r for r in results if str(r.get("environment")) == name]))
    return out


def pass_at(results: Results, any_of: bool) -> float:
    """Return the share of solved rollouts, or, with ``any_of``, of tasks that some rollout solved.

    A rollout solves its task when its reward is 1 or more. Masked rows are no measurement and do not count.
    """
    groups = [[_solved(r) for r in group if not r.get("mask_sample")] for group in _groups(results).values()]
    groups = [group for group in groups if group]
    if not groups:
        return 0.0
    return fmean(any(group) if any_of else fmean(group) for group in groups)


def _table_row(name: str, rows: Results) -> list[str]:
    def mean(key: str) -> float:
        return fmean(float(row.get(key) or 0.0) for row in rows)

    measured = [float(row["reward"]) for row in rows if not row.get("mask_sample")]
    return [
        name,
        str(len(rows)),
        f"{fmean(measured):.2f}" if measured else "-",
        f"{pass_at(rows, any_of=False):.2f}",
        f"{pass_at(rows, any_of=True):.2f}",
        f"{mean('prorl_turns'):.1f}",
        f"{mean('prorl_sampled_tokens'):.0f}",
        *(f"{mean(f'prorl_{stage}_seconds'):.1f}" for stage in _STAGES.values()),
    ]


def _groups(results: Results) -> dict[Any, list[Mapping[str, Any]]]:
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault(result.get("_ng_task_index"), []).append(result)
    return groups


def _solved(result: Mapping[str, Any]) -> bool:
    return float(result.get("reward") or 0.0) >= 1.0
