"""End to end beside peers: whole rollouts of an agent, their rate, the CPU and the time that they cost.

Work 1 is one question, work 2 a shell task (``_rollout_work.py``). One engine process, 20 ms per call, serves all
systems; its CPU is taken from that of the whole machine (/proc/stat), so clients count, as do sandboxes being removed.
Closed loops at some numbers of callers, then an open loop at half of the system's own rate at 32. Runs are interleaved:
every system once, then again. The bench waits for a load average below 1, and is refused unless every reward is 1 and
the engine counted the exact calls.

Peers live in environments of their own (``bench/peers-environment``); one that is missing is left out by name.
``--short`` measures a tenth, once, on a machine of any load.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import _rollout_systems as systems
import aiohttp
from _load import Load, Seen, percentile
from _processes import UNSHARE, cpu_seconds, process_tree, pss
from _programs import BenchRefusedError
from _report import SHORT, Better, Figure, Report, figure, peer, program_version, report, versions_in
from _rollout_systems import Arm, PutLoad, Site, System, all_systems, peer_environment, peers_engine
from _rollout_work import CALLERS, QUESTION_WORK, RUNS, SHELL_WORK, WORKS, Work

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

IDLE_LOAD = 1.0
"""Load average below which a run may begin."""
WAIT_SECONDS = 1800.0
_QUIET_SHARE, _QUIET_SECONDS, _QUIET_LIMIT = 0.1, 0.2, 2.0
"""The machine is quiet when less than this share of one core was busy for so long; the wait for it is bounded."""
OPEN = 0
"""Key of the open loop, beside the numbers of callers of closed ones."""


@dataclass(frozen=True, slots=True)
class Measured:
    per_second: float
    cpu_ms: float
    """Of the whole machine without the engine, per rollout."""
    beyond_ms: list[float]
    """Milliseconds of each rollout beyond what the engine takes."""


Results = defaultdict[tuple[str, str, int], list[Measured]]
"""All loads of all runs, by work and arm, and number of callers (``OPEN``: the open loop)."""


def busy_seconds(stat: str, ticks: int) -> float:
    """Return the seconds that all cores were busy, of the text of /proc/stat: user, nice, system, irq, softirq."""
    user, nice, system, _idle, _wait, irq, softirq = map(int, stat.split("\n", 1)[0].split()[1:8])
    return (user + nice + system + irq + softirq) / ticks


def cpu_per_rollout(machine: tuple[float, float], engine: tuple[float, float], count: int) -> float:
    """Return CPU ms per rollout from seconds before and after, those of the engine taken away."""
    return ((machine[1] - machine[0]) - (engine[1] - engine[0])) * 1000 / count


def check(arm: Arm, load: Load, seen: Seen, calls: int) -> None:
    """Refuse a load whose figures would be worthless."""
    fix = "Nothing is reported: figures of other work than was asked for compare with nothing."
    wrong = sum(reward != 1.0 for reward in seen.rewards)
    if wrong or len(seen.rewards) != load.count:
        made = f"{load.count} rollouts were asked for, {len(seen.rewards)} made"
        raise BenchRefusedError(f"{arm.name}, {arm.work.name}: {wrong} rewards are not 1 ({made}).", fix)
    if calls != load.count * arm.calls:
        what = f"{arm.name}, {arm.work.name}: the engine counted {calls} calls, expected {load.count * arm.calls}."
        raise BenchRefusedError(what, fix)


class Machine:
    """CPU and calls, as the kernel and the engine count them."""

    def __init__(self, engine: str, pid: int) -> None:
        self._calls = f"{engine.removesuffix('/v1')}/calls"
        self._pid = pid

    def busy(self) -> float:
        return busy_seconds(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK"))

    def engine(self) -> float:
        return cpu_seconds([self._pid])

    async def calls(self) -> int:
        async with aiohttp.ClientSession() as session, session.get(self._calls) as response:
            return (await response.json())["calls"]

    async def wait_quiet(self) -> None:
        """Wait until what a load left behind, such as sandboxes being removed, is done: its CPU counts too."""
        end = time.perf_counter() + _QUIET_LIMIT
        while time.perf_counter() < end:
            before = self.busy()
            await asyncio.sleep(_QUIET_SECONDS)  # processes of others: there is no event to wait for
            if self.busy() - before <= _QUIET_SHARE * _QUIET_SECONDS:
                return

    async def measure(self, arm: Arm, load: Load, put: PutLoad) -> Measured:
        busy, engine, calls = self.busy(), self.engine(), await self.calls()
        seen = await put(load)
        await self.wait_quiet()
        check(arm, load, seen, await self.calls() - calls)
        return Measured(
            load.count / seen.seconds,
            cpu_per_rollout((busy, self.busy()), (engine, self.engine()), load.count),
            [latency - arm.work.engine_ms for latency in seen.latencies],
        )


async def measure_arm(arm: Arm, put: PutLoad, machine: Machine, results: Results) -> None:
    await put(Load(arm.sizes.warm_up, min(CALLERS, arm.sizes.warm_up)))
    await machine.wait_quiet()
    for callers, count in arm.sizes.closed.items():
        measured = await machine.measure(arm, Load(count, callers), put)
        results[arm.work.name, arm.name, callers].append(measured)
        print(
            f"{arm.work.name}, {arm.name}, {callers} callers, n={count}: {measured.per_second:.1f}/s, "
            f"{measured.cpu_ms:.1f} CPU ms",
            file=sys.stderr,
        )
    if arm.sizes.open:
        half = results[arm.work.name, arm.name, CALLERS][-1].per_second / 2
        measured = await machine.measure(arm, Load(arm.sizes.open, per_second=half), put)
        results[arm.work.name, arm.name, OPEN].append(measured)


async def measure_all(systems: Sequence[System], site: Site, pid: int) -> Results:
    """Measure every system that is installed, one after the other, ``RUNS`` times over."""
    machine, results = Machine(site.engine, pid), Results(list)
    for number in range(RUNS):
        for system in systems:
            arms = [arm for arm in system.arms if not (arm.once and number)]
            if system.missing or not arms:
                continue
            async with system.start(site) as puts:
                for arm, put in zip(system.arms, puts, strict=True):
                    await measure_arm(arm, put, machine, results)
    return results


def wait_for_idle_machine() -> None:
    """Wait until the load average is below 1; a short run does not wait."""
    if SHORT:
        return
    end = time.monotonic() + WAIT_SECONDS
    print(f"waiting for a load average below {IDLE_LOAD:g}", file=sys.stderr)
    while os.getloadavg()[0] >= IDLE_LOAD:
        if time.monotonic() > end:
            what = f"The load average stays at {os.getloadavg()[0]:.1f}; a run begins below {IDLE_LOAD:g}."
            raise BenchRefusedError(what, "End what else runs on this machine, or try it with --short.")
        time.sleep(5)


COUNT, TOGETHER = (10, 8) if SHORT else (100, 32)
"""Starts of a run; sandboxes whose memory is measured together."""
APPTAINER = (
    *("apptainer", "-q", "exec", "--userns", "--containall", "--no-home", "--cleanenv", "--net", "--network=none"),
    *("--no-init", "--no-mount=bind-paths,sys,tmp,hostfs,cwd", "--pwd=/", "--bind=/usr:/usr:ro", "--writable"),
)
"""As the backend calls it; a root and a command follow."""
MEMORY_MB = 8.0
BARE: Mapping[BackendName, str] = {
    "userns": "six namespaces by `unshare`, a fresh /proc, `true` (floor)",
    "apptainer": "`apptainer exec` with the same options, `true` (floor)",
}


async def measure_floors(machine: Machine, directory: Path) -> list[Figure]:
    """Return what a sandbox and its python worker cost alone, on an idle machine; the whole machine's CPU counts."""
    figures = await _measure_starts("userns", UNSHARE, BARE["userns"], machine)
    if shutil.which("apptainer"):
        bare = (*APPTAINER, str(_bare_root(directory)), "true")
        figures += await _measure_starts("apptainer", bare, BARE["apptainer"], machine)
    try:
        memory = [await _memory()]
    except PermissionError as error:  # only root sees processes that cannot be traced
        print(f"left out: memory of a sandbox: {error}; run the bench as root", file=sys.stderr)
        return figures
    name = "a sandbox with a python worker: memory, PSS"
    return [*figures, figure(name, memory, "MB", backend="userns", target=MEMORY_MB)]


