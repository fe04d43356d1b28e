"""How long commands take through the sandbox's persistent shell, as a tool call would make them, beside peers.

Peers, in the same run: a bash on a pty of this host with blocking system calls (no sandbox, event loop, exit codes or
limits), ``/bin/true`` forked and executed, NeMo Gym's own Apptainer provider over an image, SWE-ReX's session and a
tmux pane on the host. Also: the fixed mix of ``_mix``, a megabyte of output, Unix sockets against TCP loopback.

``PRORL_BENCH_SIF`` names an image for NeMo Gym's provider; ``PRORL_BENCH_SWEREX`` the python of an
environment with SWE-ReX. Without them these peers are left out.
"""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from statistics import mean, median, quantiles
from typing import cast

import _peers
from _mix import ACTIONS, SETUP
from _report import Figure, Report, figure, report
from ptyprocess import PtyProcess  # pyright: ignore[reportMissingTypeStubs]

from prorl_gym.sandbox.backend import NamespaceBackend
from prorl_gym.sandbox.box import Box
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.launch import BackendName
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec

COMMANDS = 1000
RUNS = 3
MIX_ROUNDS = 5
BULK_ROUNDS = 10
TARGET_MS, TARGET_P99_MS, TARGET_EXEC_MS = 0.25, 1.5, 15.0
BACKENDS: tuple[BackendName, ...] = ("userns", "apptainer")
MEGABYTE = "head -c 1000000 /dev/zero | tr '\\0' x"
SPEC = SandboxSpec(limits=SandboxLimits(output=2 << 20))


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


def bulk_floor(rounds: int = BULK_ROUNDS) -> float:
    """Return the median ms of a megabyte through a raw pty."""
    times: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        child = PtyProcess.spawn(  # pyright: ignore[reportUnknownMemberType]
            ["/bin/sh", "-c", MEGABYTE], echo=False
        )
        terminal, seen = cast(int, child.fd), 0  # pyright: ignore[reportUnknownMemberType]
        while seen < 1_000_000:
            seen += len(os.read(terminal, 65536))
        times.append((time.perf_counter() - began) * 1000)
        child.close(force=True)
    return median(times)


async def echoes(box: Box) -> list[float]:
    """Return ms of every ``echo hi``.

    Raises:
        RuntimeError: one did not answer "hi": the figures would be worthless.
    """
    shell = await box.shell()
    times: list[float] = []
    for _ in range(COMMANDS + 20):
        began = time.perf_counter()
        result = await shell.run("echo hi", timeout=30)
        times.append((time.perf_counter() - began) * 1000)
        if (result.output, result.exit_code) != ("hi\n", 0):
            raise RuntimeError(f"echo hi answered {result}")
    return times[20:]


async def mix(box: Box) -> list[float]:
    """Return ms of every action of the mix."""
    shell = await box.shell()
    if (prepared := await shell.run(SETUP, timeout=60)).exit_code != 0:
        raise RuntimeError(f"the mix could not be prepared: {prepared.output[-500:]}")
    times: list[float] = []
    for action in ACTIONS * MIX_ROUNDS:
        began = time.perf_counter()
        await shell.run(action, timeout=60)
        times.append((time.perf_counter() - began) * 1000)
    return times


async def bulk(box: Box) -> tuple[list[float], list[float]]:
    """Return ms of a megabyte of output through the shell, and through ``exec``."""
    shell = await box.shell()
    through_shell: list[float] = []
    through_exec: list[float] = []
    for _ in range(BULK_ROUNDS):
        began = time.perf_counter()
        seen = len((await shell.run(MEGABYTE, timeout=30)).output)
        through_shell.append((time.perf_counter() - began) * 1000)
        began = time.perf_counter()
        seen += len((await box.exec(["sh", "-c", MEGABYTE], timeout=30)).stdout)
        through_exec.append((time.perf_counter() - began) * 1000)
        if seen != 2_000_000:
            raise RuntimeError(f"two megabytes came back as {seen} bytes")
    return through_shell, through_exec


async def once(box: Box) -> list[float]:
    """Return ms of one-shot ``true``."""
    times: list[float] = []
    for _ in range(100):
        began = time.perf_counter()
        await box.exec(["true"], timeout=30)
        times.append((time.perf_counter() - began) * 1000)
    return times


async def measure(name: BackendName, raw: float, raw_bulk: float) -> list[Figure]:
    """Return the figures of a backend; none where it does not work."""
    backend = NamespaceBackend(name, SandboxConfig())
    try:
        if not (await backend.probe()).ok:
            return []
        runs: list[list[float]] = []
        for _ in range(RUNS):
            box = await backend.start(SPEC)
            runs.append(await echoes(box))
            await box.close()
        box = await backend.start(SPEC)
        actions, (shell_ms, exec_ms), one_shot = await mix(box), await bulk(box), await once(box)
    finally:
        await backend.close()
    floor_peer, bulk_peer = ("raw pty round trip, no sandbox", raw), ("raw pty, no sandbox", raw_bulk)
    medians, p99 = [median(times) for times in runs], [tail(times) for times in runs]
    return [
        figure(f"{name}: echo hi, median", medians, "ms", better="lower", target=TARGET_MS, peer=floor_peer),
        figure(f"{name}: echo hi, p99", p99, "ms", better="lower", target=TARGET_P99_MS),
        figure(f"{name}: mean action of the mix", [mean(actions)], "ms", better="lower"),
        figure(f"{name}: 1 MB of output, shell", shell_ms, "ms", better="lower", target=1.5 * raw_bulk, peer=bulk_peer),
        figure(f"{name}: 1 MB of output, exec", exec_ms, "ms", better="lower", target=TARGET_EXEC_MS),
        figure(f"{name}: one-shot true, median", [median(one_shot)], "ms", better="lower"),
    ]


def tail(times: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return quantiles(times, n=100)[98]


async def peers() -> list[Figure]:
    """Return the figures of every peer that is here."""
    figures = [figure("peer: fork and exec of /bin/true", [median(_peers.fork_exec(300))], "ms", better="lower")]

    def add(name: str, times: Sequence[float] | None, of: str = "echo hi, median") -> None:
        if times:
            value = mean(times) if "mean" in of else median(times)
            figures.append(figure(f"peer: {name}: {of}", [value], "ms", better="lower"))

    image = os.environ.get("PRORL_BENCH_SIF")
    if image and (measured := await _peers.gym_apptainer(image, ["echo hi"], 30)):
        add("NeMo Gym's apptainer provider", measured[1])
    add("SWE-ReX session, host", _peers.swerex(["echo hi"], 30))
    add("tmux, polled every 500 ms, host", _peers.tmux("echo hi", 0.5, 8))
    add("tmux, polled every 10 ms, host", _peers.tmux("echo hi", 0.01, 30))
    if rex := _peers.swerex([SETUP, *ACTIONS], 1):
        add("SWE-ReX session, host", rex[1:], "mean action of the mix")
    add("SWE-ReX session, host", _peers.swerex([MEGABYTE], 3), "1 MB of output")
    unix, tcp = [median(await _peers.echo_socket(tcp, 1000)) for tcp in (False, True)]
    figures.append(
        figure("64-byte echo, Unix socket", [unix], "ms", better="lower", peer=("the same over TCP loopback", tcp))
    )
    return figures


def run() -> Report:
    """Measure every backend that works here, and every peer."""
    raw, raw_bulk = floor(), bulk_floor()
    figures = [row for name in BACKENDS for row in asyncio.run(measure(name, raw, raw_bulk))]
    return report("shell", [*figures, *asyncio.run(peers())], "ptyprocess", "nemo-gym")


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
