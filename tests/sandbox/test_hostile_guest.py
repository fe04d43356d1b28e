"""A payload that turns on the guest or on the service: neither may wait for it, grow by it, or take others down."""

import asyncio
import errno
import json
import os
import resource
import socket
import subprocess
import time
import tracemalloc
from typing import Any

import pytest
from sandbox_support import fails_as

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.process_identity import ProcessIdentity, boot_id
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service import spawner_client
from prorl_gym.sandbox.service.guest_channel import GuestChannel, GuestTimeouts
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.operations import python_session
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.scratch import SandboxState

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

STOP_EVERYTHING = """
import os, signal
if os.fork():
    os._exit(0)
os.setsid()
while True:
    try:
        os.kill(-1, signal.SIGSTOP)
    except OSError:
        pass
"""

FILL_NONCES = """
import os, signal, stat, time
shell = os.getppid()
if os.fork():
    os._exit(0)
os.setsid()
time.sleep(0.2)  # until the command has been reported
os.kill(shell, signal.SIGSTOP)
for name in os.listdir(f"/proc/{shell}/fd"):
    path = f"/proc/{shell}/fd/{name}"
    flags = int(open(f"/proc/{shell}/fdinfo/{name}").read().split("flags:")[1].split()[0], 8)
    if stat.S_ISFIFO(os.stat(path).st_mode) and flags & 3 == os.O_RDONLY:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            while True:
                os.write(pipe, b"A" * 4096)
        except BlockingIOError:
            print("filled", file=open("/tmp/filled", "w"))
time.sleep(1000)
"""

GROW_TEXT = """
import os, sys
shell = os.getppid()
names = [n for n in os.listdir(f"/proc/{shell}/fd") if "memfd" in os.readlink(f"/proc/{shell}/fd/{n}")]
text = os.open(f"/proc/{shell}/fd/{names[0]}", os.O_RDWR)
try:
    os.pwrite(text, b"x", 64 << 20)
except OSError as error:
    print(error.strerror)
"""


def limit_file_size(pid: int, uid: int, size: str) -> None:
    """Set the soft limit of a process: only its own user may, even a root that lacks CAP_SYS_RESOURCE may not."""
    command = ["prlimit", f"--pid={pid}", f"--fsize={size}:"]
    if os.geteuid() == uid:
        subprocess.run(command, check=True)
    else:
        subprocess.run(command, check=True, user=uid, group=uid, extra_groups=[])


@pytest.mark.slow
async def test_a_child_that_is_stopped_before_its_exec_blocks_no_other(fresh: RunningSandbox) -> None:
    await fresh.exec(["/usr/bin/python3", "-c", STOP_EVERYTHING], timeout=10)
    async with asyncio.timeout(30):
        for _ in range(5):
            await fresh.exec(["true"], timeout=1)
        shell = await fresh.shell()
        await shell.run_command("true", timeout=1)
        assert await fresh.is_alive()


async def test_a_full_nonce_pipe_does_not_stop_the_service(fresh: RunningSandbox) -> None:
    shell = await fresh.shell()
    await fresh.write_file("/tmp/attack.py", FILL_NONCES.encode())
    await shell.run_command("/usr/bin/python3 /tmp/attack.py", timeout=10)
    script = "until [ -e /tmp/filled ]; do sleep 0.05; done"
    assert (await fresh.exec(["/bin/bash", "-c", script], timeout=20)).exit_code == 0
    assert (await shell.run_command("echo hi", timeout=5)).restarted
    assert (await shell.run_command("echo hi", timeout=5)).output == "hi\n"


async def test_the_command_text_cannot_be_made_a_store(box: RunningSandbox) -> None:
    await box.write_file("/tmp/grow.py", GROW_TEXT.encode())
    result = await (await box.shell()).run_command("/usr/bin/python3 /tmp/grow.py", timeout=10)
    assert result.output == "Operation not permitted\n"


@pytest.mark.default
async def test_a_flood_of_answers_costs_the_service_nothing(box: RunningSandbox) -> None:
    session = await box.python()
    flood = "import os\nfor _ in range(64): os.write(3, b'\\n' * 65536)"
    started = time.monotonic()
    assert (await session.run_cell(flood, timeout=5)).restarted
    assert time.monotonic() - started < 5
    assert (await session.run_cell("1 + 1", timeout=20)).output == "2\n"


