"""Load on one system: callers in a closed loop, starts at a fixed spacing, or arrivals at random moments.

Peers' own environments import this module too, so it needs only the standard library. ``answer_loads`` makes a program
of a peer: it reads one load per line of its input and prints what was seen.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles

Rollout = Callable[[], Awaitable[float]]
"""Makes one rollout and returns its reward."""


@dataclass(frozen=True, slots=True)
class Load:
    """Rollouts to make: by ``callers`` in a closed loop, or started at ``per_second``."""

    count: int
    callers: int = 1
    per_second: float | None = None
    """Open loop: rollouts start at a fixed spacing, however many are still running."""


@dataclass(frozen=True, slots=True)
class Seen:
    seconds: float
    """From the first start to the last end."""
    latencies: list[float]
    """Milliseconds of each rollout; in the open loop from the moment it was due."""
    rewards: list[float]


async def closed_loop(count: int, callers: int, act: Callable[[], Awaitable[object]]) -> float:
    """Have callers act, each one time after the other, ``count`` times in all; return the seconds that took."""

    async def caller(first: int) -> None:
        for _ in range(first, count, callers):
            await act()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for first in range(min(callers, count)):
            tasks.create_task(caller(first))
    return time.perf_counter() - began


async def poisson_arrivals(
    rate: float, act: Callable[[float], Awaitable[Sequence[float]]], seconds: float, seed: int
) -> list[float]:
    """Act at random moments, whether or not what came before is done; return all that was noted.

    ``act`` is given the moment at which it was due, on the clock of ``perf_counter``: a late start counts.
    """
    rng = random.Random(seed)
    noted: list[float] = []

    async def arrival(due: float) -> None:
        noted.extend(await act(due))

    began = due = time.perf_counter()
    async with asyncio.TaskGroup() as arrivals:
        while (due := due + rng.expovariate(rate)) < began + seconds:
            await asyncio.sleep(due - time.perf_counter())
            arrivals.create_task(arrival(due))
    return noted


async def times_ms(count: int, act: Callable[[], Awaitable[object]], warm_up: int = 1) -> list[float]:
    """Act ``count`` times, after some times that do not count; return the milliseconds of each."""
    times: list[float] = []
    for _ in range(warm_up + count):
        began = time.perf_counter()
        await act()
        times.append((time.perf_counter() - began) * 1000)
    return times[warm_up:]


def percentile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]


async def put_load(load: Load, rollout: Rollout) -> Seen:
    latencies: list[float] = []
    rewards: list[float] = []

    async def one(due: float) -> None:
        rewards.append(await rollout())
        latencies.append((time.perf_counter() - due) * 1000)

    async def arrival(due: float) -> None:
        await asyncio.sleep(due - time.perf_counter())
        await one(due)

    if load.per_second is None:
        seconds = await closed_loop(load.count, load.callers, lambda: one(time.perf_counter()))
        return Seen(seconds, latencies, rewards)
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(load.count):
            tasks.create_task(arrival(began + number / load.per_second))
    return Seen(time.perf_counter() - began, latencies, rewards)


async def answer_loads(rollout: Rollout) -> None:
    """Put every load that the input names on ``rollout``; libraries that print do so on standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        seen = await put_load(Load(**json.loads(line)), rollout)
        print(json.dumps(asdict(seen)), file=answers, flush=True)
