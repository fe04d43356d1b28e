"""The start of the real service: it loads, then it listens; what it says when it cannot load."""

import json
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from killed_service import COMMAND, LOADING, started

from prorl_gym.client import SyncClient, read_token
from prorl_gym.free_ports import free_ports
from prorl_gym.records import RolloutRequest

pytestmark = pytest.mark.slow


def configure(state: Path, port: int = 0, **inference: str) -> list[str]:
    """Return the command of a service without an engine."""
    file = state / "service.json"
    engines = {"engines": ["http://127.0.0.1:1"], "model": "m", "tokenizer": "small", **inference}
    file.write_text(json.dumps({"inference": engines, "state": str(state), "http": {"port": port}}))
    return ["serve", "--config", str(file)]


def failure(command: list[str]) -> list[str]:
    """Return what a service that cannot start says, without its log."""
    done = subprocess.run([*COMMAND, *command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    return [line for line in done.stderr.splitlines() if not line.startswith("{")]


def test_a_client_that_comes_while_it_loads_is_refused_and_gets_in_by_its_retries(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with started(configure(tmp_path, port), LOADING):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with SyncClient(f"http://127.0.0.1:{port}", token=read_token(tmp_path / "token")) as client:
            task = {"id": "m", "question": "1+1?", "answer": "2"}
            assert not client.submit(RolloutRequest(rollout_id="r", environment="math", task=task))[0].duplicate
            assert [pool.name for pool in client.status().pools] == ["policy"], "it is loaded as a whole"


@pytest.mark.parametrize(
    ("inference", "said"),
    [
        ({"tokenizer": "/none"}, "tokenizer '/none': no such directory."),
        ({"api_key_env": "PRORL_NO_SUCH_KEY"}, "environment variable PRORL_NO_SUCH_KEY (api_key_env) is not set."),
    ],
)
def test_what_cannot_be_loaded_ends_the_service_and_is_said(
    tmp_path: Path, inference: dict[str, str], said: str
) -> None:
    lines = failure(configure(tmp_path, **inference))
    assert lines[0] == f"prorl-gym: {said}" and len(lines) == 2


def test_an_address_in_use_ends_the_service_before_it_loads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        said = "\n".join(failure(configure(tmp_path, other.getsockname()[1])))
    assert "cannot listen there (Address already in use)" in said
    assert "loading" not in said


def test_a_signal_while_it_loads_ends_it_in_order(tmp_path: Path) -> None:
    with started(configure(tmp_path), LOADING) as (child, _):
        child.send_signal(signal.SIGTERM)
        log, _ = child.communicate(timeout=30)
        assert child.returncode == 0
    assert "stopped while loading" in log and "serving on" not in log
