"""SIGKILL of a real service, with a real engine, sandboxes and ledger, between accept and finish; then a restart."""

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import pytest

from prorl_gym.client import SyncClient, read_token
from prorl_gym.environments.gym_rows import read_rows
from prorl_gym.records import RolloutRequest
from prorl_gym.sandbox.backend import NamespaceBackend
from prorl_gym.sandbox.config import SandboxConfig

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "prorl_gym"]
REPLICAS = 6


@pytest.fixture
def ground() -> Iterator[Path]:
    """State and scratch on a local disk that the sandboxes' uid may reach."""
    path = Path(tempfile.mkdtemp(prefix="prorl-gym-killed-", dir="/var/tmp"))
    path.chmod(0o755)
    yield path
    rmtree(path)


@contextmanager
def started(arguments: list[str], announced: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run a command of ours until the block ends; wait for the address it announces."""
    child = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/"
    )
    assert child.stdout is not None
    try:
        lines: list[str] = []
        found = None
        while found is None:
            lines.append(child.stdout.readline())
            assert lines[-1], "it ended at once:\n" + "".join(lines)
            found = re.search(announced, lines[-1])
        yield child, found[1]
    finally:
        child.kill()
        child.communicate()


def requests() -> list[RolloutRequest]:
    rows = [
        (name, row)
        for name in ("math", "code")
        for row in read_rows(ROOT / f"environments/prorl_{name}/data/example.jsonl")
    ]
    return [
        RolloutRequest(
            rollout_id=f"{row.task['id']}-{replica}",
            environment=name,
            task=row.task,
            group_id=row.task["id"],
            group_size=REPLICAS,
            replica=replica,
        )
        for name, row in rows
        for replica in range(REPLICAS)
    ]


def below(pid: int) -> list[int]:
    """Handles on every process below one."""
    listing = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], check=True, capture_output=True, text=True).stdout
    parents: dict[int, list[int]] = {}
    for line in listing.splitlines():
        child, parent = map(int, line.split())
        parents.setdefault(parent, []).append(child)
    found, handles = [pid], []
    while found:
        for child in parents.get(found.pop(), []):
            found.append(child)
            try:
                handles.append(os.pidfd_open(child))
            except ProcessLookupError:
                continue  # a command that has just ended
    return handles


def survivors(handles: list[int], seconds: float) -> int:
    deadline = time.monotonic() + seconds
    left = list(handles)
    while left and time.monotonic() < deadline:
        ended, _, _ = select.select(left, [], [], deadline - time.monotonic())
        left = [handle for handle in left if handle not in ended]
    return len(left)


def test_a_killed_service_loses_nothing_and_leaves_nothing(ground: Path) -> None:
    scratch, state = ground / "scratch", ground / "state"
    with started(["engine", "oracle", "--port", "0", "--seed", "3"], r"(http://[\d.:]+/v1)") as (_, engine):
        config = ground / "service.json"
        config.write_text(
            json.dumps(
                {
                    "inference": {"engines": [engine], "model": "oracle", "tokenizer": "small"},
                    "sandbox": {"backend": "userns", "scratch": str(scratch)},
                    "state": str(state),
                    "http": {"port": 0},
                }
            )
        )
        serve = ["serve", "--config", str(config)]
        wanted = requests()
        with started(serve, r"serving on (http://[\d.:]+)") as (service, address):
            with SyncClient(address, token=read_token(state / "token")) as client:
                client.submit(wanted)
                next(client.stream())  # some are done, most are not
                handles = below(service.pid)
                assert handles, "no spawner, no sandboxes: nothing to prove"
                service.send_signal(signal.SIGKILL)
            assert survivors(handles, 5.0) == 0
        for handle in handles:
            os.close(handle)
        assert str(ground) not in Path("/proc/self/mountinfo").read_text()
        with started(serve, r"serving on (http://[\d.:]+)") as (service, address):
            with SyncClient(address, token=read_token(state / "token")) as client:
                rollouts = [client.result(request.rollout_id, timeout=60) for request in wanted]
            service.send_signal(signal.SIGTERM)
            service.communicate(timeout=20)
    assert {rollout.outcome.status for rollout in rollouts} == {"completed"}
    assert {rollout.reward for rollout in rollouts} == {1.0}  # the oracle plays gold
    assert any(retry.kind == "service_restarted" for rollout in rollouts for retry in rollout.retries)
    assert leftovers(scratch) == []


def leftovers(scratch: Path) -> list[Path]:
    async def reap() -> None:
        backend = NamespaceBackend("userns", SandboxConfig(scratch=scratch))
        try:
            await backend.reap()
        finally:
            await backend.close()

    asyncio.run(reap())
    return list(scratch.iterdir())
