"""How long a sandbox takes from being asked for to the answer of its first command, and its python tool likewise.

Peers, in the same run: bare namespaces (a floor); ``apptainer exec`` of the directory and of the SIF with our isolation
flags and NeMo Gym's own Apptainer provider, as an ordinary user; on the host, Jupyter Kernel Gateway.

``PRORL_BENCH_IMAGE`` names the image directory (the host's /usr without it) and ``PRORL_BENCH_SIF`` a SIF of it
(``bench/make-image`` makes both), ``PRORL_BENCH_GATEWAY`` the python of an environment with the gateway. Without them
these peers are left out. ``--short`` measures a tenth: to try it.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from uuid import uuid4

import _apptainer
import aiohttp
from _load import times_ms
from _processes import UNSHARE
from _report import SHORT, Figure, Peer, Report, figure, package_versions, peer, program_version, report

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
PythonPeers = tuple[Sequence[Peer], Sequence[Peer]]
"""Of the time until the python tool is ready, and of every later cell."""
CONSOLE = """
try:
    import IPython
    print("IPython " + IPython.__version__ if get_ipython() else "")
except (ImportError, NameError):
    print("standard library console")
"""


async def cold(backend: NamespaceBackend) -> list[float]:
    """Return ms until the first one-shot command was answered."""
    first: list[float] = []
    for _ in range(STARTS + 1):
        began = time.perf_counter()
        box = await backend.start_sandbox(SPEC)
        await box.exec(["true"], timeout=30)
        first.append((time.perf_counter() - began) * 1000)
        await box.close()
        await backend.wait_idle()  # a sandbox that is still being torn down would slow down the next one
    return first[1:]  # the first start brings the disk's pages in


async def warm(backend: NamespaceBackend, count: int = 8) -> list[float]:
    """Return ms of ``start`` where a sandbox is on the shelf."""
    pool = WarmPool(backend, per_spec=count)
    pool.prewarm(SPEC, count)
    while filling := asyncio.all_tasks() - {asyncio.current_task()}:  # starts that were finished may begin others
        await asyncio.wait(filling)
    times = (await times_ms(count, lambda: pool.start_sandbox(SPEC), warm_up=0))[: pool.hits]
    await pool.close()
    return times


async def python(box: RunningSandbox) -> tuple[float, list[float], str]:
    """Return ms until the python tool answered its first cell, and of every ``1+1``, and the console's name."""
    began = time.perf_counter()
    session = await box.python()
    if not (await session.run_cell("1+1", timeout=60)).output.endswith("2\n"):  # IPython says "Out[1]: 2"
        raise RuntimeError("1+1 is not 2")
    ready = (time.perf_counter() - began) * 1000
    cells = await times_ms(CELLS, lambda: session.run_cell("1+1", timeout=30), warm_up=0)
    return ready, cells, (await session.run_cell(CONSOLE, timeout=30)).output.strip()


async def python_figures(backend: NamespaceBackend, name: BackendName, peers: PythonPeers) -> list[Figure]:
    """Return the figures of the python tool, which say what console the image gave it, and of its kernel option."""
    figures: list[Figure] = []
    for spec, ready_target, cell_target in ((SPEC, PYTHON_MS, CELL_MS), (KERNEL_SPEC, None, None)):
        readies, medians, console = list[float](), list[float](), ""
        try:
            for _ in range(SESSIONS):
                box = await backend.start_sandbox(spec)
                ready, cells, console = await python(box)
                await box.close()
                await backend.wait_idle()
                readies.append(ready)
                medians.append(median(cells))
        except SandboxError as error:
            if spec is SPEC:
                raise
            print(f"left out: the python tool's kernel option on {name}: {error}", file=sys.stderr)
            break
        tool = f"python tool ({console})" if spec is SPEC else "python tool, kernel option"
        figures += [
            figure(f"{tool} ready", readies, "ms", backend=name, target=ready_target, peers=peers[0]),
            figure(f"{tool}: 1+1", medians, "ms", backend=name, target=cell_target, peers=peers[1]),
        ]
    return figures


