"""What a sandbox and its python worker cost alone: CPU beside bare namespaces, and memory."""

import subprocess
import sys
from dataclasses import dataclass, field

from _processes import process_tree, pss
from _report import SHORT
from _rollout_measure import Machine

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

COUNT, RUNS, TOGETHER = (10, 1, 8) if SHORT else (100, 3, 32)
"""Starts of a run; runs; sandboxes whose memory is measured together."""
UNSHARE = (
    *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts"),
    *("--fork", "--mount-proc", "true"),
)


@dataclass(slots=True)
class Floors:
    """CPU ms of each start by run, and MB of each sandbox."""

    unshare_ms: list[float] = field(default_factory=list[float])
    sandbox_ms: list[float] = field(default_factory=list[float])
    python_ms: list[float] = field(default_factory=list[float])
    """A sandbox with a python worker and its first cell."""
    memory_mb: list[float] = field(default_factory=list[float])
    """Empty where this user may not look: only root sees processes that cannot be traced."""


async def measure_floors(machine: Machine) -> Floors:
    """Measure on an idle machine; the whole machine's CPU counts."""
    floors = Floors()
    backend = NamespaceBackend("userns", SandboxConfig())
    try:
        await _start_and_close(backend, 3, python=True)  # brings the disk's pages in, starts the template
        for _ in range(RUNS):
            for python, times in ((False, floors.sandbox_ms), (True, floors.python_ms)):
                before = machine.busy()
                await _start_and_close(backend, COUNT, python=python)
                await machine.wait_quiet()
                times.append((machine.busy() - before) * 1000 / COUNT)
            before = machine.busy()
            for _ in range(COUNT):
                subprocess.run(UNSHARE, check=True)  # noqa: ASYNC221 - nothing else runs in this loop
            await machine.wait_quiet()
            floors.unshare_ms.append((machine.busy() - before) * 1000 / COUNT)
    finally:
        await backend.close()
    try:
        floors.memory_mb.append(await _memory())
    except PermissionError as error:
        print(f"left out: memory of a sandbox: {error}; run the bench as root", file=sys.stderr)
    return floors


async def _start_and_close(backend: NamespaceBackend, count: int, *, python: bool) -> None:
    for _ in range(count):
        box = await backend.start_sandbox(SandboxSpec())
        if python:
            await _first_cell(box)
        await box.close()
    await backend.wait_idle()


async def _first_cell(box: RunningSandbox) -> None:
    said = (await (await box.python()).run_cell("print(12345 * 6789)", timeout=60)).output
    if said != "83810205\n":
        raise RuntimeError(f"the cell answered {said!r}")


async def _memory() -> float:
    """Return MB of each of several sandboxes with a python worker: PSS of all below the spawner, the template too."""
    backend = NamespaceBackend("userns", SandboxConfig())
    try:
        spawner = await backend.spawner_pid()
        empty = pss(process_tree(spawner))
        for _ in range(TOGETHER):
            await _first_cell(await backend.start_sandbox(SandboxSpec()))
        return (pss(process_tree(spawner)) - empty) / TOGETHER
    finally:
        await backend.close()
