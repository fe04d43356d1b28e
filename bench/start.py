"""How long a sandbox takes from being asked for to the answer of its first command, and its python tool likewise.

Peers, in the same run: ``apptainer exec`` with our isolation flags; NeMo Gym's own Apptainer provider; Jupyter Kernel
Gateway. ``PRORL_BENCH_IMAGE`` names the image directory (the host's /usr without it), ``PRORL_BENCH_SIF`` a SIF of it,
``PRORL_BENCH_GATEWAY`` the python of an environment with the gateway. Without them these peers are left out.
"""

import asyncio
import json
import os
import time
from statistics import median

import _gateway
import _peers
from _report import Figure, Report, figure, report

from prorl_gym.sandbox.backend import NamespaceBackend
from prorl_gym.sandbox.box import Box
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.launch import BackendName
from prorl_gym.sandbox.pool import WarmPool
from prorl_gym.sandbox.protocol import HOST_USR, SandboxSpec

STARTS = 15
CELLS = 200
TARGETS_MS: dict[BackendName, float] = {"userns": 20.0, "apptainer": 130.0}
WARM_MS, PYTHON_MS, CELL_MS = 1.0, 300.0, 1.0
IMAGE = os.environ.get("PRORL_BENCH_IMAGE", HOST_USR)
SPEC = SandboxSpec(image=IMAGE)


async def cold(backend: NamespaceBackend, count: int = STARTS) -> tuple[list[float], list[float]]:
    """Return ms until the first one-shot command was answered, and until the first in the shell."""
    first: list[float] = []
    in_shell: list[float] = []
    for _ in range(count + 1):
        began = time.perf_counter()
        box = await backend.start(SPEC)
        await box.exec(["true"], timeout=30)
        first.append((time.perf_counter() - began) * 1000)
        await (await box.shell()).run("echo hi", timeout=30)
        in_shell.append((time.perf_counter() - began) * 1000)
        await box.close()
        await backend.idle()  # a sandbox that is still being torn down would slow down the next one
    return first[1:], in_shell[1:]  # the first start brings the disk's pages in


async def warm(backend: NamespaceBackend, count: int = 8) -> list[float]:
    """Return ms of ``start`` where a sandbox is on the shelf."""
    pool = WarmPool(backend, per_spec=count)
    pool.prepare(SPEC, count)
    while filling := asyncio.all_tasks() - {asyncio.current_task()}:  # starts that were finished may begin others
        await asyncio.wait(filling)
    times: list[float] = []
    boxes: list[object] = []
    for _ in range(count):
        began = time.perf_counter()
        boxes.append(await pool.start(SPEC))
        times.append((time.perf_counter() - began) * 1000)
    times = times[: pool.handed_out]
    await pool.close()
    return times


async def python(box: Box) -> tuple[float, list[float]]:
    """Return ms until the python tool answered its first cell, and of every ``1+1``."""
    began = time.perf_counter()
    session = await box.python()
    if (await session.run("1+1", timeout=60)).output != "2\n":
        raise RuntimeError("1+1 is not 2")
    ready = (time.perf_counter() - began) * 1000
    cells: list[float] = []
    for _ in range(CELLS):
        began = time.perf_counter()
        await session.run("1+1", timeout=30)
        cells.append((time.perf_counter() - began) * 1000)
    return ready, cells


async def measure(name: BackendName) -> list[Figure]:
    """Return the figures of a backend; none where it does not work."""
    backend = NamespaceBackend(name, SandboxConfig())
    try:
        if not (await backend.probe()).ok:
            return []
        first, in_shell = await cold(backend)
        box = await backend.start(SPEC)
        ready, cells = await python(box)
        await box.close()
        figures = [
            figure(f"{name}: cold start to first command", first, "ms", better="lower", target=TARGETS_MS[name]),
            figure(f"{name}: cold start to first command in the shell", in_shell, "ms", better="lower"),
            figure(f"{name}: python tool ready", [ready], "ms", better="lower", target=PYTHON_MS),
            figure(f"{name}: 1+1", [median(cells)], "ms", better="lower", target=CELL_MS),
        ]
        if handed := await warm(backend):  # closes the backend
            figures.append(figure(f"{name}: warm hand-out", handed, "ms", better="lower", target=WARM_MS))
        return figures
    finally:
        await backend.close()


async def peers() -> list[Figure]:
    """Return the figures of every peer that is here."""
    figures: list[Figure] = []
    for what, image in (("image directory", IMAGE), ("SIF", os.environ.get("PRORL_BENCH_SIF", HOST_USR))):
        if image != HOST_USR and (times := _peers.apptainer_exec(image, 10)):
            figures.append(figure(f"peer: apptainer exec of the {what}", times[1:], "ms", better="lower"))
    sif = os.environ.get("PRORL_BENCH_SIF")
    if sif and (measured := await _peers.gym_apptainer(sif, ["true"], 1)):
        name = "peer: NeMo Gym's apptainer provider, first command"
        figures.append(figure(name, [measured[0]], "ms", better="lower"))
    if (gateway := await _gateway.measure(CELLS // 4)) is not None:
        ready, cells = gateway
        figures += [
            figure("peer: Jupyter Kernel Gateway, host: ready", [ready], "ms", better="lower"),
            figure("peer: Jupyter Kernel Gateway, host: 1+1", [median(cells)], "ms", better="lower"),
        ]
    return figures


def run() -> Report:
    """Measure every backend that works here, and every peer."""
    names: tuple[BackendName, ...] = ("userns", "apptainer")
    figures = [row for name in names for row in asyncio.run(measure(name))]
    return report("start", [*figures, *asyncio.run(peers())], "nemo-gym")


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
