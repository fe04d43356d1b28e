"""A real service, started as a user starts it, to be killed; and what it may have left on this host."""

import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

from prorl_gym.cli.demo.stack import descendants
from prorl_gym.environments.row_format import read_rows
from prorl_gym.records import RolloutRequest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "prorl_gym"]
LOADING = r"(loading tokenizer and sandboxes)"
SERVING = r"serving on (http://[\d.:]+)"
ENGINE = r"(http://[\d.:]+/v1)"


@contextmanager
def place() -> Iterator[Path]:
    """State and scratch on a local disk that the sandboxes' uid may reach."""
    path = Path(tempfile.mkdtemp(prefix="prorl-gym-killed-", dir="/var/tmp"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        rmtree(path)


@contextmanager
def started(arguments: list[str], announced: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run a command of ours until the block ends; wait for the address it announces."""
    child = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/"
    )
    try:
        yield child, announcement(child, announced)[1]
    finally:
        child.kill()
        child.communicate()


def announcement(child: "subprocess.Popen[str]", pattern: str) -> re.Match[str]:
    """Wait for a line that a process of ``started`` prints."""
    assert child.stdout is not None
    lines: list[str] = []
    while True:
        lines.append(child.stdout.readline())
        assert lines[-1], "it ended before:\n" + "".join(lines)
        if found := re.search(pattern, lines[-1]):
            return found


def configure(ground: Path, engine: str, more: Mapping[str, Any] | None = None, **http: Any) -> list[str]:
    """Write a configuration of a service on this ground, with more settings of ``http``; return the command for it.

    ``more`` are further keys.
    """
    config = ground / "service.json"
    config.write_text(
        json.dumps(
            {
                "inference": {"engines": [engine], "model": "oracle", "tokenizer": "small"},
                "sandbox": {"backend": "userns", "scratch": str(ground / "scratch")},
                "state": str(ground / "state"),
                "retry": {"restarts": 100},  # more often than any test kills it
                "http": {"port": 0, **http},
                **(more or {}),
            }
        )
    )
    return ["serve", "--config", str(config)]


def example_requests(replicas: int, prefix: str = "") -> list[RolloutRequest]:
    """A group of each example row of two environments, one of which works in sandboxes."""
    return [
        RolloutRequest(
            rollout_id=f"{prefix}{row.task['id']}-{replica}",
            environment=name,
            task=row.task,
            group_id=prefix + str(row.task["id"]),
            group_size=replicas,
            replica=replica,
        )
        for name in ("math", "code")
        for row in read_rows(ROOT / f"environments/prorl_{name}/data/example.jsonl")
        for replica in range(replicas)
    ]


def below(pid: int) -> list[int]:
    """Handles on every process below one."""
    handles: list[int] = []
    for found in descendants(pid):
        with suppress(ProcessLookupError):  # a command that has just ended
            handles.append(os.pidfd_open(found.pid))
    return handles


def survivors(handles: list[int], seconds: float) -> int:
    """Wait until the processes of these handles are dead; return how many are not in time."""
    deadline = time.monotonic() + seconds
    left = list(handles)
    while left and time.monotonic() < deadline:
        ended, _, _ = select.select(left, [], [], deadline - time.monotonic())
        left = [handle for handle in left if handle not in ended]
    return len(left)


def who_sees(ground: Path) -> list[int]:
    """Processes whose mounts, command line or files are of this ground, in any mount namespace of the host."""
    own, found = os.getpid(), list[int]()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == own:
            continue
        with suppress(OSError):
            text = (process / "mountinfo").read_text() + (process / "cmdline").read_text()
            text += os.readlink(process / "cwd")
            if str(ground) in text:
                found.append(int(process.name))
    return found


def gone(ground: Path, seconds: float) -> bool:
    """Wait until no process uses the ground."""
    deadline = time.monotonic() + seconds
    while who_sees(ground):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for another process's state, of which there is no event here."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)
