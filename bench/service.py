"""What the service itself costs and carries: no-op rollouts over HTTP, a long queue, overlap of stages, cancels.

The service runs in a process of its own as ``prorl-gym serve`` would run it (its routes, runner and ledger with
``synchronous=FULL`` on a disk); the client's is this process, on the same cores. Only what a rollout does is the
bench's: an environment and a policy that are instant, or that wait. Records have 20 kB. All workloads and sizes stand
in ``_service_work.py``. The cancels have real sandboxes (user namespaces) and the real engine client.

Floors, in the same run: the same service in this process without HTTP, on the disk and in memory; plain 4 KiB write +
fsync; a route of the same framework that only gives 20 kB back. ``--short`` measures a tenth.
"""

import asyncio
import json
import os
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import _service_cancel
import _service_load
import _service_overlap
import _service_work as work
from _report import Figure, Report, StartConditions, figure, peer, report
from _service_load import p99
from _service_server import running_server

from prorl_gym.records import Rollout
from prorl_gym.rollout.ledger.encoding import encode_rollout
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.protocol import Ledger
from prorl_gym.rollout.scheduling.runner import InProcessRunner
from prorl_gym.rollout.service import RolloutService
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend, environment_lookup
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger

IN_PROCESS = 150 if work.SHORT else 1500
TARGET = 300.0
"""Durable rollouts per second in process."""
COMMITS = 2
"""Durable steps of a rollout that finds room: accepted and begun, finished."""


@dataclass(slots=True)
class Floors:
    """Figures of the peers, measured in the same run."""

    durable: list[float] = field(default_factory=list[float])
    """Rollouts per second in process."""
    accept_ms: list[float] = field(default_factory=list[float])
    in_memory: float = 0.0
    one_by_one: float = 0.0
    echoes: list[float] = field(default_factory=list[float])
    record_kb: float = 0.0


async def in_process(ledger: Ledger, floors: Floors) -> float:
    """Push rollouts through a service without HTTP; return rollouts per second."""
    find: Any = environment_lookup(work.TimedEnvironment())  # pyright: ignore[reportArgumentType]
    service = RolloutService(ledger, InProcessRunner(find, work.RecordPolicySource(), EmptyBackend()))
    await service.start()
    accepts: list[float] = []
    latest: deque[Rollout] = deque(maxlen=1)

    async def client(first: int) -> None:
        for _ in range(first, IN_PROCESS, work.CALLERS):
            request = work.request("in-process")
            asked = time.perf_counter()
            await service.submit([request])
            accepts.append((time.perf_counter() - asked) * 1000)
            record = await service.result(request.rollout_id, wait=60)
            if record is None:
                raise RuntimeError(f"rollout {request.rollout_id} did not complete")
            latest.append(_service_load.require_completed(record))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for first in range(work.CALLERS):
            clients.create_task(client(first))
    seconds = time.perf_counter() - began
    await service.stop()
    floors.record_kb = len(encode_rollout(latest[0])) / 1000
    floors.accept_ms.append(median(accepts))
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


async def measure_floors(directory: Path) -> Floors:
    """Measure the peers."""
    floors = Floors()
    for number in range(work.RUNS):
        ledger = await SqliteLedger.open(LedgerConfig(path=directory / f"in-process-{number}.sqlite"))
        floors.durable.append(await in_process(ledger, floors))
    accepts = floors.accept_ms.copy()
    floors.in_memory = await in_process(MemoryLedger(), floors)
    floors.accept_ms = accepts
    floors.one_by_one = syncs_per_second(directory) / COMMITS
    async with running_server("echo", directory) as server:
        floors.echoes = [await _service_load.echo_throughput(server) for _ in range(work.RUNS)]
    return floors


def floor_figures(floors: Floors) -> list[Figure]:
    """Return the figures without HTTP."""
    floor = peer("one fsync per durable step, on this disk (floor)", [floors.one_by_one])
    return [
        figure("rollouts, durable", floors.durable, "1/s", better="higher", target=TARGET, peers=[floor]),
        figure("rollouts, ledger in memory", [floors.in_memory], "1/s", better="higher"),
        figure("accept, durable", floors.accept_ms, "ms", better="lower"),
        figure("a record", [floors.record_kb], "kB", better="lower"),
    ]


