"""How long a sandbox takes from being asked for to the answer of its first command, and its python tool likewise.

Peers, in the same run: bare namespaces (a floor); ``apptainer exec`` of the directory and of the SIF with our isolation
flags and NeMo Gym's own Apptainer provider, as an ordinary user; on the host, Jupyter Kernel Gateway and a stock
ipykernel over Unix sockets and over TCP loopback.

``PRORL_BENCH_IMAGE`` names the image directory (the host's /usr without it) and ``PRORL_BENCH_SIF`` a SIF of it
(``bench/make-image`` makes both), ``PRORL_BENCH_GATEWAY`` the python of an environment with the gateway,
``PRORL_BENCH_KERNEL`` of one with ipykernel and jupyter_client. Without them these peers are left out.
``--short`` measures a tenth: to try it.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

import _apptainer
import _gateway
import _kernels
import _versions
from _report import SHORT, Figure, Peer, Report, StartConditions, figure, peer, report
from _rollout_floors import UNSHARE

from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import HOST_IMAGE, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.service.warm_pool import WarmPool
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

STARTS, CELLS, SESSIONS = (3, 20, 1) if SHORT else (15, 200, 5)
TARGETS_MS: dict[BackendName, float] = {"userns": 8.0, "apptainer": 60.0}
WARM_MS, PYTHON_MS, CELL_MS = 1.0, 300.0, 1.0
BACKENDS: tuple[BackendName, ...] = ("userns", "apptainer")
IMAGE = os.environ.get("PRORL_BENCH_IMAGE", HOST_IMAGE)
SIF = os.environ.get("PRORL_BENCH_SIF")
SPEC = SandboxSpec(image=IMAGE)
KERNEL_SPEC = SandboxSpec(image=IMAGE, python_tool="kernel")
CONSOLE = """
try:
    import IPython
    print("IPython " + IPython.__version__ if get_ipython() else "")
except (ImportError, NameError):
    print("standard library console")
