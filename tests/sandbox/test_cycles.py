"""Many lives under random SIGKILLs of the service, its spawner and processes inside: nothing may be left."""

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from cycle_service import SHARED_BYTES
from sandbox_support import children_of, sandbox_uid, wait_until_dead

from prorl_gym.process_identity import ProcessIdentity
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.spawner import scratch
from prorl_gym.sandbox.spawner.scratch import SandboxState, make_sandbox_directory, reap_sandboxes

SERVICE = str(Path(__file__).with_name("cycle_service.py"))
SECONDS = 20.0
LANES = 3
MOST_DESCRIPTORS = 64 + 32 * LANES
"""Of a service in the middle of its work, however many sandboxes it had before."""
OTHERS_SHARED = 512 << 20
"""Bytes of shared memory by which other processes of this machine may grow during the test."""


def cycle(backend_name: str, scratch: Path, wanted: int, dice: random.Random, between: int) -> tuple[int, int]:
    """Let services live and die until ``wanted`` cycles were used up; return cycles and SIGKILLs."""
    used = kills = 0
    while used < wanted:
        command = [sys.executable, SERVICE, backend_name, str(scratch), str(LANES)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as service:
            assert service.stdout is not None
            spawner, victim = int(service.stdout.readline()), "inside"
            while victim == "inside":
                for _ in range(dice.randint(1, between)):
                    word = service.stdout.readline()
                    assert word, "the service died by itself"
                    used += word.startswith(b"used")
                family = handles(service.pid)
                victim = "service" if used >= wanted else dice.choice(("service", "both", "inside"))
                descriptors = len(os.listdir(f"/proc/{service.pid}/fd"))
                assert descriptors < MOST_DESCRIPTORS, "sockets of closed sandboxes are still open"
                inside = [handle for pid, handle in family.items() if pid != service.pid]
                if victim == "inside":  # the spawner or anything below it: the service has to go on
                    kill(dice.choice(inside))
                else:
                    kill(family[service.pid])
                    if victim == "both" and spawner in family:
                        kill(family[spawner])
                    assert wait_until_dead(list(family.values()), SECONDS) == 0, "a process outlived its service"
                kills += 1
                for handle in family.values():
                    os.close(handle)
    return used, kills


def kill(handle: int) -> None:
    with suppress(ProcessLookupError):  # it may have ended meanwhile
        signal.pidfd_send_signal(handle, signal.SIGKILL)


def handles(pid: int) -> dict[int, int]:
    """Return a pidfd for every process of the service's family that still lives."""
    found: dict[int, int] = {}
    for member in children_of(pid):
        with suppress(ProcessLookupError):
            found[member] = os.pidfd_open(member)
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("wanted", "between"), [(60, 20), pytest.param(1000, 60, marks=pytest.mark.release)], ids=["short", "thousand"]
)
async def test_cycles_leave_nothing(backend_name: str, own_scratch: Path, wanted: int, between: int) -> None:
    before = Remains.now(own_scratch)
    used, kills = cycle(backend_name, own_scratch, wanted, random.Random(wanted), between)
    assert used >= wanted and kills >= wanted // between
    backend = NamespaceBackend("userns", SandboxConfig(scratch=own_scratch))
    try:
        await backend.reap()
    finally:
        await backend.close()
    after = Remains.now(own_scratch)
    assert os.listdir(own_scratch) == []
    assert after.mounts == []
    assert after.sockets == []
    assert after.shared - before.shared == set()
    assert after.shared_bytes - before.shared_bytes < max(used // 4 * SHARED_BYTES // 2, OTHERS_SHARED)


@dataclass(frozen=True)
class Remains:
    """What sandboxes could leave behind on the host beside processes and directories."""

    mounts: list[str]
    sockets: list[str]
    """Unix sockets that have a name and listen below the scratch directory."""
    shared: set[str]
    """Of the sandboxes' uid: names in the host's /dev/shm, and System V segments of the host."""
    shared_bytes: int
    """Of all processes: tmpfs of any namespace and memory files count here."""

    @classmethod
    def now(cls, scratch: Path) -> "Remains":
        files = {entry.name for entry in os.scandir("/dev/shm") if entry.stat().st_uid == sandbox_uid()}
        segments = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
        return cls(
            mounts=lines_with(Path("/proc/self/mountinfo"), str(scratch)),
            sockets=lines_with(Path("/proc/net/unix"), str(scratch)),
            shared=files | {words[1] for words in segments if words[7] == str(sandbox_uid())},
            shared_bytes=int(lines_with(Path("/proc/meminfo"), "Shmem:")[0].split()[1]) << 10,
        )


def lines_with(file: Path, text: str) -> list[str]:
    return [line for line in file.read_text().splitlines() if text in line]


def test_directory_whose_removal_was_cut_short_is_still_reaped(
    own_scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = SandboxState("boot", ProcessIdentity(2**22 + 1, 1), None)
    directory = make_sandbox_directory(own_scratch, "f" * 32, gone)

    def killed_halfway(path: Path) -> None:
        (path / "state.json").unlink(missing_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(scratch, "remove_tree", killed_halfway)
        scratch.remove_directory(directory)
    assert len(os.listdir(own_scratch)) == 1
    assert reap_sandboxes(own_scratch).removed == 1
    assert os.listdir(own_scratch) == []
