"""How long commands take through the sandbox's persistent shell, as a tool call would make them, beside peers.

Peers, in the same run: a bash on a pty of this host, ``/bin/true`` forked and executed, NeMo Gym's own Apptainer
provider (as an ordinary user), SWE-ReX's session and tmux panes on the host. Also: the fixed mix of ``_shell_peers``, a
megabyte of output, Unix sockets against TCP loopback for the real channels.

``PRORL_BENCH_IMAGE`` names the image directory (the host's /usr without it) and ``PRORL_BENCH_SIF`` a SIF of it for
NeMo Gym's provider; ``bench/make-image`` makes both, with git and pytest. ``PRORL_BENCH_SWEREX`` is the python of an
environment with SWE-ReX. Without them these peers are left out. ``--short`` measures a tenth: to try it.
"""

import asyncio
import os
from collections.abc import Sequence
from statistics import mean, median

import _shell_peers
import _transport
from _load import percentile, times_ms
from _report import SHORT, Figure, Report, figure, package_versions, program_version, report

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import HOST_IMAGE, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

COUNTS = _shell_peers.Repetitions(fast=100, slow=3, polled=2, rounds=1, bulk=2) if SHORT else _shell_peers.Repetitions()
RUNS = 3
TARGET_MS, TARGET_RATIO = 0.1, 2.0
"""Either is enough for ``echo hi``: milliseconds, or times the raw pty of the same run."""
TARGET_P99_MS, TARGET_EXEC_MS, TARGET_BULK = 1.5, 15.0, 1.5
BACKENDS: tuple[BackendName, ...] = ("userns", "apptainer")
MEGABYTE = "head -c 1000000 /dev/zero | tr '\\0' x"
IMAGE = os.environ.get("PRORL_BENCH_IMAGE", HOST_IMAGE)
SIF = os.environ.get("PRORL_BENCH_SIF")
SPEC = SandboxSpec(image=IMAGE, limits=SandboxLimits(output=2 << 20))


async def mix(box: RunningSandbox, *, pytest: bool) -> list[float]:
    """Return ms of every action of the mix."""
    shell = await box.shell()
    actions = iter([_shell_peers.setup(), *(list(_shell_peers.actions_of_mix(pytest=pytest)) * COUNTS.rounds)])

    async def act() -> None:
        action = next(actions)
        result = await shell.run_command(action, timeout=60)
        if result.exit_code != 0:
            raise RuntimeError(f"{action!r} of the mix failed: {result.output[-500:]}")

    return await times_ms(COUNTS.rounds * len(_shell_peers.actions_of_mix(pytest=pytest)), act)


async def bulk(box: RunningSandbox) -> tuple[list[float], list[float]]:
    """Return ms of a megabyte of output through the shell, and through ``exec``."""
    shell = await box.shell()

    async def through_shell() -> None:
        _require_megabyte(len((await shell.run_command(MEGABYTE, timeout=30)).output))

    async def through_exec() -> None:
        _require_megabyte(len((await box.exec(["sh", "-c", MEGABYTE], timeout=30)).stdout))

    return await times_ms(COUNTS.bulk, through_shell), await times_ms(COUNTS.bulk, through_exec)


def _require_megabyte(seen: int) -> None:
    if seen != 1_000_000:
        raise RuntimeError(f"a megabyte came back as {seen} bytes")


async def measure(name: BackendName, peers: _shell_peers.Peers, *, pytest: bool) -> list[Figure]:
    backend = NamespaceBackend(name, SandboxConfig())
    try:
        if not (await backend.probe()).ok:
            return []
        runs: list[list[float]] = []
        for _ in range(RUNS):
            box = await backend.start_sandbox(SPEC)
            runs.append(await _transport.time_echoes(await box.shell(), COUNTS.fast))
            await box.close()
        box = await backend.start_sandbox(SPEC)
        actions, (shell_ms, exec_ms) = await mix(box, pytest=pytest), await bulk(box)
    finally:
        await backend.close()
    raw_echo, raw_bulk = (
        next(row["value"] for row in rows if row["name"] == _shell_peers.FLOOR) for rows in (peers.echo, peers.bulk)
    )
    medians, p99 = [median(times) for times in runs], [percentile(times, 99) for times in runs]

    def row(
        what: str, times: Sequence[float], target: float | None = None, beside: Sequence[_shell_peers.Peer] = ()
    ) -> Figure:
        return figure(what, times, "ms", backend=name, target=target, peers=beside)

    return [
        row("echo hi, median", medians, max(TARGET_MS, TARGET_RATIO * raw_echo), peers.echo),
        row("echo hi, p99", p99, TARGET_P99_MS),
        row(
            f"mean action of the mix ({'with pytest' if pytest else 'without pytest: not in the image'})",
            [mean(actions)],
            beside=peers.mix,
        ),
        row("1 MB of output, shell", shell_ms, TARGET_BULK * raw_bulk, peers.bulk),
        row("1 MB of output, exec", exec_ms, TARGET_EXEC_MS),
    ]


async def image_has_pytest() -> bool:
    backend = NamespaceBackend(BACKENDS[0], SandboxConfig())
    try:
        box = await backend.start_sandbox(SPEC)
        return (await box.exec(["sh", "-c", _shell_peers.HAS_PYTEST], timeout=60)).exit_code == 0
    finally:
        await backend.close()


def run() -> Report:
    pytest = asyncio.run(image_has_pytest())
    image = None if IMAGE == HOST_IMAGE else IMAGE
    peers = _shell_peers.measure(image, SIF, MEGABYTE, COUNTS, pytest=pytest)
    figures = [row for name in BACKENDS for row in asyncio.run(measure(name, peers, pytest=pytest))]
    figures += asyncio.run(_transport.measure(COUNTS.fast))
    also = {
        **program_version("apptainer"),
        **program_version("tmux", "-V"),
        **package_versions("PRORL_BENCH_SWEREX", "swe-rex"),
    }
    return report("shell", figures, "ptyprocess", "nemo-gym", also=also)
