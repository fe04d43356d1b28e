"""A head and nodes as real processes, with a real engine, sandboxes and ledger; killed, stopped and restarted."""

import os
import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from killed_service import COMMAND, ENGINE, below, configure, example_requests, place, started, survivors, wait_for

from prorl_gym.client import SyncClient, read_token
from prorl_gym.errors import FailureKind
from prorl_gym.free_ports import free_ports
from prorl_gym.records import Rollout, RolloutRequest

pytestmark = pytest.mark.slow

LEASE = 8.0  # shorter, and a machine that stalls loses the node that is to stay
NODE_SLOTS = {"queue": 8, "init": 2, "run": 16, "eval": 2}


class Cluster:
    """A head and two nodes on this host."""

    def __init__(self, ground: Path, engine: str, lease: float) -> None:
        self.ground = ground
        (self.port,) = free_ports(1)
        more = {"nodes": {"lease_seconds": lease}, "runner": NODE_SLOTS}
        self._serve = configure(ground, engine, more, port=self.port)
        self._stack = ExitStack()
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.logs: dict[str, list[str]] = {}

    def __enter__(self) -> "Cluster":
        self.start_head()
        for name in ("n0", "n1"):
            self.start_node(name)
        self.client = self._stack.enter_context(
            SyncClient(f"http://127.0.0.1:{self.port}", token=read_token(self.ground / "state" / "token"))
        )
        wait_for(lambda: len(self.nodes()) == 2)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        print(*(line for lines in self.logs.values() for line in lines), sep="")

    def start_head(self) -> None:
        self._start("head", self._serve, "serving on")

    def start_node(self, name: str) -> None:
        token = str(self.ground / "state" / "token")
        head = f"http://127.0.0.1:{self.port}"
        self._start(name, ["node", "--head", head, "--token-file", token, "--name", name], "joined the head")

    def _start(self, name: str, arguments: list[str], announced: str) -> None:
        child = self.processes[name] = self._stack.enter_context(_child(arguments))
        lines = self.logs[name] = list[str]()
        is_up = threading.Event()

        def read() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                lines.append(line)
                if re.search(announced, line):
                    is_up.set()
            is_up.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert is_up.wait(60) and child.poll() is None, "".join(lines)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)

    def nodes(self) -> dict[str, Any]:
        status = self.client.status().nodes
        assert status is not None
        return {node.name: node for node in status.nodes}

    def records(self, wanted: list[RolloutRequest]) -> list[Rollout]:
        found = [self.client.result(request.rollout_id, timeout=90) for request in wanted]
        written = [one.rollout_id for one in self.client.rollouts(limit=1000).rollouts]
        assert sorted(written) == sorted(request.rollout_id for request in wanted), "each has one record"
        assert {rollout.outcome.status for rollout in found} == {"completed"}
        assert {rollout.reward for rollout in found} == {1.0}
        return found


@contextmanager
def _child(arguments: list[str]) -> Iterator["subprocess.Popen[str]"]:
    child = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",
    )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait()


@pytest.fixture
def lease() -> float:
    return LEASE


@pytest.fixture
def cluster(lease: float) -> Iterator[Cluster]:
    oracle = ["engine", "oracle", "--port", "0", "--seed", "3", "--tokens-per-second", "60"]
    with place() as ground, started(oracle, ENGINE) as (_, engine), Cluster(ground, engine, lease) as one:
        yield one


def kinds(rollouts: list[Rollout]) -> Counter[FailureKind]:
    return Counter(retry.kind for rollout in rollouts for retry in rollout.retries)


