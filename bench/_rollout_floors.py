"""What a sandbox and its python worker cost alone: CPU beside bare namespaces and a bare Apptainer, and memory."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _processes import process_tree, pss
from _report import SHORT
from _rollout_measure import Machine

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

COUNT, RUNS, TOGETHER = (10, 1, 8) if SHORT else (100, 3, 32)
"""Starts of a run; runs; sandboxes whose memory is measured together."""
UNSHARE = (
    *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts"),
    *("--fork", "--mount-proc", "true"),
)
APPTAINER = (
    *("apptainer", "-q", "exec", "--userns", "--containall", "--no-home", "--cleanenv", "--net", "--network=none"),
    *("--no-init", "--no-mount=bind-paths,sys,tmp,hostfs,cwd", "--pwd=/", "--bind=/usr:/usr:ro", "--writable"),
)
"""As the backend calls it; a root and a command follow."""


@dataclass(slots=True)
class Starts:
    """CPU ms of each start on one backend, by run."""

    bare_ms: list[float] = field(default_factory=list[float])
    """Of what the backend stands on, alone."""
    sandbox_ms: list[float] = field(default_factory=list[float])
    python_ms: list[float] = field(default_factory=list[float])
    """A sandbox with a python worker and its first cell."""


@dataclass(slots=True)
class Floors:
    """What is measured beside rollouts."""

    starts: dict[BackendName, Starts] = field(default_factory=dict[BackendName, Starts])
    memory_mb: list[float] = field(default_factory=list[float])
    """Empty where this user may not look: only root sees processes that cannot be traced."""


async def measure_floors(machine: Machine, directory: Path) -> Floors:
    """Measure on an idle machine; the whole machine's CPU counts."""
    floors = Floors({"userns": await _measure_starts("userns", UNSHARE, machine)})
    if shutil.which("apptainer"):
        bare = (*APPTAINER, str(_bare_root(directory)), "true")
        floors.starts["apptainer"] = await _measure_starts("apptainer", bare, machine)
    try:
        floors.memory_mb.append(await _memory())
    except PermissionError as error:
        print(f"left out: memory of a sandbox: {error}; run the bench as root", file=sys.stderr)
    return floors


async def _measure_starts(name: BackendName, bare: Sequence[str], machine: Machine) -> Starts:
    starts = Starts()
    backend = NamespaceBackend(name, SandboxConfig())
    try:
        await _start_and_close(backend, 3, python=True)  # brings the disk's pages in, starts the template
        for _ in range(RUNS):
            for python, times in ((False, starts.sandbox_ms), (True, starts.python_ms)):
                before = machine.busy()
                await _start_and_close(backend, COUNT, python=python)
                await machine.wait_quiet()
                times.append((machine.busy() - before) * 1000 / COUNT)
            before = machine.busy()
            for _ in range(COUNT):
                subprocess.run(bare, check=True, stderr=subprocess.DEVNULL)  # noqa: ASYNC221 - nothing else runs here
            await machine.wait_quiet()
            starts.bare_ms.append((machine.busy() - before) * 1000 / COUNT)
    finally:
        await backend.close()
    return starts


def _bare_root(directory: Path) -> Path:
    """Make the least root that Apptainer accepts, over the host's /usr."""
    root = directory / "bare-root"
    for name in ("usr", "proc", "dev", "sys", "etc", "tmp", "root"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    return root


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
