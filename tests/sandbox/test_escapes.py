"""Known ways out of containers, each by its steps; what `test_attacks` and `test_kernel_surface` have not."""

import asyncio
import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from sandbox_support import SECRET, give_to_sandboxes, on_x86_64, python_output

from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECONDS = 20.0


@pytest.fixture
def secret(ground: Path) -> Path:
    """A file on the host that every uid may read."""
    path = Path(tempfile.mkdtemp(dir=ground)) / "secret"
    path.write_text(SECRET)
    path.parent.chmod(0o755)
    give_to_sandboxes(path.parent)
    return path


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("430, b'tmpfs', 0", id="fsopen"),
        pytest.param("428, -100, b'/', 1", id="open_tree clone"),
        pytest.param("433, -100, b'/', 0", id="fspick"),
        pytest.param("429, -100, b'/proc', -100, b'/tmp', 0", id="move_mount"),
        pytest.param("442, -100, b'/proc', 0, (ctypes.c_uint64 * 4)(0, 1, 0, 0), 32", id="mount_setattr"),
        pytest.param("155, b'/', b'/'", id="pivot_root", marks=on_x86_64),
        pytest.param("56, 0x10000011, 0, 0, 0, 0", id="clone user namespace", marks=on_x86_64),
        pytest.param("169, 0xfee1dead, 672274793, 0, 0", id="reboot", marks=on_x86_64),
        pytest.param("167, b'/tmp/x', 0", id="swapon", marks=on_x86_64),
        pytest.param("164, (ctypes.c_long * 2)(0, 0), 0", id="settimeofday", marks=on_x86_64),
        pytest.param("304, -100, (ctypes.c_uint32 * 4)(8, 1, 2, 0), 0", id="open_by_handle", marks=on_x86_64),
        pytest.param("144, 0, 1, (ctypes.c_int * 1)(1)", id="real-time priority", marks=on_x86_64),
        pytest.param("251, 1, 0, 1 << 13", id="real-time disk priority", marks=on_x86_64),
        pytest.param("153", id="vhangup", marks=on_x86_64),
    ],
)
async def test_a_call_does_not_succeed(box: RunningSandbox, call: str) -> None:
    assert (await python_output(box, f"print(c.syscall({call}))")) == "-1"


@on_x86_64
async def test_the_hosts_kernel_log_is_not_there_whatever_the_site_allows(box: RunningSandbox) -> None:
    script = "print(c.syscall(103, 3, ctypes.create_string_buffer(99), 99), errno.errorcode[ctypes.get_errno()])"
    assert await python_output(box, script) == "-1 ENOSYS"
    assert (await box.exec(["/bin/cat", "/dev/kmsg"], timeout=SECONDS)).stdout == b""


@pytest.mark.default
async def test_chroot_with_an_open_directory_leads_no_higher_than_the_own_root(
    fresh: RunningSandbox, secret: Path
) -> None:
    script = f"""
os.makedirs("/tmp/cell", exist_ok=True)
top = os.open("/", os.O_RDONLY)
os.chroot("/tmp/cell")
os.fchdir(top)
for _ in range(100): os.chdir("..")
os.chroot(".")
print(os.path.exists("{secret}"), os.path.exists("/workspace"))
"""
    assert await python_output(fresh, script) == "False True"


@pytest.mark.parametrize("number", range(3, 24))
async def test_no_descriptor_of_the_host_is_a_working_directory(box: RunningSandbox, secret: Path, number: int) -> None:
    inside = await box.exec(
        ["/bin/cat", f"../../../../../../..{secret}"], cwd=f"/proc/self/fd/{number}", timeout=SECONDS
    )
    assert inside.exit_code != 0 and SECRET.encode() not in inside.stdout


async def test_descriptors_sent_to_the_service_stay_nowhere(box: RunningSandbox) -> None:
    session = await box.python()
    before = len(os.listdir("/proc/self/fd"))
    send = """
import array, os, socket
channel = socket.socket(fileno=os.dup(3))
null = os.open("/dev/null", os.O_RDONLY)
try:
    for _ in range(20):
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 100))
        channel.sendmsg([b" "], [rights], socket.MSG_DONTWAIT)
except OSError:
    pass
"""
    await session.run_cell(send, timeout=SECONDS)
    await session.run_cell("0", timeout=SECONDS)  # it may have been restarted: what was sent is no answer
    assert (await session.run_cell("1 + 1", timeout=SECONDS)).output == "2\n"
    assert len(os.listdir("/proc/self/fd")) <= before + 6  # a session that was restarted has new pipes


async def test_what_is_pushed_into_the_own_terminal_is_no_later_command(fresh: RunningSandbox) -> None:
    shell = await fresh.shell()
    push = """
import fcntl, termios
for byte in b"echo forged > /tmp/forged\\n": fcntl.ioctl(0, termios.TIOCSTI, bytes([byte]))
"""
    await fresh.write_file("/tmp/push.py", push.encode())
    await shell.run_command("/usr/bin/python3 /tmp/push.py 2>/dev/null", timeout=SECONDS)
    assert (await shell.run_command("echo next", timeout=SECONDS)).output == "next\n"
    with pytest.raises(FileNotFoundError):
        await fresh.read_file("/tmp/forged")