async def measure(name: BackendName, starts: Sequence[Peer], peers: PythonPeers) -> list[Figure]:
    """Return the figures of a backend; none where it does not work."""
    backend = NamespaceBackend(name, SandboxConfig())
    try:
        if not (await backend.probe()).ok:
            return []
        first = await cold(backend)
        figures = [
            figure(*("cold start to first command", first, "ms"), backend=name, target=TARGETS_MS[name], peers=starts),
            *await python_figures(backend, name, peers),
        ]
        if handed := await warm(backend):  # closes the backend
            figures.append(figure("warm hand-out", handed, "ms", backend=name, target=WARM_MS))
        return figures
    finally:
        await backend.close()


def start_peers() -> list[Peer]:
    bare: list[float] = []
    for _ in range(STARTS + 1):
        began = time.perf_counter()
        subprocess.run(UNSHARE, check=True)
        bare.append((time.perf_counter() - began) * 1000)
    found = [peer("six namespaces by `unshare`, a fresh /proc, `true` (floor)", bare[1:])]
    for what, image in (("image directory", None if IMAGE == HOST_IMAGE else IMAGE), ("SIF", SIF)):
        if image and (times := _apptainer.executions(image, STARTS + 1)):
            found.append(peer(f"apptainer exec of the {what}", times[1:]))
    starts = [each.start for _ in range(SESSIONS) if SIF and (each := _apptainer.gym(SIF, "true", []))]
    if starts:
        found.append(peer("NeMo Gym's apptainer provider, a SIF", starts))
    return found


def run() -> Report:
    starts, ready, cell = start_peers(), list[Peer](), list[Peer]()
    if jupyter := asyncio.run(measure_jupyter(max(5, CELLS // 4))):
        ready, cell = ([peer("Jupyter Kernel Gateway, host", times)] for times in ([jupyter[0]], jupyter[1]))
    figures = [row for name in BACKENDS for row in asyncio.run(measure(name, starts, (ready, cell)))]
    also = {**program_version("apptainer"), **package_versions("PRORL_BENCH_GATEWAY", "jupyter-kernel-gateway")}
    return report("start", figures, "nemo-gym", also=also)


_TRIES = 200


async def measure_jupyter(cells: int) -> tuple[float, list[float]] | None:
    """Return ms until the first ``1+1`` was answered, and of later ones; ``None`` where it is not installed."""
    python = os.environ.get("PRORL_BENCH_GATEWAY")
    if python is None:
        return None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.perf_counter()
    gateway = await asyncio.create_subprocess_exec(
        *(python, "-m", "kernel_gateway", f"--KernelGatewayApp.port={port}"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            kernel = await _kernel(client)
            async with client.ws_connect(f"/api/kernels/{kernel}/channels") as connection:
                await _cell(connection)
                ready = (time.perf_counter() - began) * 1000
                return ready, await times_ms(cells, lambda: _cell(connection), warm_up=0)
    finally:
        gateway.terminate()
        await gateway.wait()


async def _kernel(client: aiohttp.ClientSession) -> str:
    for _ in range(_TRIES):  # it says nothing when it is up
        try:
            async with client.post("/api/kernels") as answer:
                return (await answer.json())["id"]
        except OSError:  # nothing listens yet
            await asyncio.sleep(0.05)
    raise RuntimeError("the kernel gateway did not come up")


async def _cell(connection: aiohttp.ClientWebSocketResponse) -> None:
    number = uuid4().hex
    header = {"msg_id": number, "msg_type": "execute_request", "username": "", "session": number, "version": "5.3"}
    content = {"code": "1+1", "silent": False, "store_history": False, "allow_stdin": False}
    empty: dict[str, str] = {}
    message = {"header": header, "parent_header": empty, "metadata": empty, "content": content, "channel": "shell"}
    await connection.send_str(json.dumps(message))
    async for packet in connection:
        reply = json.loads(packet.data)
        if reply["msg_type"] == "execute_reply" and reply["parent_header"].get("msg_id") == number:
            if reply["content"]["status"] != "ok":
                raise RuntimeError(f"the kernel answered {reply['content']}")
            return
