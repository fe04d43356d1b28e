"""Floods of a real service by callers without the token, as another user: it answers, and holds little for them."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from flood import SENT
from test_serve import SERVE

from prorl_gym.client import SyncClient, read_token
from prorl_gym.records import RolloutRequest

SECONDS = 8.0
MEMORY = 50 << 20
LINES = 100
ANSWER_SECONDS = 10.0
"""For a submission and a look at ``/livez``, each on a connection of its own."""


class Service:
    def __init__(self, child: "subprocess.Popen[str]", state: Path) -> None:
        assert child.stderr is not None
        self.child, self.state = child, state
        while not (found := re.search(r"serving on http://127.0.0.1:(\d+)", line := child.stderr.readline())):
            assert line, "it ended before it served"
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.log: list[str] = []
        threading.Thread(target=self.log.extend, args=(child.stderr,), daemon=True).start()

    def client(self) -> SyncClient:
        return SyncClient(self.url, token=read_token(self.state / "token"), retry_seconds=0)

    def memory(self) -> int:
        pages = int(Path(f"/proc/{self.child.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.child.pid}/fd"))


@pytest.fixture
def service(tmp_path: Path) -> Generator[Service]:
    config, state = tmp_path / "service.json", tmp_path / "state"
    inference = {"engines": ["http://127.0.0.1:1"], "model": "m", "tokenizer": "small"}
    config.write_text(json.dumps({"inference": inference, "state": str(state), "http": {"port": 0}}))
    child = subprocess.Popen([sys.executable, "-c", SERVE, str(config)], stderr=subprocess.PIPE, text=True)
    try:
        yield Service(child, state)
    finally:
        child.kill()
        child.communicate()


@contextmanager
def flood(kind: str, service: Service, connections: int) -> Generator[list["subprocess.Popen[str]"]]:
    """Two flooders, so that one process's limit of open files does not bound them."""
    uid = "65534" if os.geteuid() == 0 else "0"
    script = str(Path(__file__).with_name("flood.py"))
    flooders = [
        subprocess.Popen(
            [sys.executable, script, kind, str(service.port), source, str(connections // 2), str(SECONDS), uid],
            stdout=subprocess.PIPE,
            text=True,
        )
        for source in ("127.0.0.1", "127.0.0.2")
    ]
    try:
        yield flooders
    finally:
        for one in flooders:
            one.kill()
            one.wait()


def ask(rollout_id: str, **task: str) -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, environment="scripted", task=task)


@pytest.mark.product
@pytest.mark.parametrize(("kind", "connections"), [(kind, 1000 if sent else 20_000) for kind, sent in SENT.items()])
def test_a_flood_costs_little_and_stops_no_work(service: Service, kind: str, connections: int) -> None:
    with service.client() as reader:
        stream = reader.stream()
        reader.submit([ask("warm")])
        streamed = [next(stream).rollout.rollout_id]
        for path in ("/openapi.json", "/docs/ui.js", "/livez"):
            urlopen(service.url + path).read()
        idle, lines = service.memory(), len(service.log)
        peak, files, slowest, calls = idle, 0, 0.0, 0
        with flood(kind, service, connections) as flooders:
            while any(one.poll() is None for one in flooders):
                began = time.monotonic()
                with service.client() as caller:
                    caller.submit([ask(f"during{calls}")])
                assert urlopen(service.url + "/livez", timeout=30).status == 200
                slowest = max(slowest, time.monotonic() - began)
                streamed.append(next(stream).rollout.rollout_id)
                peak, files, calls = max(peak, service.memory()), max(files, service.files()), calls + 1
            opened = sum(int(one.stdout.readline()) for one in flooders if one.stdout)
        written = len(service.log) - lines
        print(
            f"\n{kind}: {opened} connections, {calls} calls, slowest {slowest:.2f} s, "
            f"+{(peak - idle) / 1e6:.1f} MB, {files} files, {written} lines"
        )
        assert slowest < ANSWER_SECONDS
        assert peak - idle < MEMORY
        assert written < LINES
        assert streamed == ["warm", *(f"during{number}" for number in range(calls))]
