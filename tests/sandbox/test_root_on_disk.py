"""Roots that are kept on disk: as right as those in memory, of a size, and gone afterwards."""

import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

MB = 1 << 20
on_loop = pytest.mark.asyncio(loop_scope="module")
ON_DISK = SandboxLimits(root_on="disk", root_size=24 * MB, file_size=64 * MB)


async def bash(box: RunningSandbox, script: str) -> str:
    """Run a script that must succeed."""
    result = await box.exec(["/bin/bash", "-ec", script], timeout=20)
    assert (result.exit_code, result.stderr) == (0, b"")
    return result.stdout.decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def disk_box(backend: NamespaceBackend) -> AsyncIterator[RunningSandbox]:
    box = await backend.start_sandbox(SandboxSpec(limits=ON_DISK))
    yield box
    await box.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def image_box(backend: NamespaceBackend, tiny_image: Path) -> AsyncIterator[RunningSandbox]:
    box = await backend.start_sandbox(SandboxSpec(image=str(tiny_image), limits=ON_DISK))
    yield box
    await box.close()


@on_loop
async def test_it_is_on_disk(disk_box: RunningSandbox, backend: NamespaceBackend) -> None:
    await bash(disk_box, "head -c 5000000 /dev/zero > /workspace/file; echo x > /usr/local/file")
    kept = backend.scratch / disk_box.id / "root"
    assert (kept / "root/workspace/file").stat().st_size == 5_000_000
    assert (kept / "usr/upper/local/file").read_text() == "x\n"
    await bash(disk_box, "rm /workspace/file /usr/local/file")


@on_loop
async def test_image_directory_can_be_removed_and_made_again(image_box: RunningSandbox, tiny_image: Path) -> None:
    assert await bash(image_box, "rm -rf /data/doomed; mkdir /data/doomed; ls -A /data/doomed") == ""
    assert (tiny_image / "data/doomed/deep/file").read_text() == "old"


@on_loop
async def test_image_file_can_be_removed(image_box: RunningSandbox, tiny_image: Path) -> None:
    assert await bash(image_box, "rm /data/kept/file; ls -A /data/kept; echo mine > /data/kept/file") == ""
    assert await bash(image_box, "cat /data/kept/file") == "mine\n"
    assert (tiny_image / "data/kept/file").read_text() == "kept"


@on_loop
async def test_new_directory_inside_an_image_directory_can_be_renamed(image_box: RunningSandbox) -> None:
    assert await bash(image_box, "cd /data/kept; mkdir a; touch a/x; mv a b; ls b") == "x\n"


@on_loop
async def test_host_directory_can_be_removed_and_made_again(disk_box: RunningSandbox) -> None:
    await bash(disk_box, "rm -rf /usr/local/bin; mkdir /usr/local/bin; echo x > /usr/local/bin/x")
    assert await bash(disk_box, "ls -A /usr/local/bin") == "x\n"


FILL = "i=0; while :; do i=$((i+1)); head -c 2000000 /dev/zero > /workspace/f$i || exit 7; sleep 0.02; done"
NAMELESS = "exec 9> /workspace/f; rm /workspace/f; while head -c 2000000 /dev/zero >&9; do sleep 0.02; done; exit 7"


async def clean(box: RunningSandbox) -> None:
    """Make room; that there is some is noticed a moment later."""
    remove = "chmod -R u+rwx /workspace; rm -rf /workspace/* /workspace/.[a-z]*"
    assert (await box.exec(["sh", "-c", remove], timeout=60)).exit_code == 0
    attempt = "until (echo x > /workspace/room); do sleep 0.05; done 2>/dev/null; rm /workspace/room"
    assert (await box.exec(["bash", "-c", attempt], timeout=30)).exit_code == 0


@on_loop
@pytest.mark.parametrize("script", [FILL, NAMELESS], ids=["many files", "a file without a name"])
async def test_full_root_is_named(disk_box: RunningSandbox, script: str) -> None:
    result = await disk_box.exec(["sh", "-c", script], timeout=30)
    assert result.exit_code != 0 and not result.timed_out and result.breach is Breach.DISK, result
    await clean(disk_box)


