"""File operations of a sandbox whose payload holds them up, stops them or kills them."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
from loop_watch import LoopWatch
from sandbox_support import closing, fails_as

from prorl_gym.errors import FailureKind
from prorl_gym.sandbox.guest import guest_messages
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.guest_channel import GuestChannel, GuestTimeouts
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.operations import files as file_operations
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

HOLD = """
import ctypes, os, threading
held, tell = os.pipe()
if os.fork():
    os._exit(os.read(held, 1) != b"1")
fallocate = ctypes.CDLL(None).fallocate
def hold():
    fd = os.open("/tmp/victim", os.O_RDWR | os.O_CREAT)
    while True:
        for mode in (0, 3):  # allocate; punch a hole without a change of size
            fallocate(fd, mode, ctypes.c_long(0), ctypes.c_long(384 << 20))
for _ in range(24):
    threading.Thread(target=hold).start()
os.write(tell, b"1")
"""
"""Threads that queue for the lock of a file: a writer of it waits for as long as one round of all takes."""

STOP = """
import os, signal
if os.fork():
    os._exit(0)
while True:
    try:
        os.kill(-1, signal.SIGSTOP)
    except OSError:
        pass
"""
KILL = STOP.replace("SIGSTOP", "SIGKILL")


async def test_a_file_whose_lock_is_held_stops_nothing_but_its_own_operation(
    impatient_backend: NamespaceBackend, box: RunningSandbox
) -> None:
    async with closing(
        await impatient_backend.start_sandbox(SandboxSpec(limits=SandboxLimits(root_size=1 << 30)))
    ) as hostile:
        await hostile.exec(["/usr/bin/python3", "-c", HOLD], timeout=10)
        async with LoopWatch() as watch:
            writing = [asyncio.create_task(hostile.write_file("/tmp/victim", b"x" * 1000)) for _ in range(4)]
            await box.write_file("/tmp/mine", b"y")
            assert await box.read_file("/tmp/mine") == b"y"
            assert await hostile.is_alive()
            await asyncio.gather(*writing)
        assert watch.longest < 0.5


@pytest.mark.parametrize("script", [STOP, KILL], ids=["stopped", "killed"])
async def test_a_payload_that_signals_file_operations_is_ended_and_they_succeed(
    impatient_backend: NamespaceBackend, script: str
) -> None:
    async with closing(await impatient_backend.start_sandbox(SandboxSpec())) as box:
        await box.exec(["/usr/bin/python3", "-c", script], timeout=10)
        for _ in range(3):
            await box.write_file("/tmp/file", b"x" * 1_000_000)
        assert len(await box.read_file("/tmp/file")) == 1_000_000
        assert (await box.exec(["true"], timeout=10)).exit_code == 0


class SilentGuest:
    """A guest whose file operations never end, on the other end of a channel.

    Args:
        gone: what it says about the processes that it was to end.
    """

    def __init__(self, *, gone: bool, timeouts: GuestTimeouts | None = None) -> None:
        ours, self._socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self.channel = GuestChannel(ours, timeouts)
        self._gone = gone
        self._open: list[socket.socket] = []
        self.asked: list[str] = []
        asyncio.get_running_loop().add_reader(self._socket, self._answer)

    def _answer(self) -> None:
        received = guest_messages.receive_packet(self._socket)
        assert received is not None
        request, _ = received
        self.asked.append(request["op"])
        fields: dict[str, Any] = {"gone": self._gone}
        descriptors: list[int] = []
        if request["op"] == "transfer":
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._open.append(mine)
            fields, descriptors = {"pid": len(self._open)}, [theirs.detach()]
        guest_messages.send_packet(
            self._socket, guest_messages.encode_packet({"type": "reply", "id": request["id"], **fields}), descriptors
        )
        for fd in descriptors:
            os.close(fd)

    def close(self) -> None:
        self.channel.close()
        asyncio.get_running_loop().remove_reader(self._socket)
        for each in (self._socket, *self._open):
            each.close()


@pytest.mark.parametrize(
    ("gone", "kind"),
    [(True, FailureKind.SANDBOX_UNAVAILABLE), (False, FailureKind.SANDBOX_LOST)],
    ids=["host", "payload"],
)
async def test_an_operation_that_never_ends_is_the_hosts_unless_something_of_the_payload_survives(
    gone: bool, kind: FailureKind
) -> None:
    guest = SilentGuest(gone=gone, timeouts=GuestTimeouts(file_stall=0.05, file_stall_after_kill=0.05))
    with fails_as(kind):
        await file_operations.write_file(guest.channel, "/tmp/x", b"x" * 10_000_000, 0o644)
    assert guest.asked == ["transfer", "kill_payload", "kill_tree"]
    guest.close()


async def test_a_cancelled_operation_does_not_wait_for_its_child() -> None:
    guest = SilentGuest(gone=True)
    reading = asyncio.create_task(file_operations.read_file(guest.channel, "/tmp/x", 100))
    await asyncio.wait([reading], timeout=0.05)
    reading.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert guest.asked == ["transfer", "kill_tree"]
    guest.close()


async def test_a_long_listing_is_read_in_short_turns(box: RunningSandbox) -> None:
    await box.exec(["/bin/bash", "-c", "mkdir /tmp/many; cd /tmp/many; touch {1..20000}"], timeout=20)
    async with LoopWatch() as watch:
        assert len(await box.list_dir("/tmp/many")) == 20_000
    assert watch.longest < 0.1


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/tmp/\ud800", errno.EINVAL),
        ("/tmp/\udc7f", errno.EINVAL),
        ("/tmp/\0", errno.EINVAL),
        ("/tmp/" + "x" * 256, errno.ENAMETOOLONG),
        ("/tmp" + "/x" * 60_000, errno.ENAMETOOLONG),
    ],
    ids=["surrogate", "undecodable ASCII", "NUL", "long name", "long path"],
)
async def test_a_path_that_cannot_be_is_an_error_of_the_call(box: RunningSandbox, path: str, code: int) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: box.write_file(path, b"x"),
        lambda: box.read_file(path),
        lambda: box.list_dir(path),
    ]
    for call in calls:
        with pytest.raises(OSError) as caught:
            await call()
        assert caught.value.errno == code
    assert await box.is_alive()


@pytest.mark.parametrize(
    ("argv", "env", "cwd"),
    [
        (["/bin/true"], {"A\ud800": "x"}, "/"),
        (["/bin/true"], {"A": "x\ud800"}, "/"),
        (["/bin/echo", "\ud800"], {}, "/"),
        (["\ud800"], {}, "/"),
        (["/bin/true"], {}, "/\ud800"),
    ],
    ids=["name", "value", "argument", "program", "directory"],
)
async def test_a_command_of_text_that_cannot_be_passed_on_is_reported(
    box: RunningSandbox, argv: list[str], env: dict[str, str], cwd: str
) -> None:
    result = await box.exec(argv, timeout=5, env=env, cwd=cwd)
    assert (result.exit_code, b"U+D800" in result.stderr) == (126, True)
    assert await box.is_alive()


HOLD_TEXT = """
import ctypes, mmap, os, threading
shell = os.getppid()
held, tell = os.pipe()
if os.fork():
    os._exit(os.read(held, 1) != b"1")