async def test_a_payload_has_no_terminal_of_the_host(box: RunningSandbox) -> None:
    assert (
        await python_output(box, "print(c.open(b'/dev/tty', os.O_RDWR), os.path.exists('/dev/console'))") == "-1 False"
    )


async def test_a_listing_of_very_many_names_is_refused(backend: NamespaceBackend, fresh: RunningSandbox) -> None:
    script = "os.mkdir('/tmp/many')\nfor n in range(100_001): os.symlink('x' * 9, f'/tmp/many/{n}')"
    await python_output(fresh, script)
    with pytest.raises(OSError):
        await fresh.list_dir("/tmp/many")


async def test_an_upload_through_links_that_change_stays_inside(fresh: RunningSandbox, secret: Path) -> None:
    swap = f"""
os.makedirs("/tmp/up/real", exist_ok=True)
end = time.monotonic() + 1.0
while time.monotonic() < end:
    for target in ("real", "{secret.parent}", "/proc/1/root{secret.parent}", "../../../..{secret.parent}"):
        try:
            os.symlink(target, "/tmp/up/new")
            os.rename("/tmp/up/new", "/tmp/up/link")
        except OSError:  # an upload has made directories there
            shutil.rmtree("/tmp/up", ignore_errors=True)  # and may be making another one in this moment
            os.makedirs("/tmp/up/real", exist_ok=True)
"""
    swapping = asyncio.ensure_future(python_output(fresh, swap))
    while not swapping.done():
        for path in ("/tmp/up/link/secret", "/tmp/up/link/other"):
            try:
                await fresh.write_file(path, b"escaped")
            except OSError:
                continue
    await swapping
    assert {path.name: path.read_text() for path in secret.parent.iterdir()} == {"secret": SECRET}


async def test_core_dumps_of_payloads_are_nowhere_on_the_host(fresh: RunningSandbox, secret: Path) -> None:
    before = set(os.listdir(secret.parent)), set(os.listdir("/"))
    result = await fresh.exec(["/bin/bash", "-c", "ulimit -c unlimited; kill -SEGV $$"], cwd="/tmp", timeout=SECONDS)
    assert result.exit_code == 128 + 11
    assert (set(os.listdir(secret.parent)), set(os.listdir("/"))) == before


def descriptors_of(pid: int) -> list[str]:
    """What a process holds open, without what it closes while we look (sandboxes of earlier tests going away)."""
    held: list[str] = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            held.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return held


async def test_the_spawner_does_not_wait_by_what_payloads_can_use_up(backend: NamespaceBackend) -> None:
    try:
        held = descriptors_of(await backend.spawner_pid())
    except PermissionError:  # not dumpable, and we are not root
        pytest.skip("the spawner hides its descriptors from its own user")
    assert held
    assert [name for name in held if "eventpoll" in name] == []


@pytest.mark.parametrize(("call", "most"), [("c.inotify_init()", 32), ("c.fanotify_init(0x200, 0)", 8)])
async def test_watching_leaves_some_to_other_sandboxes(fresh: RunningSandbox, call: str, most: int) -> None:
    assert int(await python_output(fresh, f"n = 0\nwhile n < 999 and {call} != -1: n += 1\nprint(n)")) == most


async def test_inotify_watches_leave_some_to_other_sandboxes(fresh: RunningSandbox) -> None:
    script = """
watcher, n = c.inotify_init(), 0
os.mkdir("/tmp/w")
while n < 20_000:
    open(f"/tmp/w/{n}", "w").close()
    if c.inotify_add_watch(watcher, f"/tmp/w/{n}".encode(), 2) == -1: break
    n += 1
print(n)
"""
    assert int(await python_output(fresh, script)) == 16384


async def test_pipes_of_one_leave_another_working(fresh: RunningSandbox, box: RunningSandbox) -> None:
    hold = """
import os, sys, time
held = []
try:
    while True: held.append(os.pipe())
except OSError:
    open(f"/tmp/held-{os.getpid()}", "w").close()
time.sleep(60)
"""
    await fresh.write_file("/tmp/hold.py", hold.encode())
    started = "for i in 1 2 3 4; do /usr/bin/python3 /tmp/hold.py & done"
    waited = "until set -- /tmp/held-* && [ $# = 4 ]; do sleep 0.05; done"
    assert (await (await fresh.shell()).run_command(f"{started}; {waited}", timeout=SECONDS)).exit_code == 0
    result = await box.exec(["/bin/bash", "-c", "head -c 600000 /dev/zero | wc -c"], timeout=SECONDS)
    assert result.stdout == b"600000\n", result
    other = await box.shell()
    assert (await other.run_command("printf '%*s' 600 ''", timeout=SECONDS)).output == " " * 600