@on_loop
async def test_shell_of_a_full_root_can_make_room(disk_box: RunningSandbox) -> None:
    shell = await disk_box.shell()
    result = await shell.run_command(f"({FILL})", timeout=30)
    assert result.breach is Breach.DISK and not result.timed_out, result
    result = await shell.run_command("echo x > /workspace/more", timeout=10)
    assert (result.breach, result.restarted) == (Breach.DISK, False), result
    with pytest.raises(OSError, match="No space left"):
        await disk_box.write_file("/workspace/mine", b"x")
    await clean(disk_box)
    # Processes get their room back one after the other.
    again = "until echo x > /workspace/more; do sleep 0.05; done 2>/dev/null; cat /workspace/more"
    result = await shell.run_command(again, timeout=10)
    assert (result.output, result.exit_code, result.breach, result.restarted) == ("x\n", 0, None, False)


MAPPED = """
import mmap, os, resource, signal, time
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
maps = []
for n in range(40):
    file = os.open(f"/workspace/sparse{n}", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 16 << 20)
    maps.append(mmap.mmap(file, 16 << 20))
for map in maps:
    for at in range(0, 16 << 20, 4096):
        map[at] = 1
    time.sleep(0.3)
time.sleep(30)
"""
DIRECTORIES = "i=0; while :; do i=$((i+1)); mkdir -p /workspace/$i/{1..400}; done"


@on_loop
@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(
            ["/usr/bin/python3", "-c", MAPPED],
            id="memory maps",
            marks=pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="the host has no /usr/bin/python3"),
        ),
        pytest.param(["bash", "-c", DIRECTORIES], id="directories", marks=pytest.mark.slow),
    ],
)
async def test_who_fills_a_full_root_dies(disk_box: RunningSandbox, argv: list[str]) -> None:
    result = await disk_box.exec(argv, timeout=30)
    assert (result.exit_code, result.timed_out, result.breach) == (137, False, Breach.DISK), result
    await clean(disk_box)


@on_loop
async def test_what_hides_is_counted(disk_box: RunningSandbox) -> None:
    script = "mkdir -p /workspace/.h/i; cd /workspace/.h/i; chmod 0 ..; " + FILL.replace("/workspace/f", "f")
    result = await disk_box.exec(["sh", "-c", script], timeout=30)
    assert result.exit_code != 0 and result.breach is Breach.DISK, result
    await clean(disk_box)


@asynccontextmanager
async def leaving_things(name: BackendName, scratch: Path) -> AsyncGenerator[tuple[NamespaceBackend, RunningSandbox]]:
    """A sandbox on disk with a closed directory, a deep one and removed ones of the image."""
    backend = NamespaceBackend(name, SandboxConfig(scratch=scratch))
    try:
        box = await backend.start_sandbox(SandboxSpec(limits=ON_DISK))
        await bash(box, "mkdir -p /workspace/a/b; touch /workspace/a/b/c; chmod 0 /workspace/a/b /workspace/a")
        await bash(box, "rm -rf /usr/local/bin; cd /tmp; for i in {1..60}; do mkdir ddddddddd; cd ddddddddd; done")
        yield backend, box
    finally:
        await backend.close()


async def test_nothing_is_left_of_it(backend_name: BackendName, own_scratch: Path) -> None:
    async with leaving_things(backend_name, own_scratch) as (backend, box):
        assert os.listdir(own_scratch) == [box.id]
        await box.close()
        await backend.wait_idle()
        assert os.listdir(own_scratch) == []


async def test_next_start_removes_what_a_killed_one_left(backend_name: BackendName, own_scratch: Path) -> None:
    async with leaving_things(backend_name, own_scratch) as (backend, box):
        os.kill(await backend.spawner_pid(), signal.SIGKILL)
        while await box.is_alive():
            continue
        assert os.listdir(own_scratch) == [box.id]
    after = NamespaceBackend("userns", SandboxConfig(scratch=own_scratch))
    try:
        await after.spawner_pid()
    finally:
        await after.close()
    assert os.listdir(own_scratch) == []


@on_loop
async def test_devices_and_setuid_have_no_effect(disk_box: RunningSandbox) -> None:
    root = (await bash(disk_box, "awk '$5 == \"/\" { print $6 }' /proc/self/mountinfo")).split(",")
    assert {"nosuid", "nodev"} <= {*root}
