"""Memory that no process shows: on every backend, it ends what holds it as a breach of a limit, or cannot be had."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_support import LINUX, closing, needs_python, on_x86_64

from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import ExecResult, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_python]

MB = 1 << 20
MEMORY, SHM = 128 * MB, 32 * MB
asks = pytest.mark.skipif(LINUX < (5, 14), reason="this kernel cannot ask the guest about shared memory")

MEMORY_PRELUDE = """
import ctypes, fcntl, mmap, os, socket, struct, sys, threading, time
c = ctypes.CDLL(None, use_errno=True)
c.mmap.restype = ctypes.c_void_p
c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
MB = 1 << 20
def share(size, kind=0x21, fd=-1):
    address = c.mmap(None, size, 3, kind, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        sys.exit(os.strerror(ctypes.get_errno()))
    return address
def touch(address, size):
    for at in range(0, size, 4096):
        ctypes.memset(address + at, 1, 1)
def unmap(address, size):
    assert c.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size)) == 0
def end_as(child):
    os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
def advise(address, size, advice):
    assert c.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice) == 0
"""
HELD = "\nprint('held', flush=True)\ntime.sleep(60)\n"

WAYS = {
    "a shared mapping, all but the first page unmapped": """
for _ in range(12):
    address = share(32 * MB)
    ctypes.memset(address, 1, 32 * MB)
    unmap(address + 4096, 32 * MB - 4096)
""",
    "a shared mapping, all but the last page unmapped, in a child that goes on alone": """
for _ in range(12):
    address = share(32 * MB)
    ctypes.memset(address, 1, 32 * MB)
    unmap(address, 32 * MB - 4096)
    child = os.fork()
    if child:
        unmap(address + 32 * MB - 4096, 4096)
        end_as(child)
""",
    "a shared mapping whose pages were given back": """
for _ in range(12):
    address = share(32 * MB)
    ctypes.memset(address, 1, 32 * MB)
    advise(address, 32 * MB, 4)
""",
    "many small shared mappings, by several threads": """
def make():
    for _ in range(50):
        address = share(2 * MB)
        ctypes.memset(address, 1, 2 * MB)
        unmap(address + 4096, 2 * MB - 4096)
threads = [threading.Thread(target=make) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
""",
    "a memory file, mapped by one page": """
keep = []
for _ in range(12):
    file = os.memfd_create("m")
    os.write(file, bytes(32 * MB))
    keep.append(mmap.mmap(file, 4096))
    os.close(file)
""",
    "a memory file in flight": """
near, far = socket.socketpair()
for _ in range(12):
    file = os.memfd_create("m")
    os.write(file, bytes(32 * MB))
    socket.send_fds(near, [b"x"], [file])
    os.close(file)
""",
    "a memory file that is open": """
for _ in range(12):
    os.write(os.memfd_create("m"), bytes(32 * MB))
""",
    "the buffers of sockets": """
keep = []
for _ in range(900):
    keep.append(socket.socketpair())
    for end in keep[-1]:
        end.setblocking(False)
        try:
            while True:
                end.send(bytes(MB))
        except BlockingIOError:
            pass
""",
    "page tables": """
size = 100 << 30
address = share(size, 0x4022)
for at in range(0, size, 2 * MB):
    ctypes.string_at(address + at, 1)  # the page of zeros: it is not counted as resident
""",
    "mappings without memory": """
for _ in range(12):
    if os.fork() == 0:
        address = share(400 * MB, 0x4022)
        for at in range(0, 60000 * 4096, 8192):
            c.mprotect(ctypes.c_void_p(address + at), ctypes.c_size_t(4096), 0)
        time.sleep(60)
end_as(-1)
""",
    "pipes": """
for _ in range(16):
    if os.fork() == 0:
        for _ in range(2000):
            end = os.pipe()[1]
            os.set_blocking(end, False)
            try:
                while True:
                    os.write(end, bytes(4096))
            except BlockingIOError:
                pass
        time.sleep(60)
end_as(-1)
""",
    "locks on files": """
files = [os.open(f"/tmp/{number}", os.O_RDWR | os.O_CREAT) for number in range(250)]
for at in range(0, 200, 2):
    for file in files:
        fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, at, 1, 0))
""",
    "locks of processes that have ended": """
files = [os.open(f"/tmp/{number}", os.O_RDWR | os.O_CREAT) for number in range(250)]
for start in range(0, 200, 50):
    child = c.syscall(56, 0x411, 0, 0, 0, 0)  # clone(CLONE_FILES): its locks stay with the shared descriptors
    if child == 0:
        for at in range(start, start + 50, 2):
            for file in files:
                fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, at, 1, 0))
        os._exit(0)
    os.waitpid(child, 0)
""",
    "the memory of a thread whose process has lost its first one": """
keep = []
def fill():
    time.sleep(0.2)
    for _ in range(12):
        keep.append(bytearray(32 * MB))
    time.sleep(60)
