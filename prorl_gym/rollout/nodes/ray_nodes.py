"""Nodes on Ray: the head's child process that holds the Ray driver, and the child process of the actor on each node.

Both are started again when they end. The node is a child process and does not run on the actor's event loop: it has a
main thread of its own, so that signals, the event loop and the spawner of sandboxes work as they do without Ray. It
dies with the actor, which dies with its raylet. This module does not import Ray: the launcher makes the actor of it.
"""

import asyncio
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from prorl_gym.backoff import backoff_delay
from prorl_gym.config import ConfigModel
from prorl_gym.errors import ConfigError
from prorl_gym.logs import LogFormat
from prorl_gym.sandbox.syscalls import set_parent_death_signal

_LOG = logging.getLogger(__name__)

_LONGEST_DELAY_SECONDS = 30.0
"""Longest pause between two starts of a launcher or a node. One that ran for longer starts again after a second."""
_STOP_SECONDS = 15.0
"""Time for a launcher to remove its actors."""


class RayCluster(ConfigModel):
    """A Ray cluster that gets a node on each of its nodes with the resource ``prorl_node``."""

    address: str
    """As ``ray.init`` takes it."""
    memory: int | None
    """Bytes that each node reserves in Ray; all that its Ray node has if unset."""


class RayLaunch(RayCluster):
    """Input of the launcher (``ray_launcher``), as JSON on its standard input."""

    host: str
    """The head's listening address; a wildcard stands for the address by which Ray knows this machine."""
    port: int
    token: str
    """Bearer token of the head. Ray's control store holds it among the arguments of the actors."""
    log_level: str
    log_format: LogFormat


def check_ray_address(address: str | None) -> str:
    """Return the cluster's address. Raises ``ConfigError``: no Ray, or no address, where Ray would start a cluster."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--nodes ray: Ray is not installed here.", "pip install 'prorl-gym[ray]'")
    if not address or address == "local":
        raise ConfigError(
            "--nodes ray: no running Ray cluster is named.", "Give --address HOST:PORT or auto, or set RAY_ADDRESS."
        )
    return address


async def keep_nodes_placed(launch: RayLaunch) -> None:
    """Keep a launcher running until this is cancelled; then it removes its nodes.

    Without Ray the launcher ends, and only it: the service and living nodes go on.
    """
    loop, failures = asyncio.get_running_loop(), 0
    while True:
        started = loop.time()
        code = await _run_launcher(launch)
        failures = 0 if loop.time() - started > _LONGEST_DELAY_SECONDS else failures + 1
        delay = backoff_delay(max(0, failures - 1), first=1.0, longest=_LONGEST_DELAY_SECONDS)
        _LOG.warning(
            "no connection to Ray at %s (exit code %d): nodes that run go on; connecting again in %g s",
            *(launch.address, code, delay),
        )
        await asyncio.sleep(delay)


async def _run_launcher(launch: RayLaunch) -> int:
    """Run a launcher to its end; return its exit code."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "prorl_gym.rollout.nodes.ray_launcher", str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        await process.communicate(launch.model_dump_json().encode())
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_SECONDS)
            except TimeoutError:
                process.kill()
    return await process.wait()


class NodeSupervisor:
    """Keeps one node running: ``prorl-gym`` with these arguments, and with variables added to the actor's."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._arguments = tuple(arguments)
        self._environment = {**os.environ, **environment}
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_draining = threading.Event()
        # The parent-death signal comes when the thread that forked ends: this one lives as long as the actor.
        self._thread = threading.Thread(target=self._keep_running, name="node", daemon=True)
        self._thread.start()

    def ping(self) -> None:
        """Return once the actor has started."""

    def drain(self) -> None:
        """Stop the node with SIGTERM, and return when it has finished what it runs."""
        with self._lock:
            self._is_draining.set()
            if self._child is not None:
                self._child.terminate()
        self._thread.join()

    def _keep_running(self) -> None:
        failures = 0
        while True:
            with self._lock:
                if self._is_draining.is_set():
                    return
                command = [sys.executable, "-m", __name__, str(os.getpid()), *self._arguments]
                child = self._child = subprocess.Popen(command, env=self._environment, stdin=subprocess.DEVNULL)
            started = time.monotonic()
            code = child.wait()
            failures = 0 if time.monotonic() - started > _LONGEST_DELAY_SECONDS else failures + 1
            delay = backoff_delay(max(0, failures - 1), first=1.0, longest=_LONGEST_DELAY_SECONDS)
            print(f"prorl-gym node ended with exit code {code}", file=sys.stderr, flush=True)
            if self._is_draining.wait(delay):
                return


def _run_below_parent(parent: int, arguments: Sequence[str]) -> None:
    """Become ``prorl-gym`` with these arguments; it ends when the thread that forked this process ends."""
    set_parent_death_signal(signal.SIGKILL)  # kept across exec
    if os.getppid() != parent:  # it ended before the signal was set
        return
    # Ray gives its workers niceness 15 and the highest OOM score: the kernel would kill the node before its sandboxes.
    with suppress(PermissionError):  # an unprivileged process may not lower its niceness
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with suppress(PermissionError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("0")
    os.execv(sys.executable, [sys.executable, "-m", "prorl_gym", *arguments])


if __name__ == "__main__":
    _run_below_parent(int(sys.argv[1]), sys.argv[2:])
