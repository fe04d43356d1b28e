"""System V IPC on every backend: bounded, or not there at all."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_support import LINUX, closing, plain_backend, python_output, scratch_of_nobody

from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner import mounts

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEGMENT = 4 << 20

FILL = f"""
segments = []
while len(segments) < 100:
    segments.append(c.shmget(0, {SEGMENT}, 0o1600))
    if segments[-1] == -1:
        break
    c.shmat.restype = ctypes.c_void_p
    address = c.shmat(segments[-1], None, 0)
    ctypes.memset(address, 1, {SEGMENT})  # now it is memory, and stays when no process has it attached
    c.shmdt(ctypes.c_void_p(address))
print(len(segments) - 1, errno.errorcode[error()])
"""
OBJECTS = """
sets = 0
while sets < 1000 and c.semget(0, 250, 0o1600) != -1: sets += 1
queues = 0
while queues < 1000 and c.msgget(0, 0o1600) != -1: queues += 1
print(sets, queues)
"""
UNBOUND = """
for name in ("shmall", "shmmax", "shmmni", "sem", "msgmni"):
    try:
        open(f"/proc/sys/kernel/{name}", "w").write("100000000")
        print(name)
    except OSError as failure:
        assert failure.errno == errno.EROFS, failure
"""

needs_bounds = pytest.mark.skipif(LINUX < (5, 19), reason="this kernel keeps the settings for the host's root")


@pytest_asyncio.fixture(loop_scope="module")
async def fresh(backend: NamespaceBackend) -> AsyncIterator[RunningSandbox]:
    """A sandbox with shared memory for four segments, and no more."""
    async with closing(await backend.start_sandbox(SandboxSpec(limits=SandboxLimits(shm_size=4 * SEGMENT)))) as box:
        yield box


@needs_bounds
async def test_shared_memory_without_a_process_is_bounded(fresh: RunningSandbox) -> None:
    assert await python_output(fresh, FILL) == "4 ENOSPC"


@needs_bounds
async def test_what_one_command_leaves_counts_for_the_next(fresh: RunningSandbox) -> None:
    await python_output(fresh, FILL)
    assert await python_output(fresh, FILL) == "0 ENOSPC"


@needs_bounds
async def test_semaphores_and_queues_are_bounded(fresh: RunningSandbox) -> None:
    assert await python_output(fresh, OBJECTS) == "128 64"


async def test_bounds_cannot_be_raised(fresh: RunningSandbox) -> None:
    assert await python_output(fresh, UNBOUND) == ""


@pytest_asyncio.fixture(loop_scope="module")
async def unbounded(ground: Path) -> AsyncIterator[RunningSandbox]:
    """A sandbox in a namespace in which its uid has no say."""
    async with closing(plain_backend(scratch_of_nobody(ground))) as backend:
        yield await backend.start_sandbox(SandboxSpec())


@pytest.mark.slow
@pytest.mark.apptainer
async def test_without_bounds_there_is_none_of_it(unbounded: RunningSandbox) -> None:
    script = """
for call in (c.shmget, c.semget, c.msgget):
    print(call(0, 1, 0o1600), errno.errorcode[error()])
"""
    assert await python_output(unbounded, script) == "\n".join(["-1 ENOSYS"] * 3)


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    (tmp_path / "kernel").mkdir()
    for name in ("shmmax", "shmall", "sem", "msgmni"):
        (tmp_path / "kernel" / name).touch()
    return tmp_path / "kernel"


async def test_shared_memory_is_bounded_in_pages(settings: Path) -> None:
    assert mounts.limit_kernel_memory(64 << 20, f"{settings.parent}")
    assert (settings / "shmmax").read_text() == f"{64 << 20}"
    assert (settings / "shmall").read_text() == f"{(64 << 20) // os.sysconf('SC_PAGESIZE')}"


@pytest.mark.parametrize("name", ["shmmax", "shmall", "sem", "msgmni"])
async def test_one_bound_that_cannot_be_set_is_none_at_all(settings: Path, name: str) -> None:
    (settings / name).unlink()
    assert not mounts.limit_kernel_memory(64 << 20, f"{settings.parent}")
