"""The peers of the benches do what they are timed for. How long it takes is not tested here."""

import asyncio
import os
import select
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import _apptainer
import _processes
import _report
import _shell_peers as peers
import _transport
import pytest


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_below_one_the_peer_is_better(better: Any) -> None:
    row = _report.figure("x", [2.0], "", better=better)
    assert _report.times_better(row, _report.peer("p", [8.0])) == (4.0 if better == "lower" else 0.25)


def test_a_raw_pty_runs_every_command(tmp_path: Path) -> None:
    root = str(tmp_path / "mix")
    commands = [
        peers.setup(root),
        *peers.actions_of_mix(root, pytest=False),
        f"echo $? > {tmp_path}/last",
    ]
    times = peers.raw_pty(commands, peers.environment(None))
    assert len(times) == len(commands)
    assert (tmp_path / "last").read_text() == "0\n"
    assert (tmp_path / "mix" / "pkg" / "module_60.py").exists()


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_tmux_waits_for_the_end_of_each_command(tmp_path: Path) -> None:
    commands = [f"echo {number} >> {tmp_path}/seen" for number in range(3)]
    assert len(peers.tmux(commands, peers.EAGER, peers.environment(None))) == 3
    assert (tmp_path / "seen").read_text() == "0\n1\n2\n"
    (only,) = peers.tmux(["true"], peers.OPENHANDS, peers.environment(None))
    assert only >= 100, "OpenHands clears its screen for a tenth of a second"


def test_families_and_their_memory() -> None:
    with subprocess.Popen(["/bin/sh", "-c", "sleep 100 & echo; wait"], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            members = _processes.process_tree(child.pid)
            assert len(members) == 2 and members[0] == child.pid
            assert _processes.pss(members) > 0
        finally:
            handles = [os.pidfd_open(member) for member in _processes.process_tree(child.pid)]
            for handle in handles:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            for handle in handles:  # one that was killed gives its memory back some time later
                assert select.select([handle], [], [], 10)[0]
                os.close(handle)
    assert _processes.pss(members) == 0


def test_a_shell_answers_over_every_transport() -> None:
    control, shell = asyncio.run(_transport.measure(3))
    assert [len(control["runs"]), len(shell["runs"])] == [3, 3]
    assert [peer["name"] for peer in shell["peers"]] == ["relayed over Unix sockets", "relayed over TCP loopback"]


@pytest.mark.slow
@pytest.mark.apptainer
def test_what_a_peer_cannot_do_is_left_out_by_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _apptainer.executions(str(tmp_path / "missing.sif"), 1) is None
    assert "left out: _apptainer.py exec" in capfd.readouterr().err
