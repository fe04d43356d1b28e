"""Payloads that exhaust, and payloads that reach for the service's own things: what `test_attacks` has not."""

import asyncio
import os
import stat
from pathlib import Path

import pytest
from sandbox_support import bash, closing, make_tiny_image, needs_python, pids_of, python_output, status_of

from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECONDS = 30.0


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


async def test_full_disk_leaves_the_shell_usable(small_box: RunningSandbox) -> None:
    shell = await small_box.shell()
    await shell.run_command("cat /dev/zero > /workspace/fill; cat /dev/zero > /tmp/fill", timeout=SECONDS)
    with pytest.raises(OSError, match="No space left"):
        await small_box.write_file("/root/more", b"x" * 4096)
    assert (await shell.run_command("cd /usr && pwd", timeout=SECONDS)).output == "/usr\n"
    make_room = "rm /workspace/fill /tmp/fill; echo x > /root/more && echo ok"
    assert (await shell.run_command(make_room, timeout=SECONDS)).output == "ok\n"


async def test_payload_inherits_nothing(box: RunningSandbox) -> None:
    assert (await bash(box, "ls /proc/self/fd")).stdout.split() == [b"0", b"1", b"2", b"3"]  # 3 is the listing itself
    shell = await box.shell()
    assert (await shell.run_command("ls /proc/self/fd", timeout=SECONDS)).output.split() == ["0", "1", "2", "3"]


@pytest.mark.usefixtures("fresh")
async def test_control_socket_of_no_sandbox_has_a_name(box: RunningSandbox) -> None:
    named = await bash(box, "find / -xdev -type s 2>/dev/null; cut -s -d' ' -f9- /proc/net/unix | grep -v Path")
    assert named.stdout.strip() == b""


@needs_python
async def test_control_process_cannot_be_read_or_robbed(fresh: RunningSandbox) -> None:
    """There is no shell: everything but the script itself is ours."""
    script = """
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
        if c.syscall(438, handle, fd, 0) >= 0:
            taken.append((pid, fd))
    if c.ptrace(16, pid, 0, 0) == 0:
        taken.append((pid, "traced"))
print(taken)
"""
    assert await python_output(fresh, script) == "[]"


async def test_shell_that_its_own_payload_stopped_is_replaced(fresh: RunningSandbox) -> None:
    shell = await fresh.shell()
    result = await shell.run_command("kill -STOP $$", timeout=0.3)
    assert result.timed_out and result.restarted, result
    assert (await shell.run_command("echo usable", timeout=SECONDS)).output == "usable\n"


@pytest.mark.default
async def test_killing_the_control_process_takes_nothing_but_the_own_sandbox(
    fresh: RunningSandbox, box: RunningSandbox
) -> None:
    await bash(fresh, "for s in KILL STOP SEGV ABRT; do kill -$s -1; kill -$s 1 2; done")
    for target in ("0", "-1", "-$$", "-1 -- -$PPID"):
        await bash(fresh, f"trap '' TERM USR1; kill -USR1 {target}; kill -TERM {target}")
    assert (await bash(box, "echo untouched")).stdout == b"untouched\n"
    if await fresh.is_alive():
        assert (await bash(fresh, "echo me too")).stdout == b"me too\n"


@pytest.mark.parametrize("text", ["}", "};", "{", "{ echo a", "echo a }; }", "done", "esac", "fi\n}", "\\", "a\\\n"])
async def test_braces_and_ends_are_words_of_the_command(box: RunningSandbox, text: str) -> None:
    shell = await box.shell()
    assert not (await shell.run_command(text, timeout=SECONDS)).timed_out
    assert (await shell.run_command("echo next", timeout=SECONDS)).output == "next\n"


@pytest.mark.root
async def test_device_node_of_an_image_cannot_be_opened(backend: NamespaceBackend, ground: Path) -> None:
    image = make_tiny_image(ground / f"devices-{backend.name}")
    for name, kind, major, minor in (("mem", stat.S_IFCHR, 1, 1), ("zero", stat.S_IFCHR, 1, 5)):
        os.mknod(image / name, kind | 0o666, os.makedev(major, minor))
        os.chmod(image / name, 0o666)
    async with closing(await backend.start_sandbox(SandboxSpec(image=str(image)))) as box:
        for name in ("mem", "zero"):
            result = await bash(box, f"head -c 1 /{name}")
            assert result.exit_code != 0 and result.stdout == b"", result


@pytest.mark.root
async def test_setuid_program_of_an_image_gains_nothing(backend: NamespaceBackend, ground: Path) -> None:
    image = make_tiny_image(ground / f"setuid-image-{backend.name}")
    os.chown(image / "usr/bin/cat", 0, 0)
    os.chmod(image / "usr/bin/cat", 0o6755)
    async with closing(await backend.start_sandbox(SandboxSpec(image=str(image)))) as box:
        status = (await box.exec(["/usr/bin/cat", "/proc/self/status"], timeout=SECONDS)).stdout.decode()
    assert "Uid:\t0\t0\t0\t0\n" in status and "Gid:\t0\t0\t0\t0\n" in status


@pytest.mark.parametrize("score", [0, 799, 1000])
@pytest.mark.parametrize("file", ["self/oom_score_adj", "self/task/$$/../../oom_score_adj", "$PPID/oom_score_adj"])
async def test_who_is_killed_for_memory_is_not_the_payloads_choice(box: RunningSandbox, file: str, score: int) -> None:
    result = await bash(box, f"echo {score} > /proc/{file}; cat /proc/self/oom_score_adj")
    assert result.stdout == b"800\n" and b"oom_score_adj" in result.stderr


async def test_everything_of_a_sandbox_is_killed_before_the_service(
    backend: NamespaceBackend, box: RunningSandbox
) -> None:
    await (await box.shell()).run_command("sleep 60 &", timeout=10)
    inside = [pid for pid in pids_of(backend, box) if len(status_of(pid)["NSpid"].split()) > 1]
    assert len(inside) >= 2
    assert {score_of(pid) for pid in inside} == {800}
    assert score_of(await backend.spawner_pid()) < 800


def score_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


@pytest.mark.parametrize("file", ["sys/kernel/shmall", "sys/kernel/sem", "self/comm", "self/coredump_filter"])
async def test_files_of_the_kernel_cannot_be_opened_for_writing(box: RunningSandbox, file: str) -> None:
    assert b"Read-only file system" in (await bash(box, f": >> /proc/{file}")).stderr


@pytest.mark.parametrize("command", ["mount -o remount,rw /proc", "umount /proc", "mount -t proc p /mnt"])
async def test_it_stays_so(box: RunningSandbox, command: str) -> None:
    assert (await bash(box, command)).exit_code != 0
    assert (await bash(box, "echo 0 > /proc/self/oom_score_adj")).exit_code != 0


async def test_what_descriptors_lead_to_is_as_writable_as_ever(box: RunningSandbox) -> None:
    script = """
set -e
echo to fd > /proc/self/fd/1
echo to stderr > /dev/stderr
exec 7>/tmp/through-proc
echo file > /proc/$$/fd/7
cat /tmp/through-proc
"""
    result = await bash(box, script)
    assert (result.stdout, result.stderr, result.exit_code) == (b"to fd\nfile\n", b"to stderr\n", 0)
