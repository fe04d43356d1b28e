"""The demo as a user runs it. Slow: it starts NeMo Gym and Ray."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from prorl_gym.trainers.nemo_rl import check_group, check_result

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(400)]

COMMAND = str(Path(sys.executable).parent / "prorl-gym")


def marked_processes(mark: str) -> set[str]:
    """Return the processes that inherited our mark in their environment, whatever they are called."""
    found: set[str] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.add(entry.name)
            except OSError:
                continue
    return found


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A value in the environment of everything that the demo starts."""
    value = f"PRORL_DEMO_TEST={tmp_path.name}-{os.getpid()}"
    monkeypatch.setenv(*value.split("="))
    return value


def start(tmp_path: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [COMMAND, "demo", "--output", str(tmp_path / "out")],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.release
def test_two_demos_at_once_pass_and_leave_nothing(tmp_path: Path, mark: str):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    demos = [start(folder) for folder in folders]
    outputs = [demo.communicate(timeout=300)[0] for demo in demos]
    for demo, output, folder in zip(demos, outputs, folders, strict=True):
        assert demo.returncode == 0, output
        assert "every row passes" in output
        assert "prorl_rollout is ready" in output
        (results,) = folder.glob("out/*/results.jsonl")
        rows = [json.loads(line) for line in results.read_text().splitlines()]
        assert Counter(row["environment"] for row in rows) == {"code": 20, "math": 20, "stem": 20, "swe": 20}
        groups: dict[int, list[dict[str, object]]] = {}
        for row in rows:
            check_result(row)
            groups.setdefault(row["_ng_task_index"], []).append(row)
        for group in groups.values():
            assert len(group) == 4
            check_group(group)
        assert (results.parent / "rollouts.html").stat().st_size > 10_000
    assert not marked_processes(mark)


def test_interrupt_leaves_nothing(tmp_path: Path, mark: str):
    demo = start(tmp_path)
    assert demo.stdout is not None
    while "NeMo Gym" not in demo.stdout.readline():
        assert demo.poll() is None
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, output
    assert "interrupted" in output
    assert f"demo: what there is so far: {tmp_path / 'out'}" in output
    assert not marked_processes(mark)


def test_server_that_is_not_there_is_named(tmp_path: Path):
    done = subprocess.run(
        [COMMAND, "demo", "--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 2
    assert "http://127.0.0.1:9/v1/models" in done.stderr
