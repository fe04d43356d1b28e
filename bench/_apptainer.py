"""Peers that are Apptainer, or stand on it. ``_unprivileged`` runs this file as an ordinary user.

``python _apptainer.py gym SIF PREPARE COMMANDS``, ``exec IMAGE COUNT``, ``instances SIF COUNT``.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import _processes
import _unprivileged

ISOLATION = ("--userns", "--containall", "--no-home", "--cleanenv", "--net", "--network", "none")
"""The flags that our backend gives Apptainer."""
PARALLEL = 4
GYM_DIRECTORY = "/bench"
"""A writable directory of the sandbox's own: /tmp is the host's in NeMo Gym's provider."""
_SCRIPT = os.path.basename(__file__)


@dataclass(frozen=True, slots=True)
class Gym:
    """NeMo Gym's provider: ms until its first command was answered, and of every later one."""

    start: float
    times: list[float]


@dataclass(frozen=True, slots=True)
class Instances:
    """Plain ``apptainer instance``s: how many came up, in how many seconds, and MB (PSS) of each."""

    up: int
    seconds: float
    each: float


def gym(sif: str, prepare: str, commands: Sequence[str]) -> Gym | None:
    """Measure NeMo Gym's provider on a SIF; ``None`` where it cannot be."""
    found = _unprivileged.measure(_SCRIPT, "gym", sif, prepare, json.dumps(list(commands)))
    return Gym(**found) if found else None


def executions(image: str, count: int) -> list[float] | None:
    """Return ms of ``apptainer exec`` of ``true``, from start to end, isolated as our backend isolates."""
    return _unprivileged.measure(_SCRIPT, "exec", image, str(count))


def instances(sif: str, count: int) -> Instances | None:
    """Start plain instances of a SIF; ``None`` where that is not possible."""
    found = _unprivileged.measure(_SCRIPT, "instances", sif, str(count))
    return Instances(**found) if found else None


async def _gym(sif: str, prepare: str, commands: Sequence[str]) -> Gym:
    from nemo_gym.sandbox import AsyncSandbox, SandboxSpec  # pyright: ignore

    async def run(command: str) -> float:
        began = time.perf_counter()
        result = await sandbox.exec(command)  # pyright: ignore
        if result.return_code != 0:  # pyright: ignore
            raise RuntimeError(f"{command[:60]!r} in NeMo Gym's provider: {result}")
        return (time.perf_counter() - began) * 1000

    # Without --userns it asks for a setuid installation's privileges.
    flags = ["--userns"]
    create = {"mount_point": GYM_DIRECTORY, "extra_start_args": flags}
    provider = {"apptainer": {"create": create, "exec": {"extra_exec_args": flags}}}
    began = time.perf_counter()
    sandbox = AsyncSandbox(provider, SandboxSpec(image=sif))  # pyright: ignore
    try:
        await sandbox.start()  # pyright: ignore
        await run("echo hi")
        start = (time.perf_counter() - began) * 1000
        await run(prepare)
        return Gym(start, [await run(command) for command in commands])
    finally:
        await sandbox.stop()  # pyright: ignore


def _executions(image: str, count: int) -> list[float]:
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        done = subprocess.run(["apptainer", "-q", "exec", *ISOLATION, image, "true"], capture_output=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"apptainer exec: {done.stderr.decode(errors='replace').strip()[-300:]}")
        times.append((time.perf_counter() - began) * 1000)
    return times


def _instances(sif: str, count: int) -> Instances:
    def start(number: int) -> bool:
        command = ["apptainer", "-q", "instance", "start", *ISOLATION, sif, f"bench{number}"]
        # Files, not pipes: the instance keeps them open, and a pipe would not end.
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        return done.returncode == 0

    began = time.perf_counter()
    with ThreadPoolExecutor(PARALLEL) as threads:
        up = sum(threads.map(start, range(count)))
    seconds = time.perf_counter() - began
    if not up:
        raise RuntimeError("no instance started")
    others = set(_processes.all_processes()) - {os.getpid()}  # of this pid namespace: all belong to the instances
    return Instances(up, seconds, _processes.pss(others) / up)


if __name__ == "__main__":
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):  # of this interpreter: NeMo Gym's provider hands them to containers
        os.environ.pop(name, None)
    match sys.argv[1:]:
        case ["gym", sif, prepare, commands]:
            _unprivileged.emit_result(asdict(asyncio.run(_gym(sif, prepare, json.loads(commands)))))
        case ["exec", image, count]:
            _unprivileged.emit_result(_executions(image, int(count)))
        case ["instances", sif, count]:
            _unprivileged.emit_result(asdict(_instances(sif, int(count))))
        case other:
            sys.exit(f"_apptainer.py: unknown request {other}")
