"""How long ``echo hi`` takes through the sandbox's persistent shell, as a tool call would make it.

The floor, measured in the same run: a bash on a pty of this host, written to and read from with blocking system calls,
without a sandbox, an event loop, exit codes or limits.
"""

import asyncio
import json
import os
import time
from statistics import median, quantiles
from typing import cast

from _report import Figure, Report, figure, report
from ptyprocess import PtyProcess  # pyright: ignore[reportMissingTypeStubs]

from prorl_gym.sandbox.backend import NamespaceBackend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.launch import BackendName
from prorl_gym.sandbox.protocol import SandboxSpec

COMMANDS = 1000
RUNS = 3
TARGET_MS = 0.5
BACKENDS: tuple[BackendName, ...] = ("userns", "apptainer")


def floor(commands: int = COMMANDS) -> float:
    """Return the median of a raw round trip, in ms."""
    shell = PtyProcess.spawn(  # pyright: ignore[reportUnknownMemberType]
        ["/bin/bash", "--noprofile", "--norc", "--noediting"], env={"PS1": "", "PATH": os.defpath}, echo=False
    )
    terminal = cast(int, shell.fd)  # pyright: ignore[reportUnknownMemberType]
    try:
        times: list[float] = []
        for _ in range(commands + 20):
            began = time.perf_counter()
            os.write(terminal, b"echo hi; echo done\n")
            seen = b""
            while b"done" not in seen:
                seen += os.read(terminal, 4096)
            times.append((time.perf_counter() - began) * 1000)
        return median(times[20:])
    finally:
        shell.close(force=True)


async def measure(name: BackendName) -> tuple[list[list[float]], list[float]] | None:
    """Return ms of every command of each run, and of one-shot ``true``; ``None`` where the backend does not work."""
    backend = NamespaceBackend(name, SandboxConfig())
    try:
        if not (await backend.probe()).ok:
            return None
        runs: list[list[float]] = []
        once: list[float] = []
        for _ in range(RUNS):
            sandbox = await backend.start(SandboxSpec())
            shell = await sandbox.shell()
            times: list[float] = []
            for _ in range(COMMANDS + 20):
                began = time.perf_counter()
                result = await shell.run("echo hi", timeout=30)
                times.append((time.perf_counter() - began) * 1000)
                if (result.output, result.exit_code) != ("hi\n", 0):
                    raise RuntimeError(f"echo hi answered {result}")
            runs.append(times[20:])
            for _ in range(100):
                began = time.perf_counter()
                await sandbox.exec(["true"], timeout=30)
                once.append((time.perf_counter() - began) * 1000)
            await sandbox.close()
        return runs, once
    finally:
        await backend.close()


def run() -> Report:
    """Measure every backend that works here."""
    raw = ("raw pty round trip, no sandbox", floor())
    figures: list[Figure] = []
    for name in BACKENDS:
        measured = asyncio.run(measure(name))
        if measured is None:
            continue
        runs, once = measured
        p99 = [quantiles(times, n=100)[98] for times in runs]
        medians = [median(times) for times in runs]
        figures += [
            figure(f"{name}: echo hi, median", medians, "ms", better="lower", target=TARGET_MS, peer=raw),
            figure(f"{name}: echo hi, p99", p99, "ms", better="lower"),
            figure(f"{name}: one-shot true, median", [median(once)], "ms", better="lower"),
        ]
    return report("shell", figures, "ptyprocess")


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
