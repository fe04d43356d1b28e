"""Payloads that exhaust, and payloads that reach for the service's own things: what `test_attacks` has not."""

import asyncio
import os
import stat
import tempfile
import zipfile
from collections.abc import AsyncIterator
from ensurepip import __file__ as ensurepip_file
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_support import give_to_sandboxes, make_tiny_image

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import ExecResult, Mount, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

needs_python = pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="the host has no /usr/bin/python3")

SECONDS = 30.0
MEMORY = 256 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tight_box(backend: NamespaceBackend) -> AsyncIterator[RunningSandbox]:
    """A sandbox with few of everything."""
    limits = SandboxLimits(processes=60, open_files=64, memory=MEMORY, root_size=32 << 20)
    box = await backend.start_sandbox(SandboxSpec(limits=limits))
    yield box
    await box.close()


@pytest.fixture
def target(ground: Path) -> Path:
    """An empty host directory of the sandboxes' uid."""
    path = Path(tempfile.mkdtemp(dir=ground))
    give_to_sandboxes(path)
    path.chmod(0o700)
    return path


async def bash(box: RunningSandbox, script: str) -> ExecResult:
    return await box.exec(["/bin/bash", "-c", script], timeout=SECONDS)


async def python(box: RunningSandbox, script: str) -> ExecResult:
    return await box.exec(["/usr/bin/python3", "-c", script], timeout=SECONDS)


# What exhausts.


async def test_fork_bomb_of_the_shell_ends_with_its_timeout(backend: NamespaceBackend) -> None:
    box = await backend.start_sandbox(SandboxSpec(limits=SandboxLimits(processes=60)))
    try:
        shell = await box.shell()
        result = await shell.run_command(":(){ :|:& };: 2>/dev/null; wait", timeout=1.0)
        assert result.timed_out or result.exit_code is not None
        async with asyncio.timeout(SECONDS):
            assert (await shell.run_command("echo usable", timeout=SECONDS)).output.endswith("usable\n")
    finally:
        async with asyncio.timeout(SECONDS):
            await box.close()
    assert not await box.is_alive()


@needs_python
async def test_memory_of_a_process_is_bounded(tight_box: RunningSandbox) -> None:
    result = await python(tight_box, f"x = bytearray({2 * MEMORY})")
    assert result.exit_code == 137 and result.breach is Breach.MEMORY_PROCESS, result
    assert (await python(tight_box, "print(len(bytearray(1 << 20)))")).stdout == b"1048576\n"


@needs_python
async def test_descriptors_are_bounded_and_the_sandbox_lives_on(tight_box: RunningSandbox) -> None:
    script = "import os\nn = 0\ntry:\n    while True: os.dup(0); n += 1\nexcept OSError as e: print(n, e.errno)"
    count, number = map(int, (await python(tight_box, script)).stdout.split())
    assert 50 < count < 64 and number == 24
    assert (await bash(tight_box, "echo fine")).stdout == b"fine\n"


async def test_full_disk_leaves_the_shell_usable(tight_box: RunningSandbox) -> None:
    shell = await tight_box.shell()
    await shell.run_command("cat /dev/zero > /workspace/fill; cat /dev/zero > /tmp/fill", timeout=SECONDS)
    with pytest.raises(OSError, match="No space left"):
        await tight_box.write_file("/root/more", b"x" * 4096)
    assert (await shell.run_command("cd /usr && pwd", timeout=SECONDS)).output == "/usr\n"
    assert (
        await shell.run_command("rm /workspace/fill /tmp/fill; echo x > /root/more && echo ok", timeout=SECONDS)
    ).output == ("ok\n")


@needs_python
async def test_directory_deeper_than_any_path_goes_with_its_sandbox(backend: NamespaceBackend, target: Path) -> None:
    own = NamespaceBackend("apptainer" if backend.name == "apptainer" else "userns", SandboxConfig(scratch=target))
    box = await own.start_sandbox(SandboxSpec())
    script = "import os\nfor _ in range(3000): os.mkdir('d' * 20); os.chdir('d' * 20)\nprint('deep')"
    assert (await python(box, script)).stdout == b"deep\n"
    await own.close()
    assert os.listdir(target) == []


# What reaches for the service's own things.


async def test_payload_inherits_nothing(box: RunningSandbox) -> None:
    assert (await bash(box, "ls /proc/self/fd")).stdout.split() == [b"0", b"1", b"2", b"3"]  # 3 is the listing itself
    shell = await box.shell()
    assert (await shell.run_command("ls /proc/self/fd", timeout=SECONDS)).output.split() == ["0", "1", "2", "3"]


async def test_control_socket_of_no_sandbox_has_a_name(backend: NamespaceBackend, box: RunningSandbox) -> None:
    other = await backend.start_sandbox(SandboxSpec())
    try:
        named = await bash(box, "find / -xdev -type s 2>/dev/null; cut -s -d' ' -f9- /proc/net/unix | grep -v Path")
    finally:
        await other.close()
    assert named.stdout.strip() == b""


@needs_python
async def test_control_process_cannot_be_read_or_robbed(backend: NamespaceBackend) -> None:
    script = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
own, taken = set(), []
pid = os.getpid()
while pid > 1 and pid not in own:
    own.add(pid)
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    if pid in own:
        continue
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        continue
    for fd in range(64):
        if libc.syscall(438, handle, fd, 0) >= 0:
            taken.append((pid, fd))
    if libc.ptrace(16, pid, 0, 0) == 0:
        taken.append((pid, "traced"))
