"""What a hostile payload tries, on every real backend; `.ci/as-user` repeats it as an ordinary user."""

import asyncio
import errno
import os
import shutil
import socket
import tempfile
import uuid
from pathlib import Path

import pytest
from sandbox_support import SECRET, bash, closing, needs_python, pids_of, python

from prorl_gym.sandbox.protocol import Mount, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


def read(path: str) -> str:
    return Path(path).read_text()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("echo '|/bin/evil' > /proc/sys/kernel/core_pattern", id="core_pattern"),
        pytest.param("echo 1 > /proc/sys/kernel/panic", id="sysctl"),
        pytest.param("echo h > /proc/sysrq-trigger", id="sysrq"),
        pytest.param("mount -o remount,rw /proc/sys", id="remount proc/sys"),
        pytest.param("umount /proc/sys", id="unmask proc/sys"),
        pytest.param("umount /proc/kallsyms", id="unmask kallsyms"),
        pytest.param("mkdir /tmp/m && mount -t tmpfs none /tmp/m", id="mount tmpfs"),
        pytest.param("mkdir /tmp/b && mount --bind /usr /tmp/b", id="mount bind", marks=pytest.mark.default),
        pytest.param("unshare --user true", id="user namespace"),
        pytest.param("unshare --mount true", id="mount namespace"),
        pytest.param("unshare --net true", id="net namespace"),
        pytest.param("echo 100 > /proc/sys/user/max_user_namespaces", id="raise namespace limit"),
        pytest.param("mknod /tmp/mem c 1 1", id="mknod mem"),
        pytest.param("mknod /tmp/disk b 254 0", id="mknod disk"),
        pytest.param("touch /sys/x", id="write sys"),
        pytest.param("hostname evil", id="hostname"),
        pytest.param("cat /proc/1/environ", id="init environment"),
        pytest.param("readlink /proc/1/fd/0", id="init descriptors"),
        pytest.param("ls /proc/1/root/", id="init root"),
        pytest.param("dd if=/proc/1/mem of=/dev/null bs=1 count=1", id="init memory"),
        pytest.param("chroot /proc/1/cwd true", id="init directory"),
        pytest.param("ulimit -u unlimited", id="raise processes"),
    ],
)
async def test_refused(box: RunningSandbox, script: str) -> None:
    result = await bash(box, script)
    assert result.exit_code != 0 and not result.timed_out, result


async def test_host_settings_are_unchanged_after_an_attempt(box: RunningSandbox) -> None:
    before = read("/proc/sys/kernel/core_pattern")
    await bash(box, "echo '|/bin/evil' > /proc/sys/kernel/core_pattern; sysctl -w kernel.core_pattern=evil")
    assert read("/proc/sys/kernel/core_pattern") == before


async def test_host_root_is_not_mapped(backend: NamespaceBackend, box: RunningSandbox) -> None:
    await box.shell()  # so that there is a payload
    pids = pids_of(backend, box)
    assert len(pids) >= 2
    for pid in pids:
        for line in read(f"/proc/{pid}/uid_map").splitlines():
            _, outside, count = map(int, line.split())
            assert (outside, count) == (backend.uid, 1)


