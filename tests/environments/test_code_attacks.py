"""Hostile programs: none is rewarded beyond what it does honestly, and none is felt by the grading beside it."""

import asyncio
import textwrap
from typing import Any

import code_attacks
import pytest
from code_support import function, mark, stdio

from prorl_gym.environments.code import program_runs
from prorl_gym.environments.protocol import Leases
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.protocol import SandboxBackend

pytestmark = pytest.mark.usefixtures("isolated")

DOUBLE = stdio(*((f"{n}\n", f"{2 * n}\n") for n in (4, 21, -7)))
ADD = function(*(([a, b], a + b) for a, b in ((1, 2), (5, -5), (20, 30))), entry="add")
HONEST = "print(2 * int(input()))"
SAMPLE = (
    "forges the driver's report",
    "kills the driver",
    "starves the driver of descriptors",
    "leaves a daemon that answers the next test",
    "leaves a daemon that kills what comes",
    "removes the interpreter",
)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who hang are waited for less long."""
    monkeypatch.setattr(program_runs, "WALL_FACTOR", 1.0)
    monkeypatch.setattr(program_runs, "WALL_EXTRA", 0.5)
    monkeypatch.setattr(program_runs, "START_SECONDS", 3.0)
    monkeypatch.setattr(program_runs, "BATCH_SECONDS", 1.0)


async def passed(tests: dict[str, Any], program: str, leases: Leases) -> int:
    score = await mark(tests, program, leases, partial=True)
    assert score.reward == pytest.approx(int(score.detail["passed"] or 0) / 3)
    assert ("why" in score.detail) == (score.reward < 1.0)
    return int(score.detail["passed"] or 0)


async def attack(backend: SandboxBackend, names: list[str], found: dict[str, int]) -> None:
    for name in names:
        tests = DOUBLE if name in code_attacks.STDIO else ADD
        leases = SandboxLeases(backend)
        try:
            found[name] = await passed(tests, program_of(name)[0], leases)
        finally:
            await leases.close()


def program_of(name: str) -> tuple[str, int]:
    return code_attacks.STDIO.get(name) or code_attacks.FUNCTION[name]


async def be_honest(backend: SandboxBackend, attacks: "asyncio.Task[None]") -> list[int]:
    """Grade an honest program again and again, as long as the attacks last."""
    found: list[int] = []
    while not attacks.done() or not found:
        leases = SandboxLeases(backend)
        try:
            found.append(await passed(DOUBLE, HONEST, leases))
        finally:
            await leases.close()
    return found


async def defend(backend: SandboxBackend, names: list[str]) -> None:
    found: dict[str, int] = {}
    async with asyncio.TaskGroup() as group:
        attacks = group.create_task(attack(backend, names, found))
        honest = group.create_task(be_honest(backend, attacks))
    assert {name: count for name, count in found.items() if count > program_of(name)[1]} == {}
    assert found.keys() == set(names)
    assert set(honest.result()) == {3}


async def test_a_sample_of_attacks(backend: SandboxBackend, impatient: None):
    await defend(backend, list(SAMPLE))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["STDIO", "FUNCTION"])
async def test_every_attack(backend: SandboxBackend, impatient: None, kind: str):
    await defend(backend, list(getattr(code_attacks, kind)))


SEARCH = r"""
    import ctypes, os, sys
    word = b"secret-" + sys.argv[0][:0].encode() + input().split()[-1].encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) in OWN:
            continue
        for part in ("environ", "cmdline", "auxv", "maps"):
            try:
                if word in open(f"/proc/{pid}/{part}", "rb").read(1 << 20):
                    found.append(part)
            except OSError:
                pass
        try:
            for line in open(f"/proc/{pid}/maps"):
                start, end = (int(x, 16) for x in line.split()[0].split("-"))
                if " rw" in line and end - start < 1 << 26:
                    with open(f"/proc/{pid}/mem", "rb") as memory:
                        memory.seek(start)
                        if word in memory.read(end - start):
                            found.append("mem")
        except OSError:
            pass
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                try:
                    os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK))
                    found.append("fd")
                except OSError:
                    pass
        except OSError:
            pass
        if int(pid) != os.getpid():
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.ptrace(16, int(pid), 0, 0) == 0:
                found.append("ptrace")
            pidfd = libc.syscall(434, int(pid), 0)
            if pidfd >= 0 and libc.syscall(438, pidfd, 0, 0) >= 0:
                found.append("pidfd_getfd")
    for top in ("/workspace", "/tmp", "/var/tmp", "/root", "/run", "/dev/shm"):
        for folder, _, names in os.walk(top):
            for name in names:
                try:
                    if word in open(os.path.join(folder, name), "rb").read(1 << 20):
                        found.append("file")
                except OSError:
                    pass
    print(sorted(set(found)))
"""


async def test_nothing_of_other_tests_is_within_reach(leases: Leases):
    """The program of the first test looks for the second's input: in the memory, descriptors and files of all."""
    search = textwrap.dedent(SEARCH)
    tests = stdio(("look for 9b1e\n", "[]"), ("secret-9b1e\n" * 9000, "[]"))
    score = await mark(tests, search.replace("OWN", "(os.getpid(),)"), leases, time_limit=20.0, partial=True)
    assert score.detail["passed"] == 2
    # The same search finds its own memory and descriptors, so it does find what is within reach.
    control = stdio(("secret-9b1e\nlook for 9b1e\n", "['fd', 'mem']"))
    program = "keep = input().encode()\n" + search.replace("OWN", "()")
    score = await mark(control, program, leases, time_limit=20.0, partial=True)
    assert score.detail["passed"] == 1