print(taken)
"""
    box = await backend.start_sandbox(SandboxSpec())  # without a shell: everything but the script itself is ours
    try:
        assert (await python(box, script)).stdout == b"[]\n"
    finally:
        await box.close()


async def test_shell_that_its_own_payload_stopped_is_replaced(backend: NamespaceBackend) -> None:
    box = await backend.start_sandbox(SandboxSpec())
    try:
        shell = await box.shell()
        result = await shell.run_command("kill -STOP $$", timeout=0.3)
        assert result.timed_out and result.restarted, result
        assert (await shell.run_command("echo usable", timeout=SECONDS)).output == "usable\n"
    finally:
        await box.close()


@pytest.mark.default
async def test_killing_the_control_process_takes_nothing_but_the_own_sandbox(backend: NamespaceBackend) -> None:
    own, other = await backend.start_sandbox(SandboxSpec()), await backend.start_sandbox(SandboxSpec())
    try:
        await bash(own, "for s in KILL STOP SEGV ABRT; do kill -$s -1; kill -$s 1 2; done")
        assert (await bash(other, "echo untouched")).stdout == b"untouched\n"
        if await own.is_alive():
            assert (await bash(own, "echo me too")).stdout == b"me too\n"
    finally:
        await own.close()
        await other.close()


@pytest.mark.parametrize("text", ["}", "};", "{", "{ echo a", "echo a }; }", "done", "esac", "fi\n}", "\\", "a\\\n"])
async def test_braces_and_ends_are_words_of_the_command(box: RunningSandbox, text: str) -> None:
    shell = await box.shell()
    assert not (await shell.run_command(text, timeout=SECONDS)).timed_out
    assert (await shell.run_command("echo next", timeout=SECONDS)).output == "next\n"


async def test_links_of_the_payload_do_not_lead_our_writes_to_the_host(box: RunningSandbox, target: Path) -> None:
    await bash(
        box, f"mkdir -p /workspace/up; ln -s {target} /workspace/up/link; ln -s ../../../..{target} /workspace/rel"
    )
    for path in ("/workspace/up/link/file", "/workspace/rel/file", f"/workspace/../../..{target}/file"):
        try:
            await box.write_file(path, b"escaped")
        except OSError:
            continue
    assert os.listdir(target) == []


@pytest.mark.root
async def test_device_node_of_an_image_cannot_be_opened(backend: NamespaceBackend, ground: Path) -> None:
    image = make_tiny_image(ground / f"devices-{backend.name}")
    for name, kind, major, minor in (("mem", stat.S_IFCHR, 1, 1), ("zero", stat.S_IFCHR, 1, 5)):
        os.mknod(image / name, kind | 0o666, os.makedev(major, minor))
        os.chmod(image / name, 0o666)
    box = await backend.start_sandbox(SandboxSpec(image=str(image)))
    try:
        for name in ("mem", "zero"):
            result = await bash(box, f"head -c 1 /{name}")
            assert result.exit_code != 0 and result.stdout == b"", result
    finally:
        await box.close()


@pytest.mark.root
async def test_setuid_program_of_an_image_gains_nothing(backend: NamespaceBackend, ground: Path) -> None:
    image = make_tiny_image(ground / f"setuid-image-{backend.name}")
    os.chown(image / "usr/bin/cat", 0, 0)
    os.chmod(image / "usr/bin/cat", 0o6755)
    box = await backend.start_sandbox(SandboxSpec(image=str(image)))
    try:
        status = (await box.exec(["/usr/bin/cat", "/proc/self/status"], timeout=SECONDS)).stdout.decode()
    finally:
        await box.close()
    assert "Uid:\t0\t0\t0\t0\n" in status and "Gid:\t0\t0\t0\t0\n" in status


# What careful agents do to the root.


async def test_file_modes_are_kept(box: RunningSandbox) -> None:
    script = """
    cd /workspace; umask 027; mkdir modes; echo x > modes/plain; install -m 4711 /dev/null modes/suid; chmod 1777 modes
    cp -a modes copy; mv copy moved; stat -c '%a %n' moved moved/plain moved/suid
    """
    assert (await bash(box, script)).stdout == b"1777 moved\n640 moved/plain\n4711 moved/suid\n"


@needs_python
async def test_a_local_wheel_can_be_installed(backend: NamespaceBackend, ground: Path) -> None:
    (pip,) = (Path(ensurepip_file).parent / "_bundled").glob("pip-*.whl")
    wheels = Path(tempfile.mkdtemp(dir=ground))
    (wheels / pip.name).write_bytes(pip.read_bytes())
    with zipfile.ZipFile(wheels / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "answer = 42\n")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "tiny.py,,\n")
    give_to_sandboxes(wheels)
    box = await backend.start_sandbox(SandboxSpec(mounts=(Mount(str(wheels), "/wheels"),)))
    try:
        run = (
            f"/usr/bin/python3 /wheels/{pip.name}/pip install -q --no-index --break-system-packages /wheels/tiny-*.whl"
        )
        result = await bash(box, f"{run} && cd / && /usr/bin/python3 -c 'import tiny; print(tiny.answer)'")
    finally:
        await box.close()
    assert result.stdout == b"42\n", result