async def test_payload_has_few_capabilities_and_no_way_to_more(box: RunningSandbox) -> None:
    status = (await bash(box, "cat /proc/self/status")).stdout.decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapBnd"], 16) == int(fields["CapEff"], 16) == 0x404FB
    assert int(fields["CapInh"], 16) == int(fields["CapAmb"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert (await bash(box, "cat /proc/self/oom_score_adj")).stdout == b"800\n"


async def test_no_mount_honours_setuid(box: RunningSandbox) -> None:
    table = (await bash(box, "cat /proc/self/mountinfo")).stdout.decode()
    lines = [line.split()[4:6] for line in table.splitlines()]
    assert len(lines) > 10
    assert [point for point, flags in lines if "nosuid" not in flags.split(",")] == []


@pytest.mark.root
async def test_setuid_program_of_the_host_root_stays_powerless(backend: NamespaceBackend, ground: Path) -> None:
    tools = Path(tempfile.mkdtemp(dir=ground))
    os.chmod(tools, 0o755)
    shutil.copy("/usr/bin/cat", tools / "cat")
    os.chmod(tools / "cat", 0o4755)
    async with closing(await backend.start_sandbox(SandboxSpec(mounts=(Mount(str(tools), "/tools"),)))) as box:
        status = (await box.exec(["/tools/cat", "/proc/self/status"], timeout=10)).stdout.decode()
        assert "Uid:\t0\t0\t0\t0\n" in status  # as inside; an effective host root would read 65534
        assert (await bash(box, "touch /tools/x")).exit_code != 0


async def test_host_accounts_are_not_there(box: RunningSandbox) -> None:
    accounts = (await bash(box, "cat /etc/passwd")).stdout.decode().splitlines()
    assert [line.split(":")[0] for line in accounts] == ["root", "nobody"]
    assert (await bash(box, "cat /etc/shadow /etc/gshadow /etc/sudoers")).stdout == b""


@pytest.mark.default
async def test_host_files_are_not_there(box: RunningSandbox, ground: Path) -> None:
    name = f"secret-{uuid.uuid4().hex}"
    secret = ground / name
    secret.write_text(SECRET)
    secret.chmod(0o644)
    assert (await bash(box, f"cat {secret}")).exit_code != 0
    assert (await bash(box, f"find / -xdev -name '{name}' 2>/dev/null")).stdout == b""


async def test_a_fresh_sandbox_is_empty(fresh: RunningSandbox) -> None:
    listed = await bash(fresh, "ls -A /tmp /var/tmp /home /root /run /mnt /srv /opt /opt/bin /sys /workspace")
    assert [line for line in listed.stdout.split(b"\n") if line and not line.endswith(b":")] == [b"bin", b"python"]


async def test_host_environment_is_not_there(box: RunningSandbox) -> None:
    assert os.environ["PRORL_GYM_TEST_SECRET"] == SECRET
    seen = await bash(box, "env; cat /proc/*/environ 2>/dev/null")
    assert SECRET.encode() not in seen.stdout
    assert b"HOME=/root" in seen.stdout


@pytest.mark.default
async def test_host_processes_are_not_there(box: RunningSandbox) -> None:
    seen = (await bash(box, "cd /proc; for p in [0-9]*; do echo $p; cat $p/cmdline; done")).stdout
    pids = [line for line in seen.decode(errors="replace").splitlines() if line.isdigit()]
    assert 1 < len(pids) < 10
    assert b"pytest" not in seen
    assert (await bash(box, f"kill -0 {os.getppid()}")).exit_code != 0 or os.getppid() < 100


async def test_host_loopback_is_another(box: RunningSandbox) -> None:
    reached: list[object] = []
    server = await asyncio.start_server(lambda reader, writer: reached.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        result = await bash(box, f"exec 3<>/dev/tcp/127.0.0.1/{port}")
    assert result.exit_code != 0 and b"refused" in result.stderr
    assert reached == []


@needs_python
async def test_host_abstract_socket_is_out_of_reach(box: RunningSandbox) -> None:
    name = f"prorl-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        script = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}')"
        result = await python(box, script)
    assert b"ConnectionRefusedError" in result.stderr


@needs_python
async def test_own_loopback_works(box: RunningSandbox) -> None:
    script = "import socket as s; a = s.create_server(('127.0.0.1', 0)); s.create_connection(a.getsockname())"
    assert (await python(box, script)).exit_code == 0
    assert (await bash(box, "cut -s -d: -f1 /proc/net/dev")).stdout.split() == [b"lo"]


async def test_killing_everything_kills_only_the_payload(box: RunningSandbox) -> None:
    await bash(box, "kill -9 1; kill -TERM 1; kill -INT 1; kill -HUP 1; kill -9 -1; kill -9 $$")
    assert (await bash(box, "echo still here")).stdout == b"still here\n"


@needs_python
async def test_init_cannot_be_traced(box: RunningSandbox) -> None:
    script = "import ctypes; c=ctypes.CDLL(None,use_errno=True); print(c.ptrace(16,1,0,0), ctypes.get_errno())"
    assert (await python(box, script)).stdout.decode() == f"-1 {errno.EPERM}\n"


async def test_other_sandboxes_are_not_there(
    backend: NamespaceBackend, box: RunningSandbox, fresh: RunningSandbox
) -> None:
    await fresh.write_file("/tmp/of-the-other", b"x")
    await (await fresh.shell()).run_command("sleep 54.321 &", timeout=5)
    search = "find / -xdev -name of-the-other 2>/dev/null; cat /proc/[0-9]*/cmdline | grep -a -c '54[.]321'"
    assert (await bash(box, search)).stdout == b"0\n"
    assert (await bash(box, f"ls {backend.scratch}")).exit_code != 0


@needs_python
async def test_fork_bomb_is_bounded(backend: NamespaceBackend) -> None:
    bomb = """
import os, time
made = 0
try:
    while made < 1000:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except OSError as error:
    print(made, error.errno)
"""
    async with closing(await backend.start_sandbox(SandboxSpec(limits=SandboxLimits(processes=40)))) as box:
        made, number = map(int, (await python(box, bomb)).stdout.split())
        assert 20 < made < 40 and number == errno.EAGAIN
        assert (await bash(box, "echo recovered")).stdout == b"recovered\n"


async def fill(box: RunningSandbox, place: str) -> int:
    """Write more to a place than it may take; return how much it took."""
    result = await bash(box, f"head -c 30000000 /dev/zero > {place}/big; stat -c %s {place}/big; rm {place}/big")
    assert b"No space left" in result.stderr
    return int(result.stdout)


@pytest.mark.parametrize("place", ["/", "/tmp", "/var/tmp", "/usr", "/workspace", "/run", "/root", "/etc"])
async def test_disk_limit_holds_everywhere(small_box: RunningSandbox, place: str) -> None:
    assert 0 < await fill(small_box, place) <= 8 << 20


@pytest.mark.parametrize(("place", "limit"), [("/dev/shm", 1 << 20), ("/dev", 256 << 10)])
async def test_memory_backed_places_have_their_own_limit(small_box: RunningSandbox, place: str, limit: int) -> None:
    assert 0 < await fill(small_box, place) <= limit


@pytest.mark.default
async def test_number_of_files_is_bounded(small_box: RunningSandbox) -> None:
    result = await bash(
        small_box, "mkdir /tmp/many; cd /tmp/many; touch {1..20000} 2>&1 | tail -n 1; ls | wc -l; rm -r /tmp/many"
    )
    assert b"No space left" in result.stdout
    assert int(result.stdout.split()[-1]) < 10000
