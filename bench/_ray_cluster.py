"""A Ray cluster of processes on this machine, for ``bench nodes`` and the tests of nodes on Ray."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

PORT = 16379
HEAD = "127.0.0.2"
"""Not 127.0.0.1, in whose place Ray puts the address of the host."""
ADDRESS = f"{HEAD}:{PORT}"
"""Of a cluster on the default port."""
NODE_MEMORY = 1 << 30
"""Bytes that each Ray node offers: far less than the machine has, since several share it."""
_SMALL: dict[str, Any] = {"num_cpus": 0, "object_store_memory": 80 << 20}
_TUNED = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}


class RayCluster:
    """Ray processes on this machine: a control store, and nodes that take attempts. Made within ``ray_directory``."""

    def __init__(self, port: int = PORT) -> None:
        from ray import cluster_utils

        self._cluster = cast(Any, cluster_utils).Cluster(  # most of its types are unknown
            initialize_head=True,
            head_node_args={**_SMALL, "gcs_server_port": port, "node_ip_address": HEAD, "include_dashboard": False},
        )
        self._count = 0

    def add_node(self) -> Any:
        """Add a node with the resource ``prorl_node``."""
        self._count += 1
        return self._cluster.add_node(
            wait=False,
            memory=NODE_MEMORY,
            resources={"prorl_node": 1},
            node_ip_address=f"127.0.0.{9 + self._count}",
            **_SMALL,
        )

    def remove_node(self, node: Any) -> None:
        """Kill a node's processes."""
        self._cluster.remove_node(node, allow_graceful=False)

    def drain_node(self, name: str) -> None:
        """Have Ray drain the node that a node of ours is on, as for a machine that is about to be preempted."""
        found = [node["NodeID"] for node in self._cluster.global_state.node_table()]
        node_id = next(one for one in found if one.startswith(name.rpartition("-")[2]))
        why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
        command = [str(Path(sys.executable).with_name("ray")), "drain-node", "--address", self._cluster.address]
        command += ["--node-id", node_id, *why, "--deadline-remaining-seconds", "60"]
        subprocess.run(command, check=True, capture_output=True)

    def kill_control_store(self) -> None:
        """Kill Ray's control store alone."""
        self._cluster.head_node.kill_gcs_server()

    def close(self) -> None:
        """End all of it."""
        self._cluster.shutdown()


@contextmanager
def ray_directory() -> Generator[None]:
    """Set what Ray's processes take from the environment: their directory, and health checks for one machine."""
    directory = tempfile.mkdtemp(prefix="prr-", dir="/tmp")  # short: it holds sockets
    changed = {**_TUNED, "RAY_TMPDIR": directory}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text
        shutil.rmtree(directory, ignore_errors=True)
