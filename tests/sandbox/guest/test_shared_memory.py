"""What the guest knows about shared memory, over an invented process table; real programs: ``test_hidden_memory``."""

import os
from dataclasses import dataclass, field

import pytest

from prorl_gym.sandbox.guest.process_table import Process
from prorl_gym.sandbox.guest.shared_memory import SharedMemoryAccount

MB = 1 << 20
GUEST = 1


def shm_device() -> str:
    file = os.memfd_create("device")
    device = os.fstat(file).st_dev
    os.close(file)
    return f"{os.major(device):02x}:{os.minor(device):02x}"


@dataclass
class Table:
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
def table() -> Table:
    return Table({10: {}, 11: {}})


@pytest.fixture
def shared(table: Table) -> SharedMemoryAccount:
    return SharedMemoryAccount(table, GUEST, 100 * MB, 64 * MB)  # type: ignore[arg-type]


def admit(shared: SharedMemoryAccount, thread: int, megabytes: int) -> bool:
    return shared.may_map(thread, megabytes * MB)


def held(shared: SharedMemoryAccount, table: Table) -> dict[int, int]:
    return {pid: size // MB for pid, size in shared.bytes_by_process(table.descendants(GUEST)).items()}


def test_an_object_counts_whole_while_one_page_is_mapped(table: Table, shared: SharedMemoryAccount) -> None:
    assert admit(shared, 10, 60)
    table.mapped[10] = {7: 4096}
    assert held(shared, table) == {10: 60} and shared.max_bytes == 60 * MB
    table.mapped = {11: {7: 4096}}
    assert held(shared, table) == {11: 60}
    table.mapped = {11: {}}
    assert held(shared, table) == {} and shared.max_bytes == 0


def test_what_does_not_fit_is_refused_until_there_is_room(table: Table, shared: SharedMemoryAccount) -> None:
    assert admit(shared, 10, 60)
    table.mapped[10] = {7: 60 * MB}
    assert not admit(shared, 10, 50)
    table.mapped[10] = {}
    assert admit(shared, 10, 50)


def test_what_may_be_either_of_two_counts_as_the_larger(table: Table, shared: SharedMemoryAccount) -> None:
    assert admit(shared, 10, 60) and admit(shared, 11, 20)
    table.mapped[10] = {7: 4096}
    assert held(shared, table) == {10: 60}
    assert shared.max_bytes == (60 + 60 + 20) * MB


def test_a_creation_is_forgotten_when_its_thread_has_ended_without_a_trace(
    table: Table, shared: SharedMemoryAccount
) -> None:
    assert admit(shared, 10, 60)
    del table.mapped[10]
    assert held(shared, table) == {} and shared.max_bytes == 0


def test_nothing_is_forgotten_while_a_process_cannot_be_read(table: Table, shared: SharedMemoryAccount) -> None:
    assert admit(shared, 10, 60)
    table.mapped[10] = {7: 60 * MB}
    assert held(shared, table) == {10: 60}
    table.mapped = {10: None, 11: {}}
    held(shared, table)
    assert shared.max_bytes == 60 * MB


def test_an_object_that_was_lost_sight_of_counts_as_the_longest_ever_made(
    table: Table, shared: SharedMemoryAccount
) -> None:
    assert admit(shared, 10, 60)
    table.mapped[10] = {7: 4096}
    held(shared, table)
    hidden, table.mapped[10] = table.mapped[10], {}
    held(shared, table)
    table.mapped[11] = hidden
    assert held(shared, table) == {11: 60}