async def test_an_answer_that_would_cost_much_memory_is_not_parsed() -> None:
    line = b'{"cell": "x", "ok": true, "images": [' + b"[]," * 300_000 + b"0]}"
    tracemalloc.start()
    try:
        answer = python_session.parse_reply(line, "x")
        assert answer is None
        assert tracemalloc.get_traced_memory()[1] < len(line)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("fault", ["at its making", "at its birth"])
async def test_a_full_disk_ends_no_running_sandbox(backend: NamespaceBackend, box: RunningSandbox, fault: str) -> None:
    spawner = await backend.spawner_pid()
    before = set(os.listdir(backend.scratch))
    first = len(SandboxState(boot_id(), ProcessIdentity.of(spawner), None).to_json())
    room = 0 if fault == "at its making" else first  # a file size limit fails writes as a full disk does
    limit_file_size(spawner, backend.uid, f"{room}")
    try:
        with pytest.raises(SandboxError) as caught:
            await backend.start_sandbox(SandboxSpec())
    finally:
        limit_file_size(spawner, backend.uid, "unlimited")
    assert caught.value.kind is FailureKind.SANDBOX_UNAVAILABLE
    assert await box.is_alive() and await backend.spawner_pid() == spawner
    other = await backend.start_sandbox(SandboxSpec())
    assert set(os.listdir(backend.scratch)) - before == {other.id}
    await other.close()


async def test_a_descriptor_that_cannot_be_sent_fails_one_start_only(
    backend: NamespaceBackend, box: RunningSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = spawner_client.send_packet

    def refuse(sock: socket.socket, packet: bytes, descriptors: list[int]) -> None:
        if descriptors:
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        send(sock, packet, descriptors)

    with monkeypatch.context() as patch, pytest.raises(SandboxError) as caught:
        patch.setattr(spawner_client, "send_packet", refuse)
        await backend.start_sandbox(SandboxSpec())
    assert caught.value.kind is FailureKind.SANDBOX_UNAVAILABLE
    assert await box.is_alive()
    await (await backend.start_sandbox(SandboxSpec())).close()


async def test_the_service_may_have_as_many_descriptors_as_the_system_allows(backend: NamespaceBackend) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
        other = NamespaceBackend("userns", SandboxConfig(scratch=backend.scratch))
        await other.spawner_pid()
        await other.close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_guest_that_never_answers_is_lost_in_the_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        channel = GuestChannel(ours, GuestTimeouts(answer=0.1))
        request = asyncio.ensure_future(channel.request("spawn"))
        await asyncio.sleep(0)
        request.cancel()  # a cancelled request waits for its answer, too
        async with asyncio.timeout(10):
            with pytest.raises(asyncio.CancelledError):
                await request
        assert channel.is_closed


async def test_a_silent_guest_is_not_called_alive() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    async def release() -> None:
        pass

    with theirs:
        channel = GuestChannel(ours, GuestTimeouts(ping=0.1))
        box = RunningSandbox("x", SandboxSpec(), channel, release)
        async with asyncio.timeout(10):
            assert not await box.is_alive()
            await box.close()


@pytest.mark.parametrize(
    "message",
    [
        {"type": "reply"},
        {"type": "reply", "id": 99},
        {"type": "reply", "id": "x"},
        {"type": "reply", "id": 1, "errno": "x"},
        {"type": "exit", "pid": []},
        {"type": "exit"},
        {"type": "hello"},
        {"type": "surprise"},
        {},
        [],
        b"no json",
        b"{" * 100_000,
    ],
    ids=lambda message: str(message)[:30],
)
async def test_a_senseless_message_closes_the_channel_and_its_descriptors(message: Any) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        channel = GuestChannel(ours)
        request = asyncio.ensure_future(channel.request("ping"))
        await asyncio.sleep(0)
        reader, writer = os.pipe()
        socket.send_fds(theirs, [message if isinstance(message, bytes) else json.dumps(message).encode()], [writer])
        os.close(writer)
        with fails_as(FailureKind.SANDBOX_LOST):
            await asyncio.wait_for(request, 5)
        assert channel.is_closed
        assert os.read(reader, 1) == b""  # no copy of the write end is left
        os.close(reader)
