r"""What systems do when the engine fails: the rows of ``bench peers``, one engine that fails on purpose.

Each system makes the same rollouts at once under one fault after the other (``_failures_plan.py``): 8 of a kind, with
90 s until whatever is not answered counts as lost. What comes of each is counted: solved; a lower reward that looks
like the policy's; a failure that is marked; no result. Which calls fail is fixed by their number and a seed; a call
that a system repeats is a call of its own. Retries are left as each system has them by default; where a system has a
setting for the longest duration of a call, it is 10 s. After each fault one more rollout shows whether the system still
works. Nothing is reported unless a healthy engine gives reward 1 on every row in every system.

Peers live in environments of their own (``bench/peers-environment``); one that is missing is left out by name.
``PRORL_BENCH_SYSTEMS=ours,mini-swe-agent`` measures some systems only, ``--short`` 4 rollouts of a kind.
"""

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import _failures_systems as systems
import _versions
from _failures_count import Cell, Log, Sampled, count
from _failures_load import Batch
from _failures_plan import FAULTS, HEALTHY, Fault, Kind
from _failures_systems import Arm, Engine, MakeBatch, Started, System
from _report import SHORT, Better, Figure, Report, StartConditions, figure, peer, report
from _rollout_systems import BenchRefusedError, Site, peer_environment

ROLLOUTS = 4 if SHORT else 8
LIMIT_SECONDS = 90.0
RECOVERY_SECONDS = 30.0
"""Longest time of the rollout that shows whether a system still works."""
PEER_PACKAGES = {"verifiers-0.1": "verifiers", "verifiers-0.4": "verifiers", "mini-swe-agent": "mini-swe-agent"}


class FailuresReport(Report):
    """The report with every count of every system under every fault."""

    cells: list[dict[str, object]]
    left_out: dict[str, str]


async def measure_system(system: System, site: Site, engine: Engine) -> list[Cell]:
    """Measure every arm under every fault; a system that still has unanswered rollouts is started again.

    Raises:
        BenchRefusedError: a row is not solved with a healthy engine.
    """
    cells: list[Cell] = []
    wanted = [(index, fault) for fault in (HEALTHY, *FAULTS) for index in range(len(system.arms))]
    while wanted:
        await engine.load_weights(0)
        async with system.start(site) as started:
            while wanted:
                index, fault = wanted.pop(0)
                cell = await measure_cell(system.arms[index], fault, started, started.batches[index], engine)
                print(json.dumps(asdict(cell)), file=sys.stderr, flush=True)
                cells.append(cell)
                if cell.has_died or cell.unanswered:
                    break
    return cells


async def measure_cell(arm: Arm, fault: Fault, started: Started, make: MakeBatch, engine: Engine) -> Cell:
    """Make a batch under a fault, then one rollout without it.

    Raises:
        BenchRefusedError: a row is not solved with a healthy engine.
    """
    await engine.post("fault", {"kind": fault.kind})
    update = asyncio.create_task(_update_weights(arm, started, engine)) if fault.kind is Kind.WEIGHTS else None
    batch = await _made(make, ROLLOUTS, LIMIT_SECONDS)
    if update is not None:
        await update
    answered = await engine.get("log")
    await engine.post("fault", {"kind": HEALTHY.kind})
    after = await _made(make, 1, RECOVERY_SECONDS)
    has_died = after.made[0].reward != 1.0 or bool(after.made[0].mark)
    cell = count(arm.system, arm.row, fault.words, batch, _log(answered["sampled"]), has_died=has_died)
    if fault is HEALTHY and (cell.solved, answered["calls"]) != (ROLLOUTS, ROLLOUTS * arm.calls):
        what = f"{arm.system}, {arm.row}: {cell.solved} of {ROLLOUTS} solved in {answered['calls']} calls, no fault."
        raise BenchRefusedError(what, f"Nothing is reported: its rows do not work here. {cell.reasons}")
    return cell


async def _made(make: MakeBatch, rollouts: int, seconds: float) -> Batch:
    """Make a batch; when the system ended meanwhile, all of it is lost."""
    try:
        return await make(rollouts, seconds)
    except (BenchRefusedError, ConnectionError) as error:
        return systems.lost_batch(rollouts, seconds, str(error)[:200])


