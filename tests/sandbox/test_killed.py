"""SIGKILL at any moment, also many times over, leaves no process, no mount and no directory."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from cycle_service import SHARED_BYTES
from sandbox_support import children_of, closing, sandbox_uid, status_of, wait_until_dead

from prorl_gym.process_identity import ProcessIdentity
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.spawner import scratch
from prorl_gym.sandbox.spawner.scratch import Reaped, SandboxState, make_sandbox_directory, reap_sandboxes

SERVICE = str(Path(__file__).with_name("busy_service.py"))
SECONDS = 5.0
COUNT = 3


class Running:
    """A busy service with handles on every process below it."""

    def __init__(self, process: "subprocess.Popen[bytes]", facts: dict[str, object]) -> None:
        self.process = process
        self.spawner = int(str(facts["spawner"]))
        self.handles = list(handles(process.pid).values())[1:]

    def kill(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def survivors(self) -> int:
        return wait_until_dead(self.handles, SECONDS)


@contextmanager
def busy_service(backend_name: str, scratch: Path) -> Iterator[Running]:
    command = [sys.executable, SERVICE, backend_name, str(COUNT), str(scratch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        running = Running(process, json.loads(process.stdout.readline()))
        try:
            yield running
        finally:
            process.kill()
            for handle in running.handles:
                os.close(handle)


async def reap_with_a_new_service(scratch: Path) -> Reaped:
    async with closing(
        NamespaceBackend("userns", SandboxConfig(scratch=scratch, uid=os.stat(scratch).st_uid or 61099))
    ) as backend:
        return await backend.reap()


def template_of(spawner: int) -> int:
    """Return the template of python workers: of a spawner's children the one that is in no pid namespace of its own."""
    statuses = [status_of(pid) for pid in children_of(spawner)[1:]]  # some are very short-lived
    children = [status for status in statuses if status.get("PPid") == str(spawner)]
    (template,) = [int(status["NSpid"]) for status in children if len(status["NSpid"].split()) == 1]
    return template


@pytest.mark.default
async def test_killed_service_leaves_nothing(backend_name: str, own_scratch: Path) -> None:
    with busy_service(backend_name, own_scratch) as running:
        assert len(running.handles) > 6 * COUNT
        assert len(os.listdir(own_scratch)) == COUNT
        running.kill(running.process.pid)
        assert running.survivors() == 0
    assert os.listdir(own_scratch) == []
    assert lines_with("/proc/self/mountinfo", str(own_scratch)) == []


async def test_the_workers_of_a_template_that_reaps_nothing_are_reaped(own_scratch: Path) -> None:
    """A sandbox ends when what was in it is reaped; of python workers the template is the parent."""
    with busy_service("userns", own_scratch) as running:
        os.kill(template_of(running.spawner), signal.SIGSTOP)
        running.kill(running.process.pid)
        assert running.survivors() == 0
    assert os.listdir(own_scratch) == []


async def test_killed_spawner_takes_its_sandboxes_along(backend_name: str, own_scratch: Path) -> None:
    with busy_service(backend_name, own_scratch) as running:
        running.kill(running.spawner)
        assert running.survivors() == 0
        assert running.process.poll() is None  # the service lives on
    assert lines_with("/proc/self/mountinfo", str(own_scratch)) == []
    await reap_with_a_new_service(own_scratch)
    assert os.listdir(own_scratch) == []


async def test_service_and_spawner_killed_at_once(backend_name: str, own_scratch: Path) -> None:
    with busy_service(backend_name, own_scratch) as running:
        os.kill(running.spawner, signal.SIGSTOP)  # it cannot clean up: only the kernel can
        running.kill(running.process.pid, running.spawner)
        assert running.survivors() == 0
    assert len(os.listdir(own_scratch)) == COUNT
    await reap_with_a_new_service(own_scratch)
    assert os.listdir(own_scratch) == []


CYCLE_SERVICE = str(Path(__file__).with_name("cycle_service.py"))
CYCLE_SECONDS = 20.0
LANES = 3
MOST_DESCRIPTORS = 64 + 32 * LANES
"""Of a service in the middle of its work, however many sandboxes it had before."""
OTHERS_SHARED = 512 << 20
"""Bytes of shared memory by which other processes of this machine may grow during the test."""


def cycle(backend_name: str, scratch: Path, wanted: int, dice: random.Random, between: int) -> tuple[int, int]:
    """Let services live and die until ``wanted`` cycles were used up; return cycles and SIGKILLs."""
    used = kills = 0
    while used < wanted:
        command = [sys.executable, CYCLE_SERVICE, backend_name, str(scratch), str(LANES)]
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
                    assert wait_until_dead(list(family.values()), CYCLE_SECONDS) == 0, "a process outlived its service"
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
    async with closing(NamespaceBackend("userns", SandboxConfig(scratch=own_scratch))) as backend:
        await backend.reap()
    after = Remains.now(own_scratch)
    assert os.listdir(own_scratch) == []
    assert after.mounts == []
    assert after.sockets == []
    assert after.shared - before.shared == set()
    assert after.shared_bytes - before.shared_bytes < max(used // 4 * SHARED_BYTES // 2, OTHERS_SHARED)


def lines_with(file: str, text: str) -> list[str]:
    return [line for line in Path(file).read_text().splitlines() if text in line]


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
            mounts=lines_with("/proc/self/mountinfo", str(scratch)),
            sockets=lines_with("/proc/net/unix", str(scratch)),
            shared=files | {words[1] for words in segments if words[7] == str(sandbox_uid())},
            shared_bytes=int(lines_with("/proc/meminfo", "Shmem:")[0].split()[1]) << 10,
        )


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
