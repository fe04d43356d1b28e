"""How long a cancel takes to reach the engine's connection and every process, with real sandboxes and HTTP.

The engine is a server in this process that never answers: it notes when a call's connection is closed. Deaths are told
by the kernel (pidfd), so nothing is polled but what has no event: mounts and directories of sandboxes.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _service_work as work
from _processes import all_processes, process_tree
from _service_server import Server

from prorl_gym.client import Client
from prorl_gym.environments.protocol import Episode, RunContext
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.spawner.scratch import SandboxState
from prorl_gym.testing.rollout.fake_rollout import Script, ScriptedEnvironment

_PATIENCE = 60.0
"""Seconds after which a cancel is not late but lost."""


class Busy(ScriptedEnvironment):
    """Its agent leaves processes behind, one of them in a session of its own, and then asks the model."""

    async def run(self, task: Script, episode: Episode, context: RunContext) -> None:
        """See ``Environment.run``."""
        box = await context.leases.get_agent_sandbox(SandboxSpec())
        shell = await box.shell()
        await shell.run_command(f"sleep {task.id} & setsid -f sleep {task.id}; echo up", timeout=60)
        await context.policy.start_conversation(episode.messages, ())


@asynccontextmanager
async def engines_at(url: str) -> AsyncGenerator[ModelPolicySource, None]:
    """Give policies that are served at this address, by the engine client as shipped."""
    async with EnginePool("policy") as pool:
        pool.add_engine(VllmEngine("silent", url, VllmOptions(model="m", vocab_size=1000)))
        yield ModelPolicySource(pool, load_codec("small"))


class SilentEngine:
    """Speaks enough HTTP to be called, and never answers: no call, no abort."""

    def __init__(self) -> None:
        self.closed: list[float] = []
        """When connections with a call were closed."""
        self.calls = 0
        self._changed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read until the other side is gone."""
        call = False
        try:
            call = (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST /v1/completions")
            self.calls += call
            self._tell()
            while await reader.read(1 << 16):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            if call:
                self.closed.append(time.perf_counter())
            writer.close()
            self._tell()

    async def until(self, *, calls: int = 0, closed: int = 0) -> None:
        """Wait until there were so many."""
        while self.calls < calls or len(self.closed) < closed:
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(frozen=True, slots=True)
class _Box:
    """A sandbox as the host sees it."""

    directory: Path
    mounts: str
    """Its mount namespace."""
    holders: Sequence[int]
    """Processes that were in it, its own and any others. The kernel gives the name of one that is gone to the next."""
    processes: Sequence[int]
    """Its own, as pidfds."""

    def is_there(self) -> bool:
        """Whether its directory or its mounts are."""
        return self.directory.exists() or any(_mounts(pid) == self.mounts for pid in self.holders)


@dataclass(slots=True)
class Cancels:
    """What was seen."""

    dead: list[float]
    """ms from the request until the engine's connections were closed and every process was dead."""
    gone: list[float]
    """Seconds until the sandboxes' mounts and directories were gone."""
    processes: int
    """That died."""


def _boxes(scratch: Path, marks: set[str]) -> dict[str, _Box]:
    """Return sandboxes by the mark that their sleepers have."""
    found: dict[str, _Box] = {}
    holders: dict[str, list[int]] = {}
    for pid in all_processes():
        holders.setdefault(_mounts(pid), []).append(pid)
    for directory in scratch.iterdir():
        init = SandboxState.from_json((directory / "state.json").read_text()).init
        if init is None:
            continue
        members = process_tree(init.pid)
        mark = next((mark for pid in members if (mark := _slept(pid)) in marks), None)
        if mark is not None:
            mounts = _mounts(init.pid)
            found[mark] = _Box(directory, mounts, holders[mounts], [os.pidfd_open(pid) for pid in members])
    return found


def _slept(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[0] == b"sleep":
            return words[1].decode()
    return ""


async def _died(pidfd: int) -> float:
    """Wait for the end of a process; return when it was."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
        return time.perf_counter()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _mounts(pid: int) -> str:
    """Return the mount namespace of a process; nothing of one that is gone, or may not be looked at."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return os.readlink(f"/proc/{pid}/ns/mnt")
    return ""


async def _gone(boxes: Sequence[_Box]) -> float:
    while any(box.is_there() for box in boxes):  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # nobody tells
    return time.perf_counter()


async def measure_cancels(server: Server, engine: SilentEngine, scratch: Path, run_id: str, size: int) -> Cancels:
    """Cancel rollouts at work, ``size`` with one request, one request after the other.

    Raises:
        RuntimeError: a sandbox of a rollout was not found.
        TimeoutError: a cancel did not get through.
    """
    marks = [f"86{os.getpid()}{size}{number:03d}" for number in range(work.CANCELLED)]
    requests = [
        RolloutRequest(
            rollout_id=f"{run_id}-{number}",
            run_id=run_id,
            group_id=f"g{number // size}",
            environment="scripted",
            task={"id": mark},
        )
        for number, mark in enumerate(marks)
    ]
    seen = Cancels([], [], 0)
    async with server.client() as client:
        expected = engine.calls + len(requests)
        await client.submit(requests)
        await asyncio.wait_for(engine.until(calls=expected), 2 * _PATIENCE)
        boxes = await asyncio.to_thread(_boxes, scratch, set(marks))
        if len(boxes) != len(marks):
            raise RuntimeError(f"{len(marks) - len(boxes)} rollouts have no sandbox")
        for first in range(0, len(requests), size):
            async with asyncio.timeout(_PATIENCE):
                await _cancel(
                    client, engine, [boxes[mark] for mark in marks[first : first + size]], run_id, first, seen
                )
    return seen


async def _cancel(
    client: Client, engine: SilentEngine, boxes: Sequence[_Box], run_id: str, first: int, seen: Cancels
) -> None:
    closed = len(engine.closed) + len(boxes)
    pidfds = [pidfd for box in boxes for pidfd in box.processes]
    began = time.perf_counter()
    async with asyncio.TaskGroup() as waits:
        deaths = [waits.create_task(_died(pidfd)) for pidfd in pidfds]
        waits.create_task(client.cancel(runs=[run_id], groups=[f"g{first // len(boxes)}"]))
        waits.create_task(engine.until(closed=closed))
    ends: list[Any] = [*engine.closed[closed - len(boxes) : closed], *(death.result() for death in deaths)]
    seen.dead.append((max(ends) - began) * 1000)
    seen.gone.append(await _gone(boxes) - began)
    seen.processes += len(pidfds)
