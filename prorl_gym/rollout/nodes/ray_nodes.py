"""Nodes on Ray, as the head sees them: a child process that holds the Ray driver, started again when it ends."""

import asyncio
import importlib.util
import logging
import os
import sys

from prorl_gym.backoff import backoff_delay
from prorl_gym.config import ConfigModel
from prorl_gym.errors import ConfigError
from prorl_gym.logs import LogFormat

_LOG = logging.getLogger(__name__)

_LONGEST_DELAY_SECONDS = 30.0
"""Between two starts of the launcher. One that ran for longer is started again after a second."""
_STOP_SECONDS = 15.0
"""That a launcher may take to remove its actors."""


class RayCluster(ConfigModel):
    """A Ray cluster that gets a node on each of its nodes with the resource ``prorl_node``."""

    address: str
    """As ``ray.init`` takes it."""
    memory: int | None
    """Bytes that each node reserves in Ray; all that its Ray node has if unset."""


class RayLaunch(RayCluster):
    """What the launcher (``ray_launcher``) has to know. It reads this as JSON from its standard input."""

    host: str
    """On which the head listens; a wildcard stands for the address by which Ray knows this machine."""
    port: int
    token: str
    """Bearer token of the head. Ray's control store holds it among the arguments of the actors."""
    log_level: str
    log_format: LogFormat


def check_ray_address(address: str | None) -> str:
    """Return the address of the Ray cluster.

    Raises:
        ConfigError: Ray is not installed, or there is no address: Ray would then start a cluster of its own.
    """
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
