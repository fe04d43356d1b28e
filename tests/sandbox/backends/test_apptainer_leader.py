"""The program that holds a container open, without any container."""

import struct
import subprocess
from pathlib import Path

import pytest

from prorl_gym.sandbox.backends import apptainer


@pytest.mark.skipif(not apptainer.HAS_LEADER, reason="no leader for this machine")
def test_leader_reports_that_it_is_ready_and_ends_with_its_input(tmp_path: Path) -> None:
    program = tmp_path / "leader"
    program.write_bytes(apptainer.build_leader())
    program.chmod(0o700)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as leader:
        assert leader.stdin is not None and leader.stdout is not None
        assert leader.stdout.readline() == apptainer.LEADER_READY
        leader.stdin.write(b"x" * 1000)
        leader.stdin.flush()
        assert leader.poll() is None
        leader.stdin.close()
        assert leader.wait(10) == 0


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_executable_ends_where_its_header_ends_it(machine: str) -> None:
    data = apptainer.build_leader(machine)
    offset, _, _, in_file, in_memory = struct.unpack_from("<5Q", data, 64 + 8)
    assert (offset, in_file, in_memory) == (0, len(data), len(data))
    assert data[-32 - len(apptainer.LEADER_READY) : -32] == apptainer.LEADER_READY  # the signal action follows
