"""The size of a root on disk: what is counted, and which processes a full one keeps from writing, from when on."""

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from prorl_gym.sandbox.guest import guest_messages
from prorl_gym.sandbox.guest.disk_watch import DiskWatch, TreeUsage, TreeWalker
from prorl_gym.sandbox.guest.process_table import Process
from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import SandboxLimits

MB = 1 << 20
LIMITS = SandboxLimits(root_on="disk", root_size=MB, file_size=2 * MB)

_GUEST_THAT_IS_SLOW = """
import os, socket, sys
from prorl_gym.sandbox.guest import pid1
from prorl_gym.sandbox.protocol import SandboxLimits

start = pid1.fork_exec

def start_and_be_late(*arguments):
    pid, listener = start(*arguments)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid, listener

pid1.fork_exec = start_and_be_late
storage, proc = (os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (sys.argv[2], "/proc"))
limits = SandboxLimits(root_on="disk", root_size=1)
options = pid1.GuestOptions(
    limits, "/", {}, proc, is_init=False, confine=lambda *_: None, storage_fd=storage, is_isolated=False
)
pid1.serve(socket.socket(fileno=int(sys.argv[1])), options)
"""
"""It goes on only when the program that it has started is over."""


def test_program_of_a_full_root_begins_without_room(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30)
    with theirs:
        command = [sys.executable, "-c", _GUEST_THAT_IS_SLOW, str(theirs.fileno()), str(tmp_path)]
        guest = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    with guest, ours:
        program = {"argv": ["/bin/sh", "-c", "ulimit -S -f"], "env": {}, "cwd": None}
        pipes = {"stdin": False, "merge": True, "channel": False}
        guest_messages.send_packet(ours, guest_messages.encode_packet({"id": 1, "op": "spawn", **program, **pipes}))
        received = [guest_messages.receive_packet(ours) for _ in ("hello", "disk", "reply")]
        assert received[1] == ({"type": "disk", "full": True}, [])
        assert received[2] is not None
        with open(received[2][1][0], encoding="ascii") as output:
            assert output.read() == "0\n"
        ours.shutdown(socket.SHUT_RDWR)


@dataclass
class ForkingTable:
    """Processes, of which each call to ``descendants`` finds one more."""

    processes: list[Process]
    found: int = 0

    def descendants(self, root: int) -> list[Process]:
        self.found = min(self.found + 1, len(self.processes))
        return self.processes[: self.found]

    def unlinked_files(self, pid: int, excluded_devices: set[int]) -> dict[tuple[int, int], int]:
        return {}


@pytest.fixture
def sleepers() -> Iterator[list[int]]:
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(3)]
        yield [process.pid for process in started]
        for process in started:
            process.kill()


def limit_of(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_FSIZE)[0]


def test_process_that_is_forked_while_room_is_given_back_may_write(tmp_path: Path, sleepers: list[int]) -> None:
    processes = [Process(pid, os.getpid(), 0, is_alive=True, threads=1, resident=0) for pid in sleepers]
    changes: list[bool] = []
    table = ForkingTable(processes, found=len(processes))
    storage = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)

    def on_breach(pid: int, breach: Breach) -> None:
        assert breach is Breach.DISK

    watch = DiskWatch(storage, LIMITS, table, os.getpid(), on_breach, changes.append)  # pyright: ignore[reportArgumentType]
    (tmp_path / "file").write_bytes(bytes(2 * MB))
    watch.check()
    assert [limit_of(pid) for pid in sleepers] == [0, 0, 0]
    (tmp_path / "file").unlink()
    table.found = 0
    watch.check()
    assert ([limit_of(pid) for pid in sleepers], changes) == ([2 * MB] * 3, [True, False])
    os.close(storage)


@pytest.fixture
def top(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def whole(walker: TreeWalker) -> TreeUsage:
    while not walker.advance(0):
        continue
    return walker.usage


def test_bytes_and_files(tmp_path: Path, top: int) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_bytes(bytes(1 << 20))
    os.sync()
    found = whole(TreeWalker(top))
    assert found.files == 3 and not found.is_too_deep
    assert 1 << 20 <= found.bytes < (1 << 20) + (64 << 10)


def test_hard_links_count_once_and_links_lead_nowhere(tmp_path: Path, top: int) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    os.link(tmp_path / "file", tmp_path / "again")
    (tmp_path / "link").symlink_to("/usr")
    (tmp_path / "circle").symlink_to(".")
    found = whole(TreeWalker(top))
    assert found.files == 3 and found.bytes < 2 << 20


def test_holes_do_not_count(tmp_path: Path, top: int) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    assert whole(TreeWalker(top)).bytes < 1 << 20


def test_it_takes_its_time_in_pieces(tmp_path: Path, top: int) -> None:
    for number in range(300):
        (tmp_path / f"{number}").mkdir()
    walker = TreeWalker(top)
    assert not walker.advance(0) and 0 < walker.usage.files < 300
    assert whole(walker).files == 300


def test_what_is_too_deep_is_reported(tmp_path: Path, top: int) -> None:
    here = os.dup(top)
    for _ in range(25):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert whole(TreeWalker(top)).is_too_deep