async def _measure_starts(name: BackendName, bare: Sequence[str], floor: str, machine: Machine) -> list[Figure]:
    """Return CPU ms of each start on one backend, beside that of what the backend stands on, alone."""
    backend = NamespaceBackend(name, SandboxConfig())
    starts, with_python, alone = list[float](), list[float](), list[float]()

    async def start_alone() -> None:
        for _ in range(COUNT):
            subprocess.run(bare, check=True, stderr=subprocess.DEVNULL)  # noqa: ASYNC221 - nothing else runs here

    try:
        await _start_and_close(backend, 3, python=True)  # brings the disk's pages in, starts the template
        for _ in range(RUNS):
            for times, act in (
                (starts, partial(_start_and_close, backend, COUNT, python=False)),
                (with_python, partial(_start_and_close, backend, COUNT, python=True)),
                (alone, start_alone),
            ):
                before = machine.busy()
                await act()
                await machine.wait_quiet()
                times.append((machine.busy() - before) * 1000 / COUNT)
    finally:
        await backend.close()
    peers = [peer(floor, alone)]
    return [
        figure("a sandbox, started and closed: CPU", starts, "ms", backend=name, peers=peers),
        figure("the same with python's first cell: CPU", with_python, "ms", backend=name, peers=peers),
    ]


