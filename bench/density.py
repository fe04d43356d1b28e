"""How many sandboxes fit, what each costs, and how fast a killed service's are gone.

Memory is the proportional set size (PSS) of all processes below the spawner, as the kernel accounts it: shared pages
are divided among their users. ``PRORL_BENCH_MANY`` sets how many user-namespace sandboxes shall be alive at once.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from _report import Figure, Report, figure, report

from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.backend import NamespaceBackend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.launch import BackendName
from prorl_gym.sandbox.protocol import SandboxSpec

COUNT = 128
MANY = int(os.environ.get("PRORL_BENCH_MANY", "1000"))
BUSY = 64
PARALLEL = 4
"""Starts at a time: more only queue on the cores."""
TARGETS: dict[BackendName, tuple[float, float]] = {"userns": (6.0, 6.0), "apptainer": (20.0, 16.0)}
"""Seconds until all are up, and MB of each."""


def family(pid: int) -> list[int]:
    """Return every descendant of a process, itself first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, level = [pid], [pid]
    while level:
        level = [child for parent in level for child in parents.get(parent, [])]
        found += level
    return found


def pss(pid: int) -> float:
    """Return MB of a process and everything below it."""
    total = 0
    for member in family(pid):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


async def fill(backend: NamespaceBackend, count: int, *, shells: bool) -> tuple[int, float]:
    """Start sandboxes until there are ``count`` or one is refused; return how many, and seconds."""
    gate = asyncio.Semaphore(PARALLEL)
    up = 0

    async def one() -> None:
        nonlocal up
        async with gate:
            try:
                box = await backend.start(SandboxSpec())
                if shells:
                    await (await box.shell()).run("echo hi", timeout=60)
            except (SandboxError, OSError) as error:
                print(f"sandbox {up + 1} was refused: {error}", file=sys.stderr)
                return
            up += 1

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one())
    return up, time.perf_counter() - began


async def dense(name: BackendName) -> list[Figure]:
    """Return time and memory of ``COUNT`` sandboxes with a shell each; nothing where the backend does not work."""
    backend = NamespaceBackend(name, SandboxConfig())
    try:
        if not (await backend.probe()).ok:
            return []
        spawner = await backend.spawner_pid()
        empty = pss(spawner)
        up, seconds = await fill(backend, COUNT, shells=True)
        each = (pss(spawner) - empty) / max(1, up)
    finally:
        await backend.close()
    target_seconds, target_mb = TARGETS[name]
    return [
        figure(f"{name}: {up} of {COUNT} sandboxes up", [seconds], "s", better="lower", target=target_seconds),
        figure(f"{name}: memory of each, PSS", [each], "MB", better="lower", target=target_mb),
    ]


async def many() -> list[Figure]:
    """Return figures of ``MANY`` sandboxes in user namespaces, without shells."""
    backend = NamespaceBackend("userns", SandboxConfig())
    try:
        if not (await backend.probe()).ok:
            return []
        spawner = await backend.spawner_pid()
        up, seconds = await fill(backend, MANY, shells=False)
        each = pss(spawner) / max(1, up)
    finally:
        await backend.close()
    return [
        figure(f"userns: alive at once, of {MANY}", [up], "sandboxes", better="higher", target=MANY),
        figure("userns: all of these up", [seconds], "s", better="lower"),
        figure("userns: memory of each of these, PSS", [each], "MB", better="lower"),
    ]


_SERVICE = """
import asyncio, sys
from pathlib import Path
from prorl_gym.sandbox.backend import NamespaceBackend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxSpec

async def main(name, count, scratch):
    backend = NamespaceBackend(name, SandboxConfig(scratch=Path(scratch)))
    for _ in range(count):
        box = await backend.start(SandboxSpec())
        await (await box.shell()).run("sleep 1000 & setsid sleep 1000 & (while :; do sleep 1; done) &", timeout=60)
    print("busy", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
"""


def killed(name: BackendName) -> list[Figure]:
    """SIGKILL a service with busy sandboxes; return how long the last process lived, and what a next start left."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="prorl-bench-") as directory:
        os.chmod(directory, 0o755)
        scratch = Path(directory, "scratch")
        scratch.mkdir(0o700)
        uid = os.geteuid() or SandboxConfig().uid
        os.chown(scratch, uid, uid)
        command = [sys.executable, "-c", _SERVICE, name, str(BUSY), str(scratch)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as service:
            if service.stdout is None or service.stdout.readline() != b"busy\n":
                return []
            handles: list[int] = []
            for pid in family(service.pid):
                with suppress(ProcessLookupError):
                    handles.append(os.pidfd_open(pid))
            poll, waiting = select.poll(), set(handles)
            for handle in handles:
                poll.register(handle, select.POLLIN)
            began = time.perf_counter()
            os.kill(service.pid, signal.SIGKILL)
            while waiting and time.perf_counter() - began < 30:
                for handle, _ in poll.poll(1000):
                    poll.unregister(handle)
                    waiting.discard(handle)
            seconds = time.perf_counter() - began
            for handle in handles:
                os.close(handle)
        asyncio.run(_start_again(scratch))
        left = len(list(scratch.iterdir())) + Path("/proc/self/mountinfo").read_text().count(str(scratch))
    return [
        figure(
            f"{name}: SIGKILL with {BUSY} busy, last of {len(handles)} processes gone",
            [seconds],
            "s",
            better="lower",
            target=1.0,
        ),
        figure(f"{name}: processes, directories and mounts left", [len(waiting) + left], "", better="lower", target=0),
    ]


async def _start_again(scratch: Path) -> None:
    backend = NamespaceBackend("userns", SandboxConfig(scratch=scratch))
    try:
        await backend.reap()
    finally:
        await backend.close()


def run() -> Report:
    """Measure every backend that works here."""
    names: tuple[BackendName, ...] = ("userns", "apptainer")
    figures = [row for name in names for row in (*asyncio.run(dense(name)), *killed(name))]
    return report("density", [*figures, *asyncio.run(many())])


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