threading.Thread(target=fill).start()
c.pthread_exit(None)
""",
}


@pytest_asyncio.fixture(loop_scope="module")
async def small(backend: NamespaceBackend) -> AsyncIterator[RunningSandbox]:
    """A sandbox with little memory."""
    limits = SandboxLimits(memory=MEMORY, total_memory=MEMORY, shm_size=SHM)
    async with closing(await backend.start_sandbox(SandboxSpec(limits=limits))) as box:
        yield box


async def run(box: RunningSandbox, script: str, seconds: float = 30) -> ExecResult:
    return await box.exec(["/usr/bin/python3", "-c", MEMORY_PRELUDE + script], timeout=seconds)


def shmem() -> int:
    """Return the bytes of shared memory on this machine."""
    found = re.search(r"^Shmem:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


@asks
@pytest.mark.parametrize("way", WAYS)
async def test_it_is_found_or_refused(small: RunningSandbox, way: str) -> None:
    result = await run(small, WAYS[way] + HELD)
    assert result.breach in (Breach.MEMORY_SANDBOX, Breach.MEMORY_PROCESS, Breach.DISK), result
    assert result.exit_code != 0 and not result.timed_out, result
    assert await small.is_alive()


@asks
async def test_what_is_hidden_is_freed(small: RunningSandbox) -> None:
    before = shmem()
    await run(small, WAYS["a shared mapping, all but the first page unmapped"] + HELD)
    async with asyncio.timeout(20):  # other tests on this machine have some for a while
        while shmem() - before >= MEMORY // 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    again = await run(small, "address = share(64 * MB)\nctypes.memset(address, 1, 64 * MB)\nprint('fits')")
    assert again.stdout == b"fits\n", again


@asks
async def test_shared_memory_that_cannot_fit_is_refused(small: RunningSandbox) -> None:
    result = await run(small, "share(100 * MB)\nshare(50 * MB)")
    assert result.exit_code == 1 and b"Cannot allocate memory" in result.stderr, result


@asks
async def test_shared_memory_that_is_let_go_of_is_forgotten(small: RunningSandbox) -> None:
    script = """
for _ in range(16):
    shared = mmap.mmap(-1, 50 * MB)
    shared[:] = bytes(50 * MB)
    shared.close()
print("done")
"""
    result = await run(small, script)
    assert result.stdout == b"done\n", result


@asks
async def test_memory_files_work(small: RunningSandbox) -> None:
    script = """
file = os.memfd_create("m", os.MFD_CLOEXEC)
os.ftruncate(file, MB)
shared = mmap.mmap(file, MB)
shared[:5] = b"hello"
print(os.pread(file, 5, 0), fcntl.fcntl(file, fcntl.F_GETFD), fcntl.fcntl(os.memfd_create("n", 0), fcntl.F_GETFD))
code = mmap.mmap(file, MB, prot=mmap.PROT_READ | mmap.PROT_EXEC)
print(code[:5])
"""
    result = await run(small, script)
    assert result.stdout.splitlines() == [b"b'hello' 1 0", b"b'hello'"], result


@pytest.mark.default
@on_x86_64
async def test_calls_that_hide_memory_are_refused(small: RunningSandbox) -> None:
    script = """
import errno
def name(result):
    return errno.errorcode[ctypes.get_errno()] if result < 0 else result
print(name(c.syscall(447, 0)))
print(name(c.syscall(278, os.pipe()[1], struct.pack("PP", id(b""), 1), 1, 0)))
for command in (37, 38):
    try:
        fcntl.fcntl(os.open("/tmp/file", os.O_RDWR | os.O_CREAT), command, struct.pack("hhqqi4x", 1, 0, 0, 1, 0))
    except OSError as error:
        print(errno.errorcode[error.errno])
try:
    mmap.mmap(os.open("/dev/zero", os.O_RDWR), 4096)
except OSError as error:
    print(errno.errorcode[error.errno], os.read(os.open("/dev/zero", os.O_RDONLY), 2))
"""
    result = await run(small, script)
    expected = ["ENOSYS", "ENOSYS", "EINVAL", "EINVAL", "ENODEV b'\\x00\\x00'"]
    assert result.stdout.decode().splitlines() == expected, result


async def test_what_goes_on_without_its_first_thread_ends_with_the_timeout(small: RunningSandbox) -> None:
    script = """
def go_on():
    while True:
        open("/tmp/beat", "w").write(str(time.monotonic()))
        time.sleep(0.02)
threading.Thread(target=go_on).start()
c.pthread_exit(None)
"""
    assert (await run(small, script, seconds=1)).timed_out
    beats = [await small.read_file("/tmp/beat") for _ in range(2)]
    later = await run(small, "time.sleep(0.3)\nprint(open('/tmp/beat').read())")
    assert later.stdout.strip() == beats[-1], later