def test_a_killed_nodes_rollouts_finish_elsewhere(cluster: Cluster) -> None:
    wanted = example_requests(4)
    cluster.client.submit(wanted)
    first = next(iter(cluster.client.stream()))
    wait_for(lambda: cluster.nodes()["n0"].in_hand > 0)
    done = {one.rollout_id: one.finished_at for one in cluster.client.rollouts(limit=1000).rollouts}
    handles = below(cluster.processes["n0"].pid)
    cluster.kill("n0")
    assert survivors(handles, 5.0) == 0, "its sandboxes end with it"
    for handle in handles:
        os.close(handle)
    rollouts = cluster.records(wanted)
    assert first.rollout.rollout_id in done
    assert all(done.get(one.rollout_id, one.finished_at) == one.finished_at for one in rollouts)
    assert set(kinds(rollouts)) == {FailureKind.NODE_LOST}
    assert all(one.attempt == len(one.retries) <= 1 for one in rollouts)
    assert cluster.client.status().nodes.lost == 1  # type: ignore[union-attr]


def test_a_stopped_node_that_goes_on_past_its_lease_ends_nothing_but_itself(cluster: Cluster) -> None:
    wanted = example_requests(4)
    cluster.client.submit(wanted)
    wait_for(lambda: cluster.nodes()["n1"].in_hand > 0 and cluster.nodes()["n1"].calls > 0)
    cluster.kill("n1", signal.SIGSTOP)
    wait_for(lambda: "n1" not in cluster.nodes())
    cluster.kill("n1", signal.SIGCONT)
    assert cluster.processes["n1"].wait(10) == 2, "".join(cluster.logs["n1"])
    rollouts = cluster.records(wanted)
    assert set(kinds(rollouts)) == {FailureKind.NODE_LOST}


@pytest.mark.parametrize("lease", [20.0])  # longer than a head takes to load
def test_a_restarted_head_adopts_its_nodes(cluster: Cluster) -> None:
    wanted = example_requests(4)
    assert len(wanted) <= 2 * sum(NODE_SLOTS.values()), "all are in hand at once"
    cluster.client.submit(wanted)
    wait_for(lambda: sum(node.calls for node in cluster.nodes().values()) > 4)
    in_hand = sum(node.in_hand for node in cluster.nodes().values())
    cluster.kill("head")
    cluster.processes["head"].wait()
    cluster.start_head()
    rollouts = cluster.records(wanted)
    assert in_hand > 4
    assert (kinds(rollouts), {one.attempt for one in rollouts}) == (Counter(), {0})
    assert all(cluster.processes[name].poll() is None for name in ("n0", "n1"))


def test_a_pause_reaches_calls_on_nodes_and_both_ends_drain(cluster: Cluster) -> None:
    wanted = example_requests(2)
    cluster.client.submit(wanted)
    for version in (1, 2):
        # One call was answered, so that there are tokens of version 0.
        wait_for(
            lambda: any(
                engine.calls and engine.in_flight for pool in cluster.client.status().pools for engine in pool.engines
            )
        )
        cluster.client.pause("abort")
        status = cluster.client.policy()
        assert status.paused and not any(engine.in_flight for engine in status.engines)
        cluster.client.update_policy(version)
        cluster.client.resume()
    rollouts = cluster.records(wanted)
    versions = {version for one in rollouts for segment in one.segments for version in segment.policy_versions}
    assert {-1, 0, 2} <= versions <= {-1, 0, 1, 2}, "the second pause may strike before a token of version 1"
    assert kinds(rollouts) == Counter()
    cluster.kill("n0", signal.SIGTERM)
    assert cluster.processes["n0"].wait(20) == 0, "".join(cluster.logs["n0"])
    more = example_requests(1, "more-")
    cluster.client.submit(more)
    wait_for(lambda: cluster.client.status().queued == 0)
    cluster.kill("head", signal.SIGTERM)
    assert cluster.processes["head"].wait(60) == 0, "".join(cluster.logs["head"])
    assert cluster.processes["n1"].wait(LEASE + 10) == 2, "nothing answers it any more"
    cluster.start_head()
    assert all(cluster.client.result(one.rollout_id, timeout=5).reward == 1.0 for one in more), "the head drained"
