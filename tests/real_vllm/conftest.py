"""Two real vLLM servers on CPU, started once, and every test finds them as they began.

``.ci/vllm`` makes the environment. ``PRORL_GYM_VLLM_REPORT`` names a directory where the figures that the tests have
measured are left as ``real-vllm.json`` and ``real-vllm.md``.
"""

import os
from pathlib import Path

import pytest
import pytest_asyncio
from real_fleet import ENGINES, Checkpoints, Fleet
from real_report import write_report
from real_server import RealServer


def _start(python, checkpoint, root, numbers):
    servers = []
    try:
        servers += [RealServer(python, checkpoint, root / f"server-{number}") for number in numbers]
        for server in servers:
            server.wait()
    except BaseException:
        for server in servers:
            server.stop()
        raise
    return servers


@pytest.fixture(scope="session")
def checkpoints(vllm_python, tmp_path_factory):
    return Checkpoints(vllm_python, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def _running(vllm_python, checkpoints, tmp_path_factory):
    """Start both at once, which takes no longer than one, and stop whatever is left of them."""
    root, servers = tmp_path_factory.mktemp("servers"), []
    try:
        servers += _start(vllm_python, checkpoints.random(1), root, range(ENGINES))
        yield servers
    finally:
        for server in servers:
            server.stop()


@pytest_asyncio.fixture
async def fleet(_running, vllm_python, checkpoints, tmp_path):
    """All servers with the policy's weights, empty caches and nothing to do; one that was killed is started again."""
    policy = checkpoints.random(1)
    dead = [number for number, server in enumerate(_running) if not server.well]
    for number in dead:
        _running[number].stop()
    for number, server in zip(dead, _start(vllm_python, policy, tmp_path, dead), strict=True):
        _running[number] = server
    for server in _running:
        server.fresh(policy)
    fleet = Fleet(_running, checkpoints, policy)
    yield fleet
    for engine in fleet.opened:
        await engine.close()


@pytest.fixture(scope="session")
def figures():
    """What tests have measured, by name; written down at the end where a report is wanted."""
    found = {}
    yield found
    if directory := os.environ.get("PRORL_GYM_VLLM_REPORT"):
        write_report(found, Path(directory))
