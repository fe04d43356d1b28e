"""Decisions of the watchdog and its account of shared memory, over invented process tables."""

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
from sandbox_support import closing

from prorl_gym.sandbox.guest.process_table import Process
from prorl_gym.sandbox.guest.seccomp_notifications import SharedMemoryAccount
from prorl_gym.sandbox.guest.watchdog import Watchdog
from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend

MB = 1 << 20
GUEST, SHELL, TOOL = 1, 10, 20


def process(pid: int, parent: int, megabytes: int, threads: int = 1) -> Process:
    return Process(pid, parent, start_ticks=pid, is_alive=True, threads=threads, resident=megabytes * MB)


@dataclass
class Table:
    """Answers as scripted; a kill removes."""

    processes: list[Process]
    pss: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    owned: dict[int, int] = field(default_factory=dict[int, int])
    overheads: dict[int, int] = field(default_factory=dict[int, int])
    open: dict[int, int] = field(default_factory=dict[int, int])
    locked: dict[int, int] = field(default_factory=dict[int, int])
    killed: list[int] = field(default_factory=list[int])
    lingering: set[int] = field(default_factory=set[int])
    asked: int = 0

    def descendants(self, root: int) -> list[Process]:
        return list(self.processes)

    def read_pss(self, of: Process) -> tuple[int, int]:
        self.asked += 1
        return self.pss.get(of.pid, (of.resident, 0))

    def read_unreclaimable(self, of: Process) -> int:
        self.asked += 1
        return self.owned.get(of.pid, of.resident)

    def estimate_max_overhead(self, of: Process) -> int:
        return self.overheads.get(of.pid, 0)

    def count_descriptors(self, of: Process) -> int:
        return self.open.get(of.pid, 0)

    def count_locks(self, of: Process, limit: int) -> int:
        return self.locked.get(of.pid, 0)

    def kill(self, target: Process) -> None:
        self.killed.append(target.pid)
        if target.pid not in self.lingering:
            self.processes.remove(target)


@dataclass
class Shared:
    """Shared memory objects by the pid of a process that has them."""

    objects: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def max_bytes(self) -> int:
        return sum(self.objects.values())

    def bytes_by_process(self, processes: list[Process]) -> dict[int, int]:
        return dict(self.objects)


def watch(
    table: Table,
    *,
    memory: int = 100 * MB,
    processes: int = 512,
    process_memory: int = 100 * MB,
    shared: Shared | None = None,
    sockets: int = 0,
    measure_seconds: float = 1.0,
) -> tuple[Watchdog, list[tuple[int, Breach]]]:
    breaches: list[tuple[int, Breach]] = []
    watchdog = Watchdog(
        table,  # type: ignore[arg-type]
        GUEST,
        SandboxLimits(total_memory=memory, memory=process_memory, processes=processes),
        shared_memory=shared,  # type: ignore[arg-type]
        socket_memory=lambda: sockets,
        on_breach=lambda pid, breach: breaches.append((pid, breach)),
        measure_seconds=measure_seconds,
    )
    return watchdog, breaches


def checked(table: Table, **options: Any) -> tuple[list[int], list[tuple[int, Breach]]]:
    """Return what one check of a table has killed and reported."""
    watchdog, breaches = watch(table, **options)
    watchdog.check()
    return table.killed, breaches


def test_within_the_budget_nothing_dear_is_asked() -> None:
    table = Table([process(SHELL, GUEST, 5), process(11, SHELL, 90)])
    assert (*checked(table), table.asked) == ([], [], 0)


def test_the_largest_dies_and_its_ancestor_is_notified() -> None:
    table = Table([process(SHELL, GUEST, 5), process(11, SHELL, 1), process(12, 11, 80), process(TOOL, GUEST, 40)])
    assert checked(table) == ([12], [(SHELL, Breach.MEMORY_SANDBOX)])


def test_as_many_die_as_must() -> None:
    table = Table([process(SHELL, GUEST, 5), *(process(pid, SHELL, 60) for pid in range(11, 16))])
    checked(table)
    assert len(table.killed) == 4 and SHELL not in table.killed


def test_shared_pages_are_not_held_against_it() -> None:
    family = [process(pid, SHELL, 60) for pid in range(11, 16)]
    table = Table([process(SHELL, GUEST, 5), *family], pss={one.pid: (13 * MB, 0) for one in family})
    assert checked(table) == ([], [])


def test_shared_memory_counts_once_and_not_again_when_mapped() -> None:
    table = Table([process(SHELL, GUEST, 5), process(11, SHELL, 90), process(12, SHELL, 2)])
    table.pss = {11: (90 * MB, 90 * MB)}
    assert checked(table, shared=Shared({11: 90 * MB}))[0] == []


def test_unmapped_shared_memory_is_its_holders() -> None:
    table = Table([process(SHELL, GUEST, 5), process(11, SHELL, 2)])
    assert checked(table, shared=Shared({11: 120 * MB})) == ([11], [(SHELL, Breach.MEMORY_SANDBOX)])