async def _update_weights(arm: Arm, started: Started, engine: Engine) -> None:
    """Load other weights when half of the calls have come, and report them to a system that has a call for it."""
    await engine.get(f"reached?calls={ROLLOUTS * arm.calls // 2}")
    if started.client is None:
        await engine.load_weights(engine.version + 1)
        return
    async with started.client.weight_update() as update:
        await engine.load_weights(update.version)


def _log(sampled: Sequence[dict[str, object]]) -> Log:
    log: dict[tuple[int, ...], list[Sampled]] = {}
    for answer in sampled:
        prompt: list[int] = answer["prompt"]  # pyright: ignore[reportAssignmentType]
        log.setdefault(tuple(prompt), []).append(
            Sampled(answer["ids"], answer["logprobs"], answer["version"])  # pyright: ignore[reportArgumentType]
        )
    return log


MEASURES: tuple[tuple[str, str, Better, Callable[[Cell], float]], ...] = (
    ("rewards below 1 that look like the policy's", "", "lower", lambda cell: cell.silent),
    ("rollouts without a result", "", "lower", lambda cell: cell.lost),
    ("rollouts solved", "", "higher", lambda cell: cell.solved),
    ("until the last answer, all faults together", "s", "lower", lambda cell: cell.seconds),
)
"""What is summed over all faults: name, unit, which is better, and how it is read."""


def figures_of(cells: Sequence[Cell]) -> list[Figure]:
    """Return the sums over all faults: ours on each row beside the peers that have it."""
    failed = [cell for cell in cells if cell.fault != HEALTHY.words]
    return [figure_of(failed, row, ours, measure) for row, ours in _own_arms(failed) for measure in MEASURES]


def figure_of(
    cells: Sequence[Cell], row: str, ours: str, measure: tuple[str, str, Better, Callable[[Cell], float]]
) -> Figure:
    """Return one sum."""
    words, unit, better, value = measure

    def total(system: str) -> list[float]:
        return [float(sum(value(cell) for cell in cells if (cell.row, cell.system) == (row, system)))]

    names = dict.fromkeys(cell.system for cell in cells if cell.row == row and not cell.system.startswith("ours"))
    beside = [peer(name, total(name)) for name in names]
    return figure(f"{row}, {ours}: {words}", total(ours), unit, better=better, peers=beside)


def _own_arms(cells: Sequence[Cell]) -> Sequence[tuple[str, str]]:
    return list(dict.fromkeys((cell.row, cell.system) for cell in cells if cell.system.startswith("ours")))


async def measure(directory: Path) -> tuple[list[Cell], dict[str, str]]:
    """Measure every system that is installed."""
    known = systems.selected(systems.all_systems())
    missing = {arm.system: system.missing for system in known if system.missing for arm in system.arms}
    left_out = {**missing, **systems.NOT_RUN}
    for name, why in left_out.items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    cells: list[Cell] = []
    async with systems.running_failing_engine(Site("", directory)) as engine:
        site = Site(engine.url, directory)
        for system in known:
            if not system.missing:
                cells += await measure_system(system, site, engine)
    return cells, left_out


def run() -> FailuresReport:
    """Measure, report.

    Raises:
        BenchRefusedError: a row is not solved with a healthy engine. The logs are kept.
    """
    begun = StartConditions.capture()
    # /var/tmp is on a disk where /tmp may be memory.
    directory = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="prorl-bench-"))
    directory.chmod(0o711)  # sandboxes have another uid when this is root
    try:
        cells, left_out = asyncio.run(measure(directory))
    except BenchRefusedError as refusal:
        raise BenchRefusedError(refusal.what, f"{refusal.fix} Logs: {directory}") from refusal
    shutil.rmtree(directory)
    versions = {
        name: _versions.versions_in(peer_environment(name) / "bin" / "python", package).get(package, "not installed")
        for name, package in PEER_PACKAGES.items()
    }
    made = report("failures", figures_of(cells), "nemo-gym", begun=begun, also=versions)
    return FailuresReport(**made, cells=[asdict(cell) for cell in cells], left_out=left_out)


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
