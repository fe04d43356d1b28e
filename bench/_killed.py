"""SIGKILL of a service whose sandboxes are busy: how long its processes live on, and what a next start leaves."""

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

from _processes import process_tree
from _report import Figure, figure

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

_PATIENCE = 30.0
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
            better="lower",
            backend=name,
            target=1.0,
        ),
        figure("processes that it had then", [len(members)], "", better="higher", backend=name),
        figure(
            *("processes, directories and mounts left after the next start", [alive + left], ""),
            better="lower",
            backend=name,
            target=0,
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
    while waiting and time.perf_counter() - began < _PATIENCE:
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