def test_the_memory_of_sockets_is_theirs_who_have_the_descriptors() -> None:
    table = Table([process(SHELL, GUEST, 5), process(11, SHELL, 60), process(12, SHELL, 2)], open={SHELL: 3, 12: 800})
    assert checked(table, sockets=80 * MB) == ([12], [(SHELL, Breach.MEMORY_SANDBOX)])


def test_memory_that_nothing_is_known_to_hold_ends_everything() -> None:
    table = Table([process(SHELL, GUEST, 5), process(11, SHELL, 2)])
    checked(table, sockets=120 * MB)
    assert table.processes == []


def test_one_process_beyond_its_own_memory_dies_alone() -> None:
    table = Table([process(SHELL, GUEST, 5), process(11, SHELL, 50), process(TOOL, GUEST, 35)])
    assert checked(table, process_memory=40 * MB) == ([11], [(SHELL, Breach.MEMORY_PROCESS)])


def test_process_that_outgrows_both_limits_between_two_reads_is_named_for_its_own() -> None:
    class Growing(Table):
        def read_pss(self, of: Process) -> tuple[int, int]:
            self.owned[of.pid] = 120 * MB
            return 120 * MB, 0

    table = Growing([process(11, GUEST, 85)], overheads={11: 30 * MB}, owned={11: 90 * MB})
    assert checked(table) == ([11], [(11, Breach.MEMORY_PROCESS)])


def test_who_holds_most_of_too_many_locks_dies() -> None:
    table = Table([process(SHELL, GUEST, 5), process(11, SHELL, 1), process(12, SHELL, 1)])
    table.locked = {11: 12_000, 12: 5_000}
    assert checked(table) == ([11], [(SHELL, Breach.MEMORY_SANDBOX)])


def test_locks_of_many_descriptors_are_counted_in_several_looks() -> None:
    table = Table([process(pid, GUEST, 1) for pid in (11, 12, 13)], open=dict.fromkeys((11, 12, 13), 200))
    table.locked = dict.fromkeys((11, 12, 13), 6_000)
    watchdog, _ = watch(table)
    watchdog.check()
    assert table.killed == []
    watchdog.check()
    assert len(table.killed) == 1


def test_what_is_slow_to_read_counts_with_its_bound() -> None:
    slow = [process(pid, SHELL, 1) for pid in (11, 12, 13)]
    table = Table([process(SHELL, GUEST, 5), *slow], overheads={one.pid: 60 * MB for one in slow})
    assert checked(table) == ([], [])
    checked(table, measure_seconds=-1.0)
    assert len(table.killed) == 2 and SHELL not in table.killed


def test_nothing_else_dies_while_what_was_killed_gives_its_memory_back() -> None:
    table = Table([process(SHELL, GUEST, 30), process(11, SHELL, 90)], lingering={11})
    watchdog, breaches = watch(table)
    watchdog.check()
    watchdog.check()
    assert (table.killed, breaches) == ([11], [(SHELL, Breach.MEMORY_SANDBOX)])


def test_pages_of_files_and_reservations_are_no_memory() -> None:
    table = Table([process(SHELL, GUEST, 5), process(11, SHELL, 50)], owned={11: 30 * MB}, overheads={11: 400 * MB})
    assert checked(table, process_memory=40 * MB) == ([], [])


def test_a_narrower_bound_holds_below_the_child_it_was_given_to() -> None:
    table = Table([process(SHELL, GUEST, 30), process(TOOL, GUEST, 1), process(21, TOOL, 30)])
    watchdog, breaches = watch(table)
    watchdog.limit_child_memory(TOOL, 20 * MB)
    watchdog.check()
    assert (table.killed, breaches) == ([21], [(TOOL, Breach.MEMORY_PROCESS)])
    table.processes.append(process(22, TOOL, 30))
    watchdog.remove_child(TOOL)
    watchdog.check()
    assert table.killed == [21]


def test_the_process_limit_is_reported_to_the_forking_process() -> None:
    table = Table([process(SHELL, GUEST, 1), process(TOOL, GUEST, 1), *(process(n, TOOL, 0) for n in range(30, 66))])
    assert checked(table, processes=40) == ([], [(TOOL, Breach.PROCESSES)])


def test_an_idle_sandbox_is_not_looked_at() -> None:
    watchdog, _ = watch(Table([]))
    watchdog.check()
    assert watchdog.next_check_ms(has_children=False) is None
    assert watchdog.next_check_ms(has_children=True) is not None


def test_the_less_room_the_sooner_the_next_look() -> None:
    def wait(megabytes: int) -> int:
        watchdog, _ = watch(Table([process(SHELL, GUEST, megabytes)]), memory=8 << 30, process_memory=8 << 30)
        watchdog.check()
        found = watchdog.next_check_ms(has_children=True)
        assert found is not None
        return found

    assert wait(5) > 900 and 300 < wait(6 << 10) < 600 and wait(8000) <= 100


def test_orphans_are_watched_unasked() -> None:
    watchdog, _ = watch(Table([process(11, GUEST, 5)]))
    watchdog.check()
    assert watchdog.next_check_ms(has_children=False) is not None