async def over_http(directory: Path, floors: Floors) -> list[Figure]:
    """Return throughput and added latency over HTTP."""
    peers = [
        peer("one fsync per durable step, on this disk (floor)", [floors.one_by_one]),
        peer("the same in process, without HTTP (floor)", floors.durable),
        peer("FastAPI route that only gives 20 kB back (floor)", floors.echoes),
    ]
    async with running_server("noop", directory) as server:
        batched = [await _service_load.batch_throughput(server, f"batches-{number}") for number in range(work.RUNS)]
        single = [await _service_load.single_throughput(server, f"singles-{number}") for number in range(work.RUNS)]
        added = await _service_load.single_latency(server, "added")
        in_batches = await _service_load.batch_latency(server, "added-batches")
    rate, targets = "1/s", work.TARGETS
    return [
        figure(
            "HTTP, batches of 64 and the stream", batched, rate, better="higher", target=targets["batches"], peers=peers
        ),
        figure("HTTP, single posts, 64 callers", single, rate, better="higher", target=targets["single"], peers=peers),
        *latency(f"added to single posts, {work.ARRIVALS['single']:g}/s", added, bounded=True),
        # A batch is 64 rollouts that arrive at one moment: its last one waits for 63 others by construction.
        *latency(f"added to batches of 64, {work.ARRIVALS['batches']:g}/s", in_batches, bounded=False),
    ]


def latency(name: str, values: list[float], *, bounded: bool) -> list[Figure]:
    """Return median and p99."""
    p50_ms, p99_ms = (work.P50_MS, work.P99_MS) if bounded else (None, None)
    return [
        figure(f"{name}, p50", [median(values)], "ms", better="lower", target=p50_ms),
        figure(f"{name}, p99", [p99(values)], "ms", better="lower", target=p99_ms),
    ]


async def long_queue(directory: Path) -> list[Figure]:
    """Return how a service is with a long queue."""
    async with running_server("queue", directory) as server:
        seen = await _service_load.long_queue(server)
    name = f"{work.QUEUED:,} queued, {work.RUNNING:,} running"
    return [
        figure(f"{name}: memory, RSS", [seen.health.rss_mb], "MB", better="lower", target=work.RSS_MB),
        figure(f"{name}: memory, peak RSS", [seen.health.peak_mb], "MB", better="lower"),
        figure(f"{name}: event-loop lag, p99", [seen.health.lag_p99_ms], "ms", better="lower", target=work.LAG_MS),
        figure(f"{name}: event-loop lag, longest", [seen.health.lag_max_ms], "ms", better="lower"),
        figure("while it is filled: event-loop lag, p99", [seen.filling.lag_p99_ms], "ms", better="lower"),
        figure("while it is filled: rollouts accepted", [seen.submitted], "1/s", better="higher"),
        *(figure(f"{name}: `{path}`", [ms], "ms", better="lower") for path, ms in seen.routes.items()),
    ]


async def overlaps(directory: Path) -> list[Figure]:
    """Return how well stages overlap."""
    figures: list[Figure] = []
    for mix in work.MIXES:
        seen = await _service_overlap.measure_overlap(mix, directory)
        name, target = f"overlap, {mix.name}", work.OVERLAP_PERCENT
        figures += [
            figure(f"{name}: of the bound", [seen.steady], "%", better="higher", target=target),
            figure(f"{name}: with filling and draining", [seen.whole], "%", better="higher"),
        ]
    return figures


async def cancels(directory: Path) -> list[Figure]:
    """Return how long cancels take, with real sandboxes."""
    engine = _service_cancel.SilentEngine()
    scratch = directory / "scratch"
    rows: list[Figure] = []
    async with await asyncio.start_server(engine.serve, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
        async with running_server("cancel", directory, url) as server:
            for size, name in ((1, "cancel"), (work.GROUP, f"cancel of a group of {work.GROUP}")):
                seen = await _service_cancel.measure_cancels(server, engine, scratch, f"cancels-{size}", size)
                dead, gone = [p99(seen.dead)], [p99(seen.gone)]
                rows += [
                    figure(f"{name}: engine and processes, p50", [median(seen.dead)], "ms", better="lower"),
                    figure(f"{name}: engine and processes, p99", dead, "ms", better="lower", target=work.DEAD_MS),
                    figure(f"{name}: mounts gone, p99", gone, "s", better="lower", target=work.GONE_S),
                ]
    return rows


async def measure_all(directory: Path) -> list[Figure]:
    """Measure all, one after the other."""
    floors = await measure_floors(directory)
    return [
        *floor_figures(floors),
        *await over_http(directory, floors),
        *await long_queue(directory),
        *await overlaps(directory),
        *await cancels(directory),
    ]


def run() -> Report:
    """Measure."""
    # /var/tmp is on a disk where /tmp may be memory.
    begun = StartConditions.capture()
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="prorl-bench-") as name:
        directory = Path(name)
        directory.chmod(0o711)  # sandboxes have another uid when this is root
        figures = asyncio.run(measure_all(directory))
    return report("service", figures, "pydantic", "fastapi", "uvicorn", "aiohttp", begun=begun)


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
