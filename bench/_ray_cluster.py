"""A Ray cluster of processes on this machine, for ``bench nodes`` and the tests of nodes on Ray."""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

PORT = 16379
HEAD = "127.0.0.2"
"""Not 127.0.0.1, in whose place Ray puts the address of the host."""
ADDRESS = f"{HEAD}:{PORT}"
NODE_MEMORY = 1 << 30
"""Bytes that each Ray node offers: far less than the machine has, since several share it."""
_SMALL: dict[str, Any] = {"num_cpus": 0, "object_store_memory": 80 << 20}
_TUNED = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A killed node is missed within 4 s, and one that starts on a busy machine is given 18 s.
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "6",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}


class RayCluster:
    """Ray processes on this machine: a control store, and nodes that take attempts. Made within ``ray_directory``."""

    def __init__(self, port: int = PORT) -> None:
        from ray import cluster_utils

        self.cluster: Any = cast(Any, cluster_utils).Cluster(  # most of its types are unknown
            initialize_head=True,
            head_node_args={**_SMALL, "gcs_server_port": port, "node_ip_address": HEAD, "include_dashboard": False},
        )
        self._count = 0

    def add_node(self) -> Any:
        self._count += 1
        return self.cluster.add_node(
            wait=False,
            memory=NODE_MEMORY,
            resources={"prorl_node": 1},
            node_ip_address=f"127.0.0.{9 + self._count}",
            **_SMALL,
        )

    def remove_node(self, node: Any) -> None:
        self.cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self.cluster.shutdown()


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
