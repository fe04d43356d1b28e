"""The watchdog's decisions over an invented process table, and memory that hides from it on real backends."""

import os
from dataclasses import dataclass, field, replace

import pytest

from prorl_gym.sandbox.backend import NamespaceBackend
from prorl_gym.sandbox.breach import Breach
from prorl_gym.sandbox.guest.tree import Process, ProcessTable
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.sandbox.watchdog import Watchdog

MB = 1 << 20
GUEST, SHELL, TOOL = 1, 10, 20


def process(pid: int, parent: int, megabytes: int, threads: int = 1) -> Process:
    return Process(pid, parent, start=pid, alive=True, threads=threads, resident=megabytes * MB)


@dataclass
class Table:
    """Answers what it is told; a kill removes."""

    processes: list[Process]
    pss: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    files: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])
    killed: list[int] = field(default_factory=list[int])
    asked: int = 0

    def descendants(self, root: int) -> list[Process]:
        return list(self.processes)

    def proportional(self, of: Process) -> tuple[int, int]:
        self.asked += 1
        return self.pss.get(of.pid, (of.resident, 0))

    def open_files(self, pid: int, device: int) -> tuple[int, dict[int, int]]:
        return 3, self.files.get(pid, {})

    def kill(self, target: Process) -> None:
        self.killed.append(target.pid)
        self.processes.remove(target)


def watch(table: Table, processes: int = 512) -> tuple[Watchdog, list[tuple[int, Breach]]]:
    told: list[tuple[int, Breach]] = []
    watchdog = Watchdog(table, GUEST, 100 * MB, processes, lambda pid, breach: told.append((pid, breach)))  # type: ignore[arg-type]
    return watchdog, told


def test_within_the_budget_nothing_dear_is_asked() -> None:
    table = Table([process(SHELL, GUEST, 5), process(11, SHELL, 90)])
    watchdog, told = watch(table)
    watchdog.look()
    assert (table.killed, told, table.asked) == ([], [], 0)


def test_the_largest_dies_and_its_ancestor_is_told() -> None:
    table = Table([process(SHELL, GUEST, 5), process(11, SHELL, 1), process(12, 11, 80), process(TOOL, GUEST, 40)])
    watchdog, told = watch(table)
    watchdog.look()
    assert (table.killed, told) == ([12], [(SHELL, Breach.MEMORY_SANDBOX)])


def test_as_many_die_as_must() -> None:
    table = Table([process(SHELL, GUEST, 5), *(process(pid, SHELL, 60) for pid in range(11, 16))])
    watchdog, _ = watch(table)
    watchdog.look()
    assert len(table.killed) == 4 and SHELL not in table.killed


def test_shared_pages_are_not_held_against_it() -> None:
    family = [process(pid, SHELL, 60) for pid in range(11, 16)]
    table = Table([process(SHELL, GUEST, 5), *family], pss={one.pid: (13 * MB, 0) for one in family})
    watchdog, told = watch(table)
    watchdog.look()
    assert (table.killed, told) == ([], [])


def test_memory_files_count_once_and_not_again_when_mapped() -> None:
    files = {11: {7: 90 * MB}, 12: {7: 90 * MB}}
    table = Table([process(SHELL, GUEST, 5), process(11, SHELL, 90), process(12, SHELL, 2)], files=files)
    table.pss = {11: (90 * MB, 90 * MB)}
    watchdog, _ = watch(table)
    watchdog.look()
    assert table.killed == []


def test_unmapped_memory_files_are_their_holders() -> None:
    table = Table([process(SHELL, GUEST, 5), process(11, SHELL, 2)], files={11: {7: 60 * MB, 8: 60 * MB}})
    watchdog, told = watch(table)
    watchdog.look()
    assert (table.killed, told) == ([11], [(SHELL, Breach.MEMORY_SANDBOX)])


def test_the_process_limit_is_told_to_who_forks() -> None:
    table = Table([process(SHELL, GUEST, 1), process(TOOL, GUEST, 1), *(process(n, TOOL, 0) for n in range(30, 66))])
    watchdog, told = watch(table, processes=40)
    watchdog.look()
    assert (table.killed, told) == ([], [(TOOL, Breach.PROCESSES)])


def test_an_idle_sandbox_is_not_looked_at() -> None:
    watchdog, _ = watch(Table([]))
    watchdog.look()
    assert watchdog.wait_ms(busy=False) is None
    assert watchdog.wait_ms(busy=True) is not None


def test_growth_is_looked_at_more_often() -> None:
    table = Table([process(SHELL, GUEST, 5)])
    watchdog, _ = watch(table)
    watchdog.look()
    watchdog.look()
    resting = watchdog.wait_ms(busy=True)
    table.processes[0] = replace(table.processes[0], resident=40 * MB)
    watchdog.look()
    growing = watchdog.wait_ms(busy=True)
    assert resting is not None and growing is not None and growing < resting / 4


def test_orphans_are_looked_at_although_nobody_asked_for_them() -> None:
    watchdog, _ = watch(Table([process(11, GUEST, 5)]))
    watchdog.look()
    assert watchdog.wait_ms(busy=False) is not None


def test_a_real_table_sees_memory_files() -> None:
    fd = os.memfd_create("seen")
    os.write(fd, bytes(MB))
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        count, files = ProcessTable(proc).open_files(os.getpid(), os.fstat(fd).st_dev)
        assert count >= 3 and files[os.fstat(fd).st_ino] == MB
    finally:
        os.close(fd)
        os.close(proc)


def test_a_process_that_ends_while_its_descriptors_are_listed_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    table = ProcessTable(proc)

    def ended(path: object) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr("prorl_gym.sandbox.guest.tree.os.listdir", ended)
    assert table.open_files(os.getpid(), 0) == (0, {})
    assert table.nameless_files(os.getpid(), ()) == {}
    os.close(proc)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="the host has no /usr/bin/python3")
async def test_memory_without_a_mapping_is_found(backend: NamespaceBackend) -> None:
    limits = SandboxLimits(total_memory=100 * MB)
    hoard = "import os, time\nfor n in range(300):\n    os.write(os.memfd_create('m'), bytes(1 << 20))\ntime.sleep(60)"
    box = await backend.start(SandboxSpec(limits=limits))
    try:
        result = await box.exec(["python3", "-c", hoard], timeout=30)
    finally:
        await box.close()
    assert result.breach is Breach.MEMORY_SANDBOX and result.exit_code == 137, result


ORPHAN = """
import os
if os.fork():
    os._exit(0)
os.setsid()
open("/tmp/orphan", "w").write(str(os.getpid()))
held = bytearray(b"x") * (400 * MB)
os.read(os.pipe()[0], 1)
"""


@pytest.mark.asyncio(loop_scope="module")
async def test_memory_of_an_orphan_counts(backend: NamespaceBackend) -> None:
    box = await backend.start(SandboxSpec(limits=SandboxLimits(total_memory=256 * MB)))
    try:
        await box.exec(["/usr/bin/python3", "-c", ORPHAN], timeout=10)
        ended = "until [ -s /tmp/orphan ] && ! kill -0 $(cat /tmp/orphan); do sleep 0.05; done"
        assert (await box.exec(["/bin/bash", "-c", ended], timeout=20)).exit_code == 0
    finally:
        await box.close()
