"""What the service itself costs and carries: no-op rollouts over HTTP, a long queue, overlap of stages, cancels.

The service runs in a process of its own as ``prorl-gym serve`` would run it (its routes, runner and ledger with
``synchronous=FULL`` on a disk); the client's is this process, on the same cores. Only what a rollout does is the
bench's: an environment and a policy that are instant, or that wait. Records have 20 kB. All workloads and sizes stand
in ``_service_work.py``. The cancels have real sandboxes (user namespaces) and the real engine client; their engine is a
server in this process that never answers, and notes when a call's connection is closed.

Floors, in the same run: the same service in this process without HTTP; plain 4 KiB write + fsync; a route of the same
framework that only gives 20 kB back. ``--short`` measures a tenth.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import _service_work as work
import aiohttp
from _load import closed_loop, percentile, poisson_arrivals
from _processes import all_processes, process_tree
from _programs import bench_directory
from _report import Figure, Report, figure, peer, report
from _service_server import TOKEN, Server, require_completed, running_server, submit_and_wait

from prorl_gym.client import Client
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.scheduling.runner import InProcessRunner, RunnerConfig
from prorl_gym.rollout.service import RolloutService
from prorl_gym.sandbox.spawner.scratch import SandboxState
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend, FakePolicySource, environment_lookup

_PATIENCE = 60.0
"""Seconds after which a cancel is not late but lost."""


class SilentEngine:
    """Speaks enough HTTP to be called, and never answers: no call, no abort."""

    def __init__(self) -> None:
        self.closed: list[float] = []
        """When connections with a call were closed."""
        self.calls = 0
        self._changed = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
        return self.directory.exists() or any(_mounts(pid) == self.mounts for pid in self.holders)


Cancels = tuple[list[float], list[float]]
"""ms from a request until the engine's connections were closed and every process was dead; seconds until the sandboxes'
mounts and directories were gone."""


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


async def measure_cancels(server: Server, engine: SilentEngine, scratch: Path, run_id: str, size: int) -> Cancels:
    """Cancel rollouts at work, ``size`` with one request, one request after the other."""
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
    seen: Cancels = ([], [])
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
    seen[0].append((max(ends) - began) * 1000)
    while any(box.is_there() for box in boxes):  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # nothing reports it
    seen[1].append(time.perf_counter() - began)


async def batch_throughput(server: Server, run_id: str, count: int = work.BATCHED) -> float:
    """Submit batches, read the stream; return rollouts per second, from the first request to the last record."""
    requests = [work.request(run_id) for _ in range(count)]
    room = asyncio.Semaphore(work.WINDOW)

    async def submit(client: Client) -> None:
        for first in range(0, count, work.BATCH):
            batch = requests[first : first + work.BATCH]
            for _ in batch:
                await room.acquire()
            await client.submit(batch)

    async with server.client() as client:
        began = time.perf_counter()
        submitting = asyncio.create_task(submit(client))
        received = 0
        stream = client.stream(run_id)
        async for delivered in stream:
            require_completed(delivered.rollout)
            room.release()
            received += 1
            if received == count:
                break
        seconds = time.perf_counter() - began
        await stream.aclose()
        await submitting
    return count / seconds


async def single_throughput(server: Server, run_id: str, count: int = work.SINGLE) -> float:
    """Let callers each post one rollout and wait for its record, over and over; return rollouts per second."""
    async with server.client() as client:
        return count / await closed_loop(count, work.CALLERS, lambda: submit_and_wait(client, work.request(run_id)))


async def single_latency(server: Server, run_id: str) -> list[float]:
    """Return ms that the service added to each of many single rollouts that arrive at a steady rate."""
    async with server.client() as client:

        async def act(due: float) -> list[float]:
            rollout = await submit_and_wait(client, work.request(run_id))
            return [(time.perf_counter() - due - rollout.worked_seconds) * 1000]

        await act(time.perf_counter())  # opens a connection
        return await poisson_arrivals(work.ARRIVAL_RATE, act, work.LATENCY_SECONDS, work.SEED)


async def echo_throughput(server: Server, count: int = work.SINGLE) -> float:
    """Return requests per second of a route that only gives 20 kB back."""
    body = work.request("echo").model_dump_json().encode()
    headers = {"Authorization": f"Bearer {TOKEN}"}  # without it the server reads no body
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

        async def act() -> None:
            async with session.post(server.url + "/echo", data=body) as answer:
                await answer.read()

        return count / await closed_loop(count, work.CALLERS, act)


async def long_queue(directory: Path) -> list[Figure]:
    """Queue many rollouts whose agents wait, read their records, and look at the service meanwhile."""
    requests = work.waiting(work.QUEUED + work.RUNNING + work.SPARE, "queue")
    async with (
        running_server("queue", directory) as server,
        server.client() as client,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
    ):

        async def read() -> None:
            async for delivered in client.stream("queue"):
                require_completed(delivered.rollout)

        reading = asyncio.create_task(read())
        for first in range(0, len(requests), work.BATCH):
            await client.submit(requests[first : first + work.BATCH])
        while (await client.status()).capacity.run < work.RUNNING:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # another process: there is no event to wait for
        await server.health()
        end = time.perf_counter() + work.WATCHED_SECONDS
        while time.perf_counter() < end:
            for path in ("/v1/status", "/metrics", "/v1/history", "/"):
                async with http.get(server.url + path) as answer:
                    answer.raise_for_status()
                    await answer.read()
            await asyncio.sleep(1)  # a person's dashboard and a scraper do not ask more often
        status, health = await client.status(), await server.health()
        reading.cancel()
    queued, running = status.queued, status.capacity.run
    if queued < work.QUEUED or running < 0.95 * work.RUNNING:
        raise RuntimeError(f"only {queued} were queued and {running} running")
    name = f"{work.QUEUED:,} queued, {work.RUNNING:,} running"
    return [
        figure(f"{name}: memory, RSS", [health.rss_mb], "MB", target=work.RSS_MB),
        figure(f"{name}: event-loop lag, p99", [health.lag_p99_ms], "ms", target=work.LAG_MS),
    ]


IN_PROCESS = 150 if work.SHORT else 1500
TARGET = 300.0
"""Durable rollouts per second in process."""
COMMITS = 2
"""Durable steps of a rollout that finds room: accepted and begun, finished."""


async def in_process(ledger: SqliteLedger) -> float:
    """Push rollouts through a service without HTTP; return rollouts per second."""
    find: Any = environment_lookup(work.TimedEnvironment())  # pyright: ignore[reportArgumentType]
    service = RolloutService(ledger, InProcessRunner(find, work.RecordPolicySource(), EmptyBackend()))
    await service.start()

    async def act() -> None:
        request = work.request("in-process")
        await service.submit([request])
        record = await service.result(request.rollout_id, wait=60)
        if record is None:
            raise RuntimeError(f"rollout {request.rollout_id} did not complete")
        require_completed(record)

    seconds = await closed_loop(IN_PROCESS, work.CALLERS, act)
    await service.stop()
    return IN_PROCESS / seconds


def syncs_per_second(directory: Path, count: int = 200) -> float:
    """Return how many 4 KiB appends with fsync the disk does."""
    descriptor = os.open(directory / "floor", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        began = time.perf_counter()
        for _ in range(count):
            os.write(descriptor, b"x" * 4096)
            os.fsync(descriptor)
        return count / (time.perf_counter() - began)
    finally:
        os.close(descriptor)


async def throughput(directory: Path) -> list[Figure]:
    """Return throughput in process and over HTTP, beside floors, and added latency."""
    durable: list[float] = []
    for number in range(work.RUNS):
        ledger = await SqliteLedger.open(LedgerConfig(path=directory / f"in-process-{number}.sqlite"))
        durable.append(await in_process(ledger))
    floor = peer("one fsync per durable step, on this disk (floor)", [syncs_per_second(directory) / COMMITS])
    async with running_server("echo", directory) as server:
        echoes = [await echo_throughput(server) for _ in range(work.RUNS)]
    peers = [
        floor,
        peer("the same in process, without HTTP (floor)", durable),
        peer("FastAPI route that only gives 20 kB back (floor)", echoes),
    ]
    async with running_server("noop", directory) as server:
        batched = [await batch_throughput(server, f"batches-{number}") for number in range(work.RUNS)]
        single = [await single_throughput(server, f"singles-{number}") for number in range(work.RUNS)]
        added = await single_latency(server, "added")
    rate, targets = "1/s", work.TARGETS
    name = f"added to single posts, {work.ARRIVAL_RATE:g}/s"
    return [
        figure("rollouts, durable", durable, rate, better="higher", target=TARGET, peers=[floor]),
        figure(
            "HTTP, batches of 64 and the stream", batched, rate, better="higher", target=targets["batches"], peers=peers
        ),
        figure("HTTP, single posts, 64 callers", single, rate, better="higher", target=targets["single"], peers=peers),
        figure(f"{name}, p50", [median(added)], "ms", target=work.P50_MS),
        figure(f"{name}, p99", [percentile(added, 99)], "ms", target=work.P99_MS),
    ]


async def measure_overlap(mix: work.Mix, directory: Path) -> float:
    """Run a mix; return the work done over what the slots of the slowest stage could do, in percent.

    Service, ledger and runner are real, in this process; the stages' work is sleeping. Between a fifth and four fifths
    of the finished rollouts, each wait counts with the share of it that lies inside, at the length that was asked for.
    """
    environment = work.TimedEnvironment(record=True)
    ledger = await SqliteLedger.open(LedgerConfig(path=directory / f"{mix.slowest}.sqlite"))
    find: Any = environment_lookup(environment)  # pyright: ignore[reportArgumentType]
    slots = RunnerConfig(init=work.SLOTS["init"], run=work.SLOTS["run"], eval=work.SLOTS["eval"])
    service = RolloutService(ledger, InProcessRunner(find, FakePolicySource(), EmptyBackend(), slots))
    finished: list[float] = []
    done = asyncio.Event()

    def note(rollout: Rollout) -> None:
        finished.append(time.monotonic())
        if len(finished) == work.MIXED:
            done.set()

    service.record_observers.append(note)
    await service.start()
    await service.submit(work.mixed(mix, mix.slowest))
    await done.wait()
    await service.stop()
    first, last = (finished[int(share * work.MIXED) - 1] for share in work.STEADY)
    spans = environment.spans
    slowest = mix.slowest
    bounds = {stage: sum(span.seconds for span in of) / work.SLOTS[stage] for stage, of in spans.items()}
    if slowest != max(bounds, key=lambda stage: bounds[stage]):
        raise RuntimeError(f"{mix.name}: {bounds}")
    worked = 0.0
    for span in spans[slowest]:
        lies = max(0.0, min(span.ended, last) - max(span.began, first))
        worked += span.seconds * lies / (span.ended - span.began)
    return 100 * worked / (work.SLOTS[slowest] * (last - first))


async def cancels(directory: Path) -> list[Figure]:
    engine = SilentEngine()
    scratch = directory / "scratch"
    rows: list[Figure] = []
    async with await asyncio.start_server(engine.serve, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        async with running_server("cancel", directory, url) as server:
            for size, name in ((1, "cancel"), (work.GROUP, f"cancel of a group of {work.GROUP}")):
                seen = await measure_cancels(server, engine, scratch, f"cancels-{size}", size)
                dead, gone = ([percentile(values, 99)] for values in seen)
                rows += [
                    figure(f"{name}: engine and processes, p99", dead, "ms", target=work.DEAD_MS),
                    figure(f"{name}: mounts gone, p99", gone, "s", target=work.GONE_S),
                ]
    return rows


async def measure_all(directory: Path) -> list[Figure]:
    return [
        *await throughput(directory),
        *await long_queue(directory),
        *[
            figure(
                f"overlap, {mix.name}: of the bound",
                [await measure_overlap(mix, directory)],
                "%",
                better="higher",
                target=work.OVERLAP_PERCENT,
            )
            for mix in work.MIXES
        ],
        *await cancels(directory),
    ]


def run() -> Report:
    with bench_directory() as directory:
        figures = asyncio.run(measure_all(directory))
    return report("service", figures, "pydantic", "fastapi", "uvicorn", "aiohttp")
