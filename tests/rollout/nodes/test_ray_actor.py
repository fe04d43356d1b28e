"""What runs a node on Ray, without Ray: the actor's child, and the addresses that are refused."""

import os
import re
import signal
from pathlib import Path

import pytest
from killed_service import wait_for

from prorl_gym.errors import ConfigError
from prorl_gym.rollout.nodes.ray_nodes import NodeSupervisor, check_ray_address

pytestmark = pytest.mark.slow


def test_a_node_that_ends_starts_again_until_it_is_drained(capfd: pytest.CaptureFixture[str]) -> None:
    """An engine stands for the node: it ends at SIGTERM, too, and prints that it is up."""
    output = ""

    def pids() -> list[int]:
        children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
        own = [int(pid) for file in children for pid in file.read_text().split()]
        return [pid for pid in own if b"prorl_gym\0engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def is_up() -> bool:
        nonlocal output
        output += capfd.readouterr().out
        return re.search(r"oracle engine", output) is not None

    supervisor = NodeSupervisor(["engine", "oracle", "--port", "0"], {"PRORL_TEST": "1"})
    wait_for(is_up)
    (first,) = pids()
    assert b"PRORL_TEST=1" in Path(f"/proc/{first}/environ").read_bytes()
    os.kill(first, signal.SIGKILL)
    output = ""
    wait_for(is_up)
    (second,) = pids()
    assert second != first
    supervisor.drain()
    assert not pids()


@pytest.mark.ray
@pytest.mark.parametrize("address", [None, "", "local"])
def test_ray_never_starts_a_cluster_of_its_own(address: str | None) -> None:
    with pytest.raises(ConfigError, match="no running Ray cluster is named"):
        check_ray_address(address)
    assert check_ray_address("10.0.0.5:6379") == "10.0.0.5:6379"