def _bare_root(directory: Path) -> Path:
    """Make the least root that Apptainer accepts, over the host's /usr."""
    root = directory / "bare-root"
    for name in ("usr", "proc", "dev", "sys", "etc", "tmp", "root"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    return root


async def _start_and_close(backend: NamespaceBackend, count: int, *, python: bool) -> None:
    for _ in range(count):
        box = await backend.start_sandbox(SandboxSpec())
        if python:
            await _first_cell(box)
        await box.close()
    await backend.wait_idle()


async def _first_cell(box: RunningSandbox) -> None:
    said = (await (await box.python()).run_cell("print(12345 * 6789)", timeout=60)).output
    if said != "83810205\n":
        raise RuntimeError(f"the cell answered {said!r}")


async def _memory() -> float:
    """Return MB of each of several sandboxes with a python worker: PSS of all below the spawner, the template too."""
    backend = NamespaceBackend("userns", SandboxConfig())
    try:
        spawner = await backend.spawner_pid()
        empty = pss(process_tree(spawner))
        for _ in range(TOGETHER):
            await _first_cell(await backend.start_sandbox(SandboxSpec()))
        return (pss(process_tree(spawner)) - empty) / TOGETHER
    finally:
        await backend.close()


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    better: Better
    of: Callable[[Measured], float]


RATE = Metric("rollouts", "1/s", "higher", lambda load: load.per_second)
CPU = Metric("CPU per rollout", "ms", "lower", lambda load: load.cpu_ms)
P50 = Metric("beyond the engine, p50", "ms", "lower", lambda load: median(load.beyond_ms))
P99 = Metric("beyond the engine, p99", "ms", "lower", lambda load: percentile(load.beyond_ms, 99))

TARGETS: Mapping[tuple[str, BackendName], Mapping[tuple[Metric, int], float]] = {
    (QUESTION_WORK.name, "userns"): {(CPU, CALLERS): 35.0, (P50, 1): 30.0},
    (QUESTION_WORK.name, "apptainer"): {(CPU, CALLERS): 60.0},
}
"""By work and backend, then by metric and callers."""
TIMES = {systems.GYM: 1.2, systems.TOOL_ENV: 0.7, systems.TOOL_ENV_BWRAP: 2.0}
"""How many times the rate of a peer is wanted of ``userns`` at 32 callers."""
PEERS = {
    QUESTION_WORK.name: (systems.GYM, systems.TOOL_ENV, systems.TOOL_ENV_BWRAP, systems.BASH_HARNESS),
    SHELL_WORK.name: (systems.MINI, systems.MINI_BWRAP),
}
PEER_PACKAGES = {"verifiers-0.1": "verifiers", "verifiers-0.4": "verifiers", "mini-swe-agent": "mini-swe-agent"}
"""Package of each peer's own environment."""


def work_rows(results: Results, work: Work) -> list[Figure]:
    """Return the figures of a work: ours on each backend beside the peers, ours through Gym beside Gym's."""
    rows: list[Figure] = []
    for backend, arm in systems.OURS.items():
        rows += arm_rows(
            results, work, work.name, arm, backend, PEERS[work.name], TARGETS.get((work.name, backend), {})
        )
    if work is QUESTION_WORK:
        through = f"{work.name}, through Gym"
        rows += arm_rows(results, work, through, systems.THROUGH_GYM, "userns", (systems.GYM,), {})
    return rows


def arm_rows(
    results: Results,
    work: Work,
    name: str,
    arm: str,
    backend: BackendName,
    peers: Sequence[str],
    bounds: Mapping[tuple[Metric, int], float],
) -> list[Figure]:
    """Return the figures of an arm of ours; none of a load that was not measured."""
    closed = list(work.sizes.closed)
    wanted = [(RATE, callers) for callers in closed if callers > 1] + [(CPU, callers) for callers in closed]
    rows: list[Figure] = []
    for metric, callers in (*wanted, (P50, 1), (P50, OPEN), (P99, OPEN)):
        if not (seen := results.get((work.name, arm, callers))):
            continue
        compared = metric is RATE and callers == CALLERS and backend == "userns"
        # The floor answers how much of a latency is the client's and the engine's; its rate compares with nothing.
        names = (systems.FLOOR, *peers) if metric in (P50, P99) and peers else peers
        beside = [
            peer(other, list(map(metric.of, loads)), target=TIMES.get(other) if compared else None)
            for other in names
            if (loads := results.get((work.name, other, callers)))
        ]
        load = "half of the rate" if callers == OPEN else f"{callers} caller{'s' if callers > 1 else ''}"
        rows.append(
            figure(
                f"{name}, {load}: {metric.name}",
                list(map(metric.of, seen)),
                metric.unit,
                better=metric.better,
                backend=backend,
                target=bounds.get((metric, callers)),
                peers=beside,
            )
        )
    return rows


async def measure(directory: Path) -> list[Figure]:
    known = all_systems()
    for system in known:
        if system.missing:
            print(*(f"left out: {arm.name}: {system.missing}" for arm in system.arms), sep="\n", file=sys.stderr)
    async with peers_engine(directory) as (engine, pid):
        floors = await measure_floors(Machine(engine, pid), directory)
        results = await measure_all(known, Site(engine, directory), pid)
    rows = [row for work in WORKS for row in work_rows(results, work)]
    return [*rows, *floors]


def peer_versions() -> dict[str, str]:
    """Return the versions of the peers in environments of their own, and of the programs they use."""
    found: dict[str, str] = {}
    for name, package in PEER_PACKAGES.items():
        python = peer_environment(name) / "bin" / "python"
        found[name] = versions_in(python, package).get(package, "not installed")
    return {**found, **program_version("bwrap"), **program_version("apptainer")}


def run() -> Report:
    """Wait for an idle machine, measure, report."""
    wait_for_idle_machine()
    begun = os.getloadavg()[0]
    print(f"load average {begun:.2f}", file=sys.stderr)
    # /var/tmp is on a disk where /tmp may be memory.
    directory = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="prorl-bench-"))
    directory.chmod(0o711)  # sandboxes have another uid when this is root
    try:
        figures = asyncio.run(measure(directory))
    except BenchRefusedError as refusal:
        raise BenchRefusedError(refusal.what, f"{refusal.fix} Logs: {directory}") from refusal
    shutil.rmtree(directory)
    made = report("peers", figures, "nemo-gym", "ipython", begun=begun, also=peer_versions())
    print(f"load average {made['load_average_after']:.2f} at the end", file=sys.stderr)
    return made
