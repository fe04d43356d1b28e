"""Kills of a spawner, or of first processes of its sandboxes, at random moments."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Literal

from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


@asynccontextmanager
async def killing(
    backend: NamespaceBackend, victim: Literal["spawner", "init"], chance: Random
) -> AsyncIterator[Callable[[], int]]:
    """Kill now and then while the block lasts; yields how often so far."""
    kills, over = 0, asyncio.Event()

    async def kill() -> None:
        nonlocal kills
        while not over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), chance.uniform(0.3, 1.5))
            spawner = await backend.spawner_pid()
            victims = [spawner] if victim == "spawner" else children_of(spawner)
            if victims and not over.is_set():
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(victims), signal.SIGKILL)
                    kills += 1

    task = asyncio.create_task(kill())
    try:
        yield lambda: kills
    finally:
        over.set()
        await task
