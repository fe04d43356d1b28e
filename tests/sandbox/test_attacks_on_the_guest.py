"""A payload that turns on what serves its own sandbox: it breaks nothing, or pays for it."""

import asyncio

import pytest
from sandbox_support import PRELUDE, on_x86_64, python_output

from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]


@pytest.mark.parametrize("limit", ["NOFILE", "NPROC", "AS", "CPU"])
async def test_prlimit_of_pid_1_is_refused(box: RunningSandbox, limit: str) -> None:
    script = f"""
try:
    resource.prlimit(1, resource.RLIMIT_{limit}, (0, 0))
except OSError as failure:
    print(errno.errorcode[failure.errno])
"""
    assert await python_output(box, script) == "EPERM"
    assert (await box.exec(["true"], timeout=10)).exit_code == 0


async def test_prlimit_of_the_next_child_wins_no_race(box: RunningSandbox) -> None:
    race = """
if os.fork():
    os._exit(0)
os.setsid()
end = time.monotonic() + 2
while time.monotonic() < end:
    own = int(os.readlink("/proc/thread-self").split("/")[0])
    for pid in range(own + 1, own + 200):
        try:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))
        except OSError:
            pass
"""
    await python_output(box, race)
    for _ in range(40):
        assert (await box.exec(["true"], timeout=10)).exit_code == 0


async def test_limits_of_the_own_process_can_still_be_set_and_others_read(box: RunningSandbox) -> None:
    script = """
resource.prlimit(0, resource.RLIMIT_NOFILE, (77, 77))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(resource.prlimit(os.getpid(), resource.RLIMIT_CPU)))
"""
    assert await python_output(box, script) == "77 2"
    assert (await box.exec(["/bin/bash", "-c", "ulimit -n 50; ulimit -n"], timeout=10)).stdout == b"50\n"


@on_x86_64
@pytest.mark.parametrize(
    "call",
    [
        pytest.param("144, 1, 5, (ctypes.c_int * 1)(0)", id="sched_setscheduler idle"),
        pytest.param("142, 1, (ctypes.c_int * 1)(0)", id="sched_setparam"),
        pytest.param("203, 1, 8, (ctypes.c_ulong * 1)(1)", id="sched_setaffinity"),
        pytest.param("314, 1, (ctypes.c_uint32 * 12)(48, 5), 0", id="sched_setattr"),
        pytest.param("141, 0, 1, 19", id="setpriority of the guest"),
        pytest.param("141, 1, 1, 19", id="setpriority of the guest's group"),
        pytest.param("141, 2, 0, 19", id="setpriority of the user"),
        pytest.param("251, 1, 1, 3 << 13", id="ioprio_set of the guest"),
        pytest.param("251, 3, 0, 3 << 13", id="ioprio_set of the user"),
        pytest.param("302, 1, 7, (ctypes.c_ulong * 2)(0, 0), 0", id="prlimit"),
    ],
)
async def test_the_guest_cannot_be_slowed_down(box: RunningSandbox, call: str) -> None:
    assert await python_output(box, f"print(c.syscall({call}), errno.errorcode[ctypes.get_errno()])") == "-1 EPERM"


@on_x86_64
@pytest.mark.default
async def test_the_i386_interface_is_no_way_to_the_limits_of_another(box: RunningSandbox) -> None:
    # mov eax, 340 (prlimit64); mov ebx, 1; mov ecx, 7; mov edx, 1 (no pointer of ours); xor esi, esi; int 0x80
    code = "53b854010000bb01000000b907000000ba0100000031f6cd805bc3"
    script = f"""
import mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("{code}"))
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))())
"""
    assert await python_output(box, script) == "-1"


async def test_threads_may_choose_their_own_processors_and_priority(box: RunningSandbox) -> None:
    script = """
import threading
own = threading.get_native_id()
os.sched_setaffinity(own, os.sched_getaffinity(own))
now = os.nice(0)
os.setpriority(os.PRIO_PROCESS, 0, now + 1)
os.setpriority(os.PRIO_PROCESS, os.getpid(), now + 2)
print(os.nice(0) - now)
"""
    assert await python_output(box, script) == "2"


async def test_threads_and_programs_start_without_clone3(box: RunningSandbox) -> None:
    script = """
import subprocess, threading
thread = threading.Thread(target=lambda: print(subprocess.run(["true"]).returncode, flush=True))
thread.start()
thread.join()
print(c.syscall(435, 0, 0), errno.errorcode[ctypes.get_errno()])
"""
    assert await python_output(box, script) == "0\n-1 ENOSYS"


LEAVE = {
    "cleared subreaper": "print(c.prctl(36, 0, 0, 0, 0), flush=True)\nleave = os.fork",
    "parent of its parent": """
def leave():
    pid = c.syscall({clone}, 0x8000 | signal.SIGCHLD, 0, 0, 0, 0)
    return os.fork() if pid == -1 else pid
""",
}


@on_x86_64
@pytest.mark.parametrize("way", LEAVE)
async def test_a_double_fork_does_not_leave_the_tree_that_a_timeout_kills(box: RunningSandbox, way: str) -> None:
    script = f"""
{LEAVE[way].format(clone=56)}
if leave() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sleep", ["sleep", "86.421"])
    os._exit(0)
time.sleep(60)
"""
    result = await box.exec(["/usr/bin/python3", "-c", PRELUDE + script], timeout=1.0)
    assert result.timed_out
    left = await box.exec(["/bin/bash", "-c", "grep -lsa '86[.]421' /proc/[0-9]*/cmdline"], timeout=10)
    assert left.stdout == b""


async def test_a_child_before_its_exec_shows_nothing_of_the_spawner(box: RunningSandbox) -> None:
    watch = """
import re
seen, end = set(), time.monotonic() + 3
while time.monotonic() < end:
    for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
        try:
            seen.add(open(f"/proc/{pid}/cmdline", "rb").read())
        except OSError:
            pass
print(any(re.search(b"spawner|prorl_gym|scratch", line) for line in seen if b"re.search" not in line))
"""
    watching = asyncio.ensure_future(python_output(box, watch))
    while not watching.done():
        await box.exec(["true"], timeout=10)
    assert await watching == "False"


@pytest.mark.parametrize("path", ["/proc/1/map_files", "/proc/1/fd", "/proc/1"])
async def test_a_listing_leads_no_further_than_the_list_of_processes(box: RunningSandbox, path: str) -> None:
    with pytest.raises(PermissionError):
        await box.list_dir(path)
    assert "1" in {entry.name for entry in await box.list_dir("/proc")}
