"""How many sandboxes fit, what each costs, and how fast a killed service's are gone.

Memory is the proportional set size (PSS) of all processes below the spawner; see ``_processes``. Beside it, plain
instances of a SIF that Apptainer runs (``PRORL_BENCH_SIF``; ``bench/make-image`` makes one). ``PRORL_BENCH_MANY`` sets
how many user-namespace sandboxes shall be alive at once. ``--short`` measures a tenth: to try it.
"""

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass

import _apptainer
import _versions
from _killed import measure_kill
from _processes import process_tree, pss
from _report import SHORT, Figure, Peer, Report, StartConditions, figure, peer, report

from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

COUNT, BUSY = (8, 4) if SHORT else (128, 64)
MANY = int(os.environ.get("PRORL_BENCH_MANY", "40" if SHORT else "1000"))
EVERY = 10
"""Of the many, every tenth has a shell."""
PARALLEL = 4
"""Starts at a time: more only queue on the cores."""
BACKENDS: tuple[BackendName, ...] = ("userns", "apptainer")
TARGETS: dict[BackendName, tuple[float, float]] = {"userns": (6.0, 6.0), "apptainer": (20.0, 16.0)}
"""Seconds until all are up, and MB of each."""


@dataclass(frozen=True, slots=True)
class FillResult:
    """The sandboxes that came up, and the seconds that took."""

    boxes: list[RunningSandbox]
    seconds: float


async def fill(backend: NamespaceBackend, count: int, *, shell_every: int) -> FillResult:
    """Start sandboxes; those that are refused are told about and left out."""
    gate = asyncio.Semaphore(PARALLEL)
    boxes: list[RunningSandbox] = []

    async def one(number: int) -> None:
        async with gate:
            try:
                box = await backend.start_sandbox(SandboxSpec())
                if number % shell_every == 0:
                    await (await box.shell()).run_command("echo hi", timeout=60)
            except (SandboxError, OSError) as error:
                print(f"a sandbox was refused, with {len(boxes)} up: {error}", file=sys.stderr)
                return
            boxes.append(box)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one(number))
    return FillResult(boxes, time.perf_counter() - began)


async def dense(name: BackendName, seconds: list[Peer], memory: list[Peer]) -> list[Figure]:
    """Return time and memory of ``COUNT`` sandboxes with a shell each; nothing where the backend does not work."""
    backend = NamespaceBackend(name, SandboxConfig())
    try:
        if not (await backend.probe()).ok:
            return []
        spawner = await backend.spawner_pid()
        empty = pss(process_tree(spawner))
        filled = await fill(backend, COUNT, shell_every=1)
        up = len(filled.boxes)
        each = (pss(process_tree(spawner)) - empty) / max(1, up)
    finally:
        await backend.close()
    wanted_seconds, wanted_mb = TARGETS[name]
    if up < COUNT:
        return [figure(f"sandboxes up, of {COUNT}", [up], "", better="higher", backend=name, target=COUNT)]
    return [
        figure(
            *(f"{COUNT} sandboxes up, a shell in each", [filled.seconds], "s"),
            better="lower",
            backend=name,
            target=wanted_seconds,
            peers=seconds,
        ),
        figure("memory of each, PSS", [each], "MB", better="lower", backend=name, target=wanted_mb, peers=memory),
    ]


async def many() -> list[Figure]:
    """Return figures of ``MANY`` sandboxes in user namespaces, every tenth with a shell."""
    backend = NamespaceBackend("userns", SandboxConfig())
    try:
        if not (await backend.probe()).ok:
            return []
        spawner = await backend.spawner_pid()
        filled = await fill(backend, MANY, shell_every=EVERY)
        answering = sum([await box.is_alive() for box in filled.boxes])
        each = pss(process_tree(spawner)) / max(1, answering)
    finally:
        await backend.close()
    return [
        figure(
            *(f"alive and answering at once, of {MANY}, a shell in every tenth", [answering], ""),
            better="higher",
            backend="userns",
            target=MANY,
        ),
        figure("all of these up", [filled.seconds], "s", better="lower", backend="userns"),
        figure("memory of each of these, PSS", [each], "MB", better="lower", backend="userns"),
    ]


def instances() -> tuple[list[Peer], list[Peer]]:
    """Return plain Apptainer instances of a SIF as peers: seconds until as many are up, MB of each."""
    sif = os.environ.get("PRORL_BENCH_SIF")
    if not sif or (found := _apptainer.instances(sif, COUNT)) is None:
        return [], []
    if found.up < COUNT:
        print(f"plain apptainer instances: {found.up} of {COUNT} came up", file=sys.stderr)
    name = f"{found.up} plain apptainer instances of a SIF, no shell"
    return [peer(name, [found.seconds])], [peer(name, [found.each])]


def run() -> Report:
    """Measure every backend that works here, beside plain instances."""
    begun = StartConditions.capture()
    seconds, memory = instances()
    figures: list[Figure] = []
    for name in BACKENDS:
        figures += asyncio.run(dense(name, seconds, memory))
        figures += measure_kill(name, BUSY)
    return report("density", [*figures, *asyncio.run(many())], begun=begun, also=_versions.program_version("apptainer"))


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
