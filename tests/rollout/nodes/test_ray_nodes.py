"""``prorl-gym serve --nodes ray`` on a real Ray cluster of processes: nodes join, are killed and leave; Ray is lost."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from _ray_cluster import ADDRESS, RayCluster, ray_directory
from killed_service import COMMAND, ENGINE, SERVING, configure, example_requests, place, started, wait_for

from prorl_gym.client import SyncClient, read_token
from prorl_gym.records import Rollout

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("servers")]


@pytest.fixture
def ray_processes() -> Iterator[Callable[[], RayCluster]]:
    """Start Ray clusters; one at a time."""
    clusters = list[RayCluster]()

    def start() -> RayCluster:
        clusters.append(RayCluster())
        return clusters[-1]

    with ray_directory():
        yield start
        for cluster in clusters:
            cluster.close()


def drain_node(cluster: RayCluster, name: str) -> None:
    """Have Ray drain the node that a node of ours is on, as for a machine that is about to be preempted."""
    found = [node["NodeID"] for node in cluster.cluster.global_state.node_table()]
    node_id = next(one for one in found if one.startswith(name.rpartition("-")[2]))
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
    command = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", cluster.cluster.address]
    command += ["--node-id", node_id, *why, "--deadline-remaining-seconds", "60"]
    subprocess.run(command, check=True, capture_output=True)


class Service:
    """A head over Ray, and what tests ask of it."""

    url: str
    client: SyncClient

    def __init__(self, command: list[str], log: Path) -> None:
        self._command = command
        self.log = log
        self.start(port=0)

    def start(self, port: int) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*self._command, "--port", str(port)], stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd="/"
            )

    def nodes(self) -> dict[str, int]:
        """Attempts in hand of the nodes that have joined, by name."""
        status = self.client.status().nodes
        assert status is not None
        return {node.name: node.in_hand for node in status.nodes}

    def node_pids(self) -> dict[str, int]:
        """Processes of its nodes, by name."""
        found = dict[str, int]()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "cmdline").read_text().split("\0")
                if words[2:4] == ["prorl_gym", "node"] and self.url in words:
                    found[words[words.index("--name") + 1]] = int(process.name)
        return found

    def submit(self, prefix: str, replicas: int) -> list[str]:
        return [one.rollout_id for one in self.client.submit(example_requests(replicas, prefix))]

    def results(self, ids: list[str]) -> list[Rollout]:
        rollouts = [self.client.result(one, timeout=120) for one in ids]
        assert {one.outcome.status for one in rollouts} == {"completed"}
        assert {one.reward for one in rollouts} == {1.0}, "the oracle plays gold"
        return rollouts


@pytest.fixture
def service(ray_processes: object) -> Iterator[Service]:
    with place() as ground, started(["engine", "oracle", "--port", "0", "--seed", "3"], ENGINE) as (_, engine):
        command = configure(ground, engine)
        file, log = Path(command[-1]), ground / "service.log"
        config = json.loads(file.read_text())
        config["nodes"] = {"lease_seconds": 30}  # a service that is killed is back within it
        config["runner"] = {"queue": 4, "init": 2, "run": 4, "eval": 2}
        file.write_text(json.dumps(config))
        command = [*COMMAND, *command, "--nodes", "ray", "--address", ADDRESS]
        running = Service(command, log)
        try:
            wait_for(lambda: re.search(SERVING, log.read_text()) is not None, 30)
            found = re.search(SERVING, log.read_text())
            assert found is not None
            running.url = found[1]
            with SyncClient(running.url, token=read_token(ground / "state/token")) as running.client:
                yield running
        finally:
            running.process.kill()
            running.process.wait()
            print(log.read_text()[-20_000:])


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_nodes_join_are_killed_and_leave(ray_processes: Callable[[], RayCluster], service: Service) -> None:
    """The service is there first: it connects once Ray is."""
    cluster = ray_processes()
    cluster.add_node()
    last = cluster.add_node()
    wait_for(lambda: len(service.nodes()) == 2, 90)
    first_pids = service.node_pids()
    assert first_pids.keys() == service.nodes().keys()
    for pid in first_pids.values():
        assert os.getpriority(os.PRIO_PROCESS, pid) == 0
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "0\n"

    # An actor is killed: its node dies with it, and Ray starts both again on the same Ray node.
    ids = service.submit("a", 8)
    wait_for(lambda: all(service.nodes().values()), 30)
    victim, pid = first_pids.popitem()
    dead = os.pidfd_open(pid)
    os.kill(parent(pid), signal.SIGKILL)
    assert select.select([dead], [], [], 5)[0], "the node ends with its actor"
    rollouts = service.results(ids)
    assert {"node_lost"} == {retry.kind for one in rollouts for retry in one.retries}
    wait_for(lambda: service.node_pids().get(victim, pid) != pid and victim in service.nodes(), 30)

    # A Ray node joins, another one is removed.
    ids = service.submit("b", 12)
    names = set(service.nodes())
    cluster.add_node()
    wait_for(lambda: len(service.nodes()) == 3, 60)
    cluster.remove_node(last)
    service.results(ids)
    wait_for(lambda: len(service.nodes()) == 2, 60)
    assert service.nodes().keys() != names

    # Ray drains a node: what it has in hand is finished there, and it gets nothing more.
    ids = service.submit("c", 4)
    wait_for(lambda: all(service.nodes().values()), 30)
    drained = next(iter(service.nodes()))
    drain_node(cluster, drained)
    assert not any(one.retries for one in service.results(ids))
    wait_for(lambda: drained not in service.nodes() and drained not in service.node_pids(), 30)  # it leaves, then ends

    # The service is killed: the next one finds the actors, whose nodes have gone on.
    ids = service.submit("d", 4)
    wait_for(lambda: all(service.nodes().values()), 30)
    before = service.node_pids()
    service.process.kill()
    service.process.wait()
    service.start(port=int(service.url.rpartition(":")[2]))
    service.results(ids)
    wait_for(lambda: service.log.read_text().count("connected to Ray at") == 2, 30)
    assert service.node_pids() == before
    assert re.search(r"[1-9]\d* running attempts adopted", service.log.read_text())

    # A stopped service leaves nothing on Ray.
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(60) == 0
    wait_for(lambda: not service.node_pids(), 5)


@pytest.mark.release
def test_the_service_goes_on_without_ray_and_adopts_a_new_cluster(
    ray_processes: Callable[[], RayCluster], service: Service
) -> None:
    cluster = ray_processes()
    cluster.add_node()
    wait_for(lambda: len(service.nodes()) == 1, 90)
    ids = service.submit("a", 4)
    service.results(ids[:1])
    cluster.cluster.head_node.kill_gcs_server()
    assert service.results(ids), "nodes live on for as long as their raylets"
    wait_for(lambda: "no connection to Ray" in service.log.read_text(), 60)
    assert service.process.poll() is None
    later = service.submit("b", 2)
    cluster.close()
    ray_processes().add_node()
    service.results(later)
