"""The command as the demo starts it."""

import json
import signal
import socket
import subprocess
import urllib.request

import pytest
from killed_service import COMMAND, ENGINE, started

pytestmark = pytest.mark.slow


def complaint(*options: str) -> str:
    """Return what the command says of options that it refuses."""
    ran = subprocess.run([*COMMAND, "engine", "oracle", *options], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    return ran.stderr


def test_it_prints_where_it_listens_and_ends_on_sigterm():
    with started(["engine", "oracle", "--port", "0"], f"oracle engine: {ENGINE}") as (process, url):
        with urllib.request.urlopen(f"{url}/models", timeout=20) as response:
            assert json.load(response)["data"][0]["id"] == "oracle"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = complaint("--port", str(port))
    assert said.splitlines()[-2].startswith(f"prorl-gym: 127.0.0.1:{port}: cannot listen (")


def test_a_file_without_rows_is_named(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "?"}) + "\n")
    assert f"{rows}:1: 'environment' is missing." in complaint("--rows", str(rows))
