"""How many sandboxes fit, what each costs, and how fast a killed service's are gone.

Memory is the proportional set size (PSS) of all processes below the spawner; see ``_processes``. Beside it, plain
instances of a SIF that Apptainer runs (``PRORL_BENCH_SIF``; ``bench/make-image`` makes one). ``PRORL_BENCH_MANY`` sets
how many user-namespace sandboxes shall be alive at once. ``--short`` measures a tenth: to try it.
"""

import asyncio
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import _apptainer
from _processes import process_tree, pss
from _report import SHORT, Figure, Peer, Report, figure, peer, program_version, report

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
PATIENCE = 30.0
"""Longest wait for the processes of a killed service, in seconds."""
PARALLEL = 4
"""Starts at a time: more only queue on the cores."""
BACKENDS: tuple[BackendName, ...] = ("userns", "apptainer")
TARGETS: dict[BackendName, tuple[float, float]] = {"userns": (6.0, 6.0), "apptainer": (20.0, 16.0)}
"""Seconds until all are up, and MB of each."""


async def fill(backend: NamespaceBackend, count: int, *, shell_every: int) -> tuple[list[RunningSandbox], float]:
    """Start sandboxes; return those that came up, and the seconds that took."""
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
    return boxes, time.perf_counter() - began


async def dense(name: BackendName, seconds: list[Peer], memory: list[Peer]) -> list[Figure]:
    backend = NamespaceBackend(name, SandboxConfig())
    try:
        if not (await backend.probe()).ok:
            return []
        spawner = await backend.spawner_pid()
        empty = pss(process_tree(spawner))
        boxes, seconds_up = await fill(backend, COUNT, shell_every=1)
        up = len(boxes)
        each = (pss(process_tree(spawner)) - empty) / max(1, up)
    finally:
        await backend.close()
    wanted_seconds, wanted_mb = TARGETS[name]
    if up < COUNT:
        return [figure(f"sandboxes up, of {COUNT}", [up], "", better="higher", backend=name, target=COUNT)]
    return [
        figure(
            *(f"{COUNT} sandboxes up, a shell in each", [seconds_up], "s"),
            backend=name,
            target=wanted_seconds,
            peers=seconds,
        ),
        figure("memory of each, PSS", [each], "MB", backend=name, target=wanted_mb, peers=memory),
    ]


async def many() -> list[Figure]:
    backend = NamespaceBackend("userns", SandboxConfig())
    try:
        if not (await backend.probe()).ok:
            return []
        boxes, _ = await fill(backend, MANY, shell_every=EVERY)
        answering = sum([await box.is_alive() for box in boxes])
    finally:
        await backend.close()
    return [
        figure(
            *(f"alive and answering at once, of {MANY}, a shell in every tenth", [answering], ""),
            better="higher",
            backend="userns",
            target=MANY,
        )
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


_SERVICE = """
import asyncio, sys
from pathlib import Path
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxSpec

async def main(name, count, scratch):
    backend = NamespaceBackend(name, SandboxConfig(scratch=Path(scratch)))
    for _ in range(count):
        box = await backend.start_sandbox(SandboxSpec())
        shell = await box.shell()
        await shell.run_command("sleep 1000 & setsid sleep 1000 & (while :; do sleep 1; done) &", timeout=60)
    print("busy", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
"""


def measure_kill(name: BackendName, busy: int) -> list[Figure]:
    """Kill a service with so many busy sandboxes; nothing where the backend does not work."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="prorl-bench-") as directory:
        os.chmod(directory, 0o755)
        scratch = Path(directory, "scratch")
        scratch.mkdir(0o700)
        uid = os.geteuid() or SandboxConfig().uid
        os.chown(scratch, uid, uid)
        command = [sys.executable, "-c", _SERVICE, name, str(busy), str(scratch)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as service:
            if service.stdout is None or service.stdout.readline() != b"busy\n":
                return []
            members = process_tree(service.pid)
            seconds, alive = _kill(service.pid, members)
        asyncio.run(_start_again(scratch))
        left = len(list(scratch.iterdir())) + Path("/proc/self/mountinfo").read_text().count(str(scratch))
    return [
        figure(
            *(f"SIGKILL of a service with {busy} busy sandboxes: last process gone after", [seconds], "s"),
            backend=name,
            target=1.0,
        ),
        figure(
            *("processes, directories and mounts left after the next start", [alive + left], ""), backend=name, target=0
        ),
    ]


def _kill(service: int, members: Sequence[int]) -> tuple[float, int]:
    """Return seconds until the last member was gone, and how many outlived our patience."""
    handles: list[int] = []
    for pid in members:
        with suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    poll, waiting = select.poll(), set(handles)
    for handle in handles:
        poll.register(handle, select.POLLIN)
    began = time.perf_counter()
    os.kill(service, signal.SIGKILL)
    while waiting and time.perf_counter() - began < PATIENCE:
        for handle, _ in poll.poll(1000):
            poll.unregister(handle)
            waiting.discard(handle)
    seconds = time.perf_counter() - began
    for handle in handles:
        os.close(handle)
    return seconds, len(waiting)


async def _start_again(scratch: Path) -> None:
    backend = NamespaceBackend("userns", SandboxConfig(scratch=scratch))
    try:
        await backend.reap()
    finally:
        await backend.close()


def run() -> Report:
    seconds, memory = instances()
    figures: list[Figure] = []
    for name in BACKENDS:
        figures += asyncio.run(dense(name, seconds, memory))
        figures += measure_kill(name, BUSY)
    return report("density", [*figures, *asyncio.run(many())], also=program_version("apptainer"))