ORPHAN = """
import os
if os.fork():
    os._exit(0)
os.setsid()
open("/tmp/orphan", "w").write(str(os.getpid()))
held = bytearray(b"x") * (400 << 20)
os.read(os.pipe()[0], 1)
"""


@pytest.mark.asyncio(loop_scope="module")
async def test_memory_of_an_orphan_counts(backend: NamespaceBackend) -> None:
    async with closing(await backend.start_sandbox(SandboxSpec(limits=SandboxLimits(total_memory=256 * MB)))) as box:
        await box.exec(["/usr/bin/python3", "-c", ORPHAN], timeout=10)
        ended = "until [ -s /tmp/orphan ] && ! kill -0 $(cat /tmp/orphan); do sleep 0.05; done"
        assert (await box.exec(["/bin/bash", "-c", ended], timeout=20)).exit_code == 0


def shm_device() -> str:
    file = os.memfd_create("device")
    device = os.fstat(file).st_dev
    os.close(file)
    return f"{os.major(device):02x}:{os.minor(device):02x}"


@dataclass
class MappedTable:
    """Processes with mappings of shared objects: pid -> {inode: mapped bytes}. ``None``: may not be read."""

    mapped: dict[int, dict[int, int] | None] = field(default_factory=dict[int, dict[int, int] | None])
    threads: set[int] = field(default_factory=set[int])

    def descendants(self, root: int) -> list[Process]:
        return [Process(pid, root, pid, True, 1, 0) for pid in self.mapped]

    def exists(self, thread: int) -> bool:
        return thread in self.mapped or thread in self.threads

    def read_file(self, process: Process, name: str) -> bytes | None:
        objects = self.mapped[process.pid]
        if objects is None:
            return None
        device = shm_device()
        lines = [
            f"7f0000000000-{0x7F0000000000 + size:x} rw-s 00000000 {device} {inode}     /dev/zero (deleted)\n"
            for inode, size in objects.items()
        ]
        return ("55d0-55e0 r-xp 00000000 fe:00 7 /bin/sh\n" + "".join(lines)).encode()


@pytest.fixture
def table() -> MappedTable:
    return MappedTable({10: {}, 11: {}})


@pytest.fixture
def shared(table: MappedTable) -> SharedMemoryAccount:
    return SharedMemoryAccount(table, GUEST, 100 * MB, 64 * MB)  # type: ignore[arg-type]


def admit(shared: SharedMemoryAccount, thread: int, megabytes: int) -> bool:
    return shared.may_map(thread, megabytes * MB)


def held(shared: SharedMemoryAccount, table: MappedTable) -> dict[int, int]:
    return {pid: size // MB for pid, size in shared.bytes_by_process(table.descendants(GUEST)).items()}


def test_an_object_counts_whole_while_one_page_is_mapped(table: MappedTable, shared: SharedMemoryAccount) -> None:
    assert admit(shared, 10, 60)
    table.mapped[10] = {7: 4096}
    assert held(shared, table) == {10: 60} and shared.max_bytes == 60 * MB
    table.mapped = {11: {7: 4096}}
    assert held(shared, table) == {11: 60}
    table.mapped = {11: {}}
    assert held(shared, table) == {} and shared.max_bytes == 0


def test_what_does_not_fit_is_refused_until_there_is_room(table: MappedTable, shared: SharedMemoryAccount) -> None:
    assert admit(shared, 10, 60)
    table.mapped[10] = {7: 60 * MB}
    assert not admit(shared, 10, 50)
    table.mapped[10] = {}
    assert admit(shared, 10, 50)


def test_what_may_be_either_of_two_counts_as_the_larger(table: MappedTable, shared: SharedMemoryAccount) -> None:
    assert admit(shared, 10, 60) and admit(shared, 11, 20)
    table.mapped[10] = {7: 4096}
    assert held(shared, table) == {10: 60}
    assert shared.max_bytes == (60 + 60 + 20) * MB


def test_a_creation_is_forgotten_when_its_thread_has_ended_without_a_trace(
    table: MappedTable, shared: SharedMemoryAccount
) -> None:
    assert admit(shared, 10, 60)
    del table.mapped[10]
    assert held(shared, table) == {} and shared.max_bytes == 0


def test_nothing_is_forgotten_while_a_process_cannot_be_read(table: MappedTable, shared: SharedMemoryAccount) -> None:
    assert admit(shared, 10, 60)
    table.mapped[10] = {7: 60 * MB}
    assert held(shared, table) == {10: 60}
    table.mapped = {10: None, 11: {}}
    held(shared, table)
    assert shared.max_bytes == 60 * MB


def test_an_object_that_was_lost_sight_of_counts_as_the_longest_ever_made(
    table: MappedTable, shared: SharedMemoryAccount
) -> None:
    assert admit(shared, 10, 60)
    table.mapped[10] = {7: 4096}
    held(shared, table)
    hidden, table.mapped[10] = table.mapped[10], {}
    held(shared, table)
    table.mapped[11] = hidden
    assert held(shared, table) == {11: 60}
