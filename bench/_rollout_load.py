"""Load on one system: callers in a closed loop, or starts at a fixed spacing.

Peers' own environments import this module too, so it needs only the standard library. ``answer_loads`` makes a program
of a peer: it reads one load per line of its input and prints what was seen.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

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
    """What the client of a load saw."""

    seconds: float
    """From the first start to the last end."""
    latencies: list[float]
    """Milliseconds of each rollout; in the open loop from the moment it was due."""
    rewards: list[float]


def start_times(count: int, per_second: float) -> list[float]:
    """Return the seconds at which rollouts of an open loop are due: a fixed spacing, the first at 0."""
    return [number / per_second for number in range(count)]


async def put_load(load: Load, rollout: Rollout) -> Seen:
    """Make the rollouts of a load."""
    latencies: list[float] = []
    rewards: list[float] = []
    began = time.perf_counter()

    async def one(due: float) -> None:
        rewards.append(await rollout())
        latencies.append((time.perf_counter() - due) * 1000)

    async def caller(first: int) -> None:
        for _ in range(first, load.count, load.callers):
            await one(time.perf_counter())

    async def arrival(due: float) -> None:
        await asyncio.sleep(due - time.perf_counter())
        await one(due)

    async with asyncio.TaskGroup() as tasks:
        if load.per_second is None:
            for first in range(min(load.callers, load.count)):
                tasks.create_task(caller(first))
        else:
            for after in start_times(load.count, load.per_second):
                tasks.create_task(arrival(began + after))
    return Seen(time.perf_counter() - began, latencies, rewards)


async def answer_loads(rollout: Rollout) -> None:
    """Put every load that the input names on ``rollout``; libraries that print do so on standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        seen = await put_load(Load(**json.loads(line)), rollout)
        print(json.dumps(asdict(seen)), file=answers, flush=True)