os.setsid()
text = next(n for n in os.listdir(f"/proc/{shell}/fd") if "memfd" in os.readlink(f"/proc/{shell}/fd/{n}"))
libc = ctypes.CDLL(None)
size = 384 << 20
slow = os.open("/tmp/slow", os.O_RDWR | os.O_CREAT)
os.ftruncate(slow, size)
view = mmap.mmap(slow, size)
source = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(view)) + size // 2)
def punch():
    while True:
        for mode in (0, 3):  # allocate; punch a hole without a change of size
            libc.fallocate(slow, mode, ctypes.c_long(0), ctypes.c_long(size))
def write():
    fd = os.open(f"/proc/{shell}/fd/{text}", os.O_RDWR)
    while True:
        libc.pwrite(fd, source, ctypes.c_size_t(1 << 20), ctypes.c_long(0))
for work in [punch] + [write] * 60:
    threading.Thread(target=work).start()
os.write(tell, b"1")
"""
"""Writes to the file that commands travel in, each of which waits, with its lock, for pages that are being removed."""


async def test_the_lock_of_the_command_text_stops_one_command_only(backend: NamespaceBackend) -> None:
    async with closing(await backend.start_sandbox(SandboxSpec(limits=SandboxLimits(root_size=1 << 30)))) as box:
        shell = await box.shell()
        await box.write_file("/tmp/hold.py", HOLD_TEXT.encode())
        await shell.run_command("/usr/bin/python3 /tmp/hold.py", timeout=10)
        async with LoopWatch() as watch:
            for _ in range(3):
                await shell.run_command("true", timeout=5)
        assert watch.longest < 0.3