"""


async def cold(backend: NamespaceBackend, count: int = STARTS) -> tuple[list[float], list[float]]:
    """Return ms until the first one-shot command was answered, and until the first in the shell."""
    first: list[float] = []
    in_shell: list[float] = []
    for _ in range(count + 1):
        began = time.perf_counter()
        box = await backend.start_sandbox(SPEC)
        await box.exec(["true"], timeout=30)
        first.append((time.perf_counter() - began) * 1000)
        await (await box.shell()).run_command("echo hi", timeout=30)
        in_shell.append((time.perf_counter() - began) * 1000)
        await box.close()
        await backend.wait_idle()  # a sandbox that is still being torn down would slow down the next one
    return first[1:], in_shell[1:]  # the first start brings the disk's pages in


async def warm(backend: NamespaceBackend, count: int = 8) -> list[float]:
    """Return ms of ``start`` where a sandbox is on the shelf."""
    pool = WarmPool(backend, per_spec=count)
    pool.prewarm(SPEC, count)
    while filling := asyncio.all_tasks() - {asyncio.current_task()}:  # starts that were finished may begin others
        await asyncio.wait(filling)
    times: list[float] = []
    boxes: list[object] = []
    for _ in range(count):
        began = time.perf_counter()
        boxes.append(await pool.start_sandbox(SPEC))
        times.append((time.perf_counter() - began) * 1000)
    times = times[: pool.hits]
    await pool.close()
    return times


async def python(box: RunningSandbox) -> tuple[float, list[float], str]:
    """Return ms until the python tool answered its first cell, and of every ``1+1``, and the console's name.

    Raises:
        RuntimeError: 1+1 is not 2: the figures would be worthless.
    """
    began = time.perf_counter()
    session = await box.python()
    if not (await session.run_cell("1+1", timeout=60)).output.endswith("2\n"):  # IPython says "Out[1]: 2"
        raise RuntimeError("1+1 is not 2")
    ready = (time.perf_counter() - began) * 1000
    cells: list[float] = []
    for _ in range(CELLS):
        began = time.perf_counter()
        await session.run_cell("1+1", timeout=30)
        cells.append((time.perf_counter() - began) * 1000)
    return ready, cells, (await session.run_cell(CONSOLE, timeout=30)).output.strip()


async def python_figures(backend: NamespaceBackend, name: BackendName, peers: "PythonPeers") -> list[Figure]:
    """Return the figures of the python tool, which say what console the image gave it, and of its kernel option."""

    async def sessions(spec: SandboxSpec) -> tuple[list[float], list[float], str]:
        readies: list[float] = []
        medians: list[float] = []
        console = ""
        for _ in range(SESSIONS):
            box = await backend.start_sandbox(spec)
            ready, cells, console = await python(box)
            await box.close()
            await backend.wait_idle()
            readies.append(ready)
            medians.append(median(cells))
        return readies, medians, console

    def rows(
        tool: str, readies: list[float], medians: list[float], targets: tuple[float, float] | tuple[None, None]
    ) -> list[Figure]:
        ready, cell = targets
        return [
            figure(*(f"{tool} ready", readies, "ms"), better="lower", backend=name, target=ready, peers=peers.ready),
            figure(*(f"{tool}: 1+1", medians, "ms"), better="lower", backend=name, target=cell, peers=peers.cell),
        ]

    readies, medians, console = await sessions(SPEC)
    figures = rows(f"python tool ({console})", readies, medians, (PYTHON_MS, CELL_MS))
    try:
        readies, medians, _ = await sessions(KERNEL_SPEC)
    except SandboxError as error:
        print(f"left out: the python tool's kernel option on {name}: {error}", file=sys.stderr)
        return figures
    return figures + rows("python tool, kernel option", readies, medians, (None, None))


async def measure(name: BackendName, starts: Sequence[Peer], peers: "PythonPeers") -> list[Figure]:
    """Return the figures of a backend; none where it does not work."""
    backend = NamespaceBackend(name, SandboxConfig())
    try:
        if not (await backend.probe()).ok:
            return []
        first, in_shell = await cold(backend)
        figures = [
            figure(
                *("cold start to first command", first, "ms"),
                better="lower",
                backend=name,
                target=TARGETS_MS[name],
                peers=starts,
            ),
            figure("cold start to first command in the shell", in_shell, "ms", better="lower", backend=name),
            *await python_figures(backend, name, peers),
        ]
        if handed := await warm(backend):  # closes the backend
            figures.append(figure("warm hand-out", handed, "ms", better="lower", backend=name, target=WARM_MS))
        return figures
    finally:
        await backend.close()


def start_peers() -> list[Peer]:
    """Return the peers of a cold start that are here."""
    found = [peer("six namespaces by `unshare`, a fresh /proc, `true` (floor)", _bare_namespaces(STARTS + 1)[1:])]
    for what, image in (("image directory", None if IMAGE == HOST_IMAGE else IMAGE), ("SIF", SIF)):
        if image and (times := _apptainer.executions(image, STARTS + 1)):
            found.append(peer(f"apptainer exec of the {what}", times[1:]))
    starts = [each.start for _ in range(SESSIONS) if SIF and (each := _apptainer.gym(SIF, "true", []))]
    if starts:
        found.append(peer("NeMo Gym's apptainer provider, a SIF", starts))
    return found


def _bare_namespaces(count: int) -> list[float]:
    """Return ms of ``true`` in the namespaces of a sandbox, with nothing else of one."""
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        subprocess.run(UNSHARE, check=True)
        times.append((time.perf_counter() - began) * 1000)
    return times


class PythonPeers:
    """Peers of the python tool, and what a Unix socket gains for a kernel."""

    def __init__(self) -> None:
        self.ready: list[Peer] = []
        self.cell: list[Peer] = []

    def add(self, name: str, measured: tuple[float, Sequence[float]] | None) -> None:
        """Take what a peer needed until it was ready, and for every later cell."""
        if measured is not None:
            self.ready.append(peer(name, [measured[0]]))
            self.cell.append(peer(name, measured[1]))


def kernel_transport() -> list[Figure]:
    """Return ``1+1`` in a stock kernel over Unix sockets, beside TCP loopback."""
    unix, tcp = _kernels.measure("ipc", CELLS), _kernels.measure("tcp", CELLS)
    if unix is None or tcp is None:
        return []
    peers = [[peer("the same over TCP loopback", times)] for times in ([tcp[0]], tcp[1])]
    name = "ipykernel over Unix sockets, host"
    return [
        figure(f"{name}: ready", [unix[0]], "ms", better="lower", peers=peers[0]),
        figure(f"{name}: 1+1", unix[1], "ms", better="lower", peers=peers[1]),
    ]


def run() -> Report:
    """Measure every peer, and every backend that works here."""
    begun = StartConditions.capture()
    starts, peers = start_peers(), PythonPeers()
    peers.add("Jupyter Kernel Gateway, host", asyncio.run(_gateway.measure(max(5, CELLS // 4))))
    figures = [row for name in BACKENDS for row in asyncio.run(measure(name, starts, peers))]
    also = {
        **_versions.program_version("apptainer"),
        **_versions.package_versions("PRORL_BENCH_GATEWAY", "jupyter-kernel-gateway"),
        **_versions.package_versions("PRORL_BENCH_KERNEL", "ipykernel", "jupyter-client"),
    }
    return report("start", [*figures, *kernel_transport()], "nemo-gym", begun=begun, also=also)


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
