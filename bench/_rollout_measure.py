"""Measures arms: rate, CPU of the machine without the engine's, time beyond the engine. Refuses worthless figures."""

import asyncio
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from _processes import cpu_seconds
from _report import SHORT
from _rollout_load import Load, Seen
from _rollout_systems import Arm, BenchRefusedError, PutLoad, Site, System
from _rollout_work import CALLERS, RUNS

IDLE_LOAD = 1.0
"""Load average below which a run may begin."""
WAIT_SECONDS = 1800.0
_QUIET_SHARE, _QUIET_SECONDS, _QUIET_LIMIT = 0.1, 0.2, 2.0
"""The machine is quiet when less than this share of one core was busy for so long; the wait for it is bounded."""
OPEN = 0
"""Key of the open loop, beside the numbers of callers of closed ones."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One load on one arm."""

    per_second: float
    cpu_ms: float
    """Of the whole machine without the engine, per rollout."""
    beyond_ms: list[float]
    """Milliseconds of each rollout beyond what the engine takes."""


@dataclass(slots=True)
class Results:
    """All loads of all runs, by work and arm, and number of callers (``OPEN``: the open loop)."""

    loads: dict[tuple[str, str, int], list[Measured]] = field(
        default_factory=lambda: defaultdict[tuple[str, str, int], list[Measured]](list)
    )

    def of(self, work: str, arm: str, callers: int) -> Sequence[Measured]:
        """Return the runs of a load; none where it was not measured."""
        return self.loads.get((work, arm, callers), [])


def busy_seconds(stat: str, ticks: int) -> float:
    """Return the seconds that all cores were busy, of the text of /proc/stat: user, nice, system, irq, softirq."""
    user, nice, system, _idle, _wait, irq, softirq = map(int, stat.split("\n", 1)[0].split()[1:8])
    return (user + nice + system + irq + softirq) / ticks


def cpu_per_rollout(machine: tuple[float, float], engine: tuple[float, float], count: int) -> float:
    """Return CPU ms per rollout from seconds before and after, those of the engine taken away."""
    return ((machine[1] - machine[0]) - (engine[1] - engine[0])) * 1000 / count


def check(arm: Arm, load: Load, seen: Seen, calls: int) -> None:
    """Refuse a load whose figures would be worthless.

    Raises:
        BenchRefusedError: a rollout is missing or has no reward of 1, or the engine counted other calls than expected.
    """
    fix = "Nothing is reported: figures of other work than was asked for compare with nothing."
    wrong = sum(reward != 1.0 for reward in seen.rewards)
    if wrong or len(seen.rewards) != load.count:
        made = f"{load.count} rollouts were asked for, {len(seen.rewards)} made"
        raise BenchRefusedError(f"{arm.name}, {arm.work.name}: {wrong} rewards are not 1 ({made}).", fix)
    if calls != load.count * arm.calls:
        what = f"{arm.name}, {arm.work.name}: the engine counted {calls} calls, expected {load.count * arm.calls}."
        raise BenchRefusedError(what, fix)


class Machine:
    """CPU and calls, as the kernel and the engine count them.

    Args:
        engine: its address.
        pid: its process.
    """

    def __init__(self, engine: str, pid: int) -> None:
        self._calls = f"{engine.removesuffix('/v1')}/calls"
        self._pid = pid

    def busy(self) -> float:
        """Return the machine's busy seconds."""
        return busy_seconds(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK"))

    def engine(self) -> float:
        """Return the engine's CPU seconds."""
        return cpu_seconds([self._pid])

    async def calls(self) -> int:
        """Return how many calls the engine answered."""
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
        """Put a load on an arm.

        Raises:
            BenchRefusedError: see ``check``.
        """
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
    """Warm an arm up, then measure closed loops, and an open loop at half of its rate."""
    await put(Load(arm.sizes.warm_up, min(CALLERS, arm.sizes.warm_up)))
    await machine.wait_quiet()
    for callers, count in arm.sizes.closed.items():
        measured = await machine.measure(arm, Load(count, callers), put)
        results.loads[arm.work.name, arm.name, callers].append(measured)
        print(
            f"{arm.work.name}, {arm.name}, {callers} callers, n={count}: {measured.per_second:.1f}/s, "
            f"{measured.cpu_ms:.1f} CPU ms",
            file=sys.stderr,
        )
    if arm.sizes.open:
        half = results.of(arm.work.name, arm.name, CALLERS)[-1].per_second / 2
        measured = await machine.measure(arm, Load(arm.sizes.open, per_second=half), put)
        results.loads[arm.work.name, arm.name, OPEN].append(measured)


async def measure_all(systems: Sequence[System], site: Site, pid: int) -> Results:
    """Measure every system that is installed, one after the other, ``RUNS`` times over."""
    machine, results = Machine(site.engine, pid), Results()
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
    """Wait until the load average is below 1; a short run does not wait.

    Raises:
        BenchRefusedError: something else keeps running.
    """
    if SHORT:
        return
    end = time.monotonic() + WAIT_SECONDS
    print(f"waiting for a load average below {IDLE_LOAD:g}", file=sys.stderr)
    while os.getloadavg()[0] >= IDLE_LOAD:
        if time.monotonic() > end:
            what = f"The load average stays at {os.getloadavg()[0]:.1f}; a run begins below {IDLE_LOAD:g}."
            raise BenchRefusedError(what, "End what else runs on this machine, or try it with --short.")
        time.sleep(5)


def left_out(systems: Sequence[System]) -> Mapping[str, str]:
    """Return the arms that are not measured here, with the reason."""
    return {arm.name: system.missing for system in systems if system.missing for arm in system.arms}
