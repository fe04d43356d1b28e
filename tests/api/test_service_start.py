"""The start of the real service: it loads, then it listens; what it says when it cannot load."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prorl_gym.client import SyncClient, read_token
from prorl_gym.records import RolloutRequest

pytestmark = pytest.mark.slow

SERVE = [sys.executable, "-c", "from prorl_gym.cli.main import app; app()", "serve", "--config"]


def configure(state: Path, port: int = 0, **inference: str) -> Path:
    file = state / "service.json"
    engines = {"engines": ["http://127.0.0.1:1"], "model": "m", "tokenizer": "small", **inference}
    file.write_text(json.dumps({"inference": engines, "state": str(state), "http": {"port": port}}))
    return file


@contextmanager
def loading(config: Path) -> Generator["subprocess.Popen[str]"]:
    """A service that begins to load."""
    child = subprocess.Popen([*SERVE, str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    try:
        while "loading tokenizer and sandboxes" not in (line := child.stderr.readline()):
            assert line, "it ended before it loaded"
        yield child
    finally:
        child.kill()
        child.communicate()


def test_a_client_that_comes_while_it_loads_is_refused_and_gets_in_by_its_retries(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    with loading(configure(tmp_path, port)):
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
    config = configure(tmp_path, **inference)
    done = subprocess.run([*SERVE, str(config)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert lines[0] == f"prorl-gym: {said}" and len(lines) == 2


def test_an_address_in_use_ends_the_service_before_it_loads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = configure(tmp_path, other.getsockname()[1])
        done = subprocess.run([*SERVE, str(config)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "cannot listen there (Address already in use)" in done.stderr
    assert "loading" not in done.stderr


def test_a_signal_while_it_loads_ends_it_in_order(tmp_path: Path) -> None:
    with loading(configure(tmp_path)) as child:
        child.send_signal(signal.SIGTERM)
        _, log = child.communicate(timeout=30)
        assert child.returncode == 0
    assert "stopped while loading" in log and "serving on" not in log
