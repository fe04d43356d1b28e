"""Many lives under random SIGKILLs of the service, its spawner and processes inside: nothing may be left."""

import os
import random
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from sandbox_support import children_of, give_to_sandboxes, wait_until_dead

from prorl_gym.sandbox import scratch
from prorl_gym.sandbox.backend import NamespaceBackend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.processes import ProcessIdentity
from prorl_gym.sandbox.reaper import reap
from prorl_gym.sandbox.scratch import State, make_directory

SERVICE = str(Path(__file__).with_name("cycle_service.py"))
SECONDS = 20.0
LANES = 3


@pytest.fixture
def own_scratch(ground: Path) -> Path:
    path = Path(tempfile.mkdtemp(dir=ground))
    give_to_sandboxes(path)
    path.chmod(0o700)
    return path


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
    ("wanted", "between"), [(60, 20), pytest.param(1000, 60, marks=pytest.mark.slow)], ids=["short", "thousand"]
)
async def test_cycles_leave_nothing(backend_name: str, own_scratch: Path, wanted: int, between: int) -> None:
    used, kills = cycle(backend_name, own_scratch, wanted, random.Random(wanted), between)
    assert used >= wanted and kills >= wanted // between
    backend = NamespaceBackend("userns", SandboxConfig(scratch=own_scratch))
    try:
        await backend.reap()
    finally:
        await backend.close()
    assert os.listdir(own_scratch) == []
    assert mounted(own_scratch) == []


def test_directory_whose_removal_was_cut_short_is_still_somebodys(
    own_scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = State("boot", ProcessIdentity(2**22 + 1, 1), None)
    directory = make_directory(own_scratch, "f" * 32, gone)

    def killed_halfway(path: Path, **_: object) -> None:
        (path / "state.json").unlink(missing_ok=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(scratch.shutil, "rmtree", killed_halfway)
        scratch.remove_directory(directory)
    assert len(os.listdir(own_scratch)) == 1
    assert reap(own_scratch).removed == 1
    assert os.listdir(own_scratch) == []


def mounted(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(path) in line]
