"""The ``bwrap`` backend: every attack and every conformance check, and what it says it cannot do."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_attacks
from every_backend import *  # noqa: F403 - the same tests, on this module's backend
from sandbox_support import kernel_has_user_namespaces
from test_attacks import *  # noqa: F403 - the same attacks, on this module's backend

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import Mount, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.bwrap, pytest.mark.product]

bash = test_attacks.bash


@pytest.fixture(scope="module")
def backend_name() -> BackendName:
    if not kernel_has_user_namespaces():
        pytest.skip("this kernel refuses user namespaces to ordinary users, and so to a bwrap that is not setuid")
    return "bwrap"


# Attacks whose outcome is another one here. What is no promise of this backend is in docs/sandboxes.md.


async def test_host_root_is_not_mapped(backend: NamespaceBackend, box: RunningSandbox) -> None:
    await box.shell()
    pids = test_attacks.host_pids(backend, box)
    inside = [pid for pid in pids if len(status_field(pid, "NSpid").split()) > 1]
    assert len(inside) >= 2
    for pid in inside:
        assert test_attacks.read(f"/proc/{pid}/uid_map").split() == ["0", str(backend.uid), "1"]
    assert {status_field(pid, "Uid") for pid in pids} == {"\t".join([str(backend.uid)] * 4)}


def status_field(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.partition(":\t")[2] for line in lines if line.startswith(f"{name}:"))


async def test_host_processes_are_not_there(box: RunningSandbox) -> None:
    seen = (await bash(box, "cd /proc; for p in [0-9]*; do echo $p; done; cat [0-9]*/cmdline")).stdout
    assert seen.startswith(b"1\n") and b"pytest" not in seen
    assert len([line for line in seen.splitlines() if line.isdigit()]) < 10


@pytest.mark.parametrize("place", ["/", "/tmp", "/var/tmp", "/workspace", "/run", "/root", "/etc"])
async def test_disk_limit_holds_everywhere(small_box: RunningSandbox, place: str) -> None:
    await test_attacks.test_disk_limit_holds_everywhere(small_box, place)


@pytest.mark.parametrize("place", ["/usr", "/usr/local/lib", "/dev", "/sys", "/etc/alternatives"])
async def test_the_rest_is_read_only(small_box: RunningSandbox, place: str) -> None:
    result = await bash(small_box, f"echo x > {place}/big")
    assert result.exit_code == 1 and b"Read-only file system" in result.stderr


async def test_memory_backed_places_have_their_own_limit(small_box: RunningSandbox) -> None:
    await test_attacks.test_memory_backed_places_have_their_own_limit(small_box, "/dev/shm", 1 << 20)


test_number_of_files_is_bounded = None  # a tmpfs of bwrap has no such limit


# Images.


async def test_image_is_shown_with_writable_parts(backend: NamespaceBackend, image: str) -> None:
    box = await backend.start_sandbox(SandboxSpec(image=image, workdir="/opt"))
    try:
        script = "rm -rf /etc/apt; echo x > /opt/x; cat /etc/resolv.conf; ls /.prorl/0 > /dev/null; touch /usr/x"
        result = await bash(box, script)
        assert (result.stdout, result.exit_code) == (b"", 1)
        assert result.stderr == b"touch: cannot touch '/usr/x': Read-only file system\n"
    finally:
        await box.close()
    assert "apt" in os.listdir(f"{image}/etc") and "x" not in os.listdir(f"{image}/opt")


async def test_image_without_python_is_refused_with_the_reason(backend: NamespaceBackend, tiny_image: Path) -> None:
    with pytest.raises(SandboxError) as caught:
        await backend.start_sandbox(SandboxSpec(image=str(tiny_image)))
    assert caught.value.what == f"bwrap cannot run {tiny_image}: bwrap: execvp python3: No such file or directory"
    assert "needs python3 in the image" in caught.value.fix


async def test_missing_mount_source_is_our_message(backend: NamespaceBackend) -> None:
    with pytest.raises(SandboxError, match="mount source /does/not/exist: No such file"):
        await backend.start_sandbox(SandboxSpec(mounts=(Mount("/does/not/exist", "/x"),)))


@pytest.fixture
def setuid_bwrap(ground: Path) -> Iterator[Path]:
    """A bwrap that is setuid root, where the sandboxes' uid may run it."""
    directory = Path(tempfile.mkdtemp(dir=ground))
    directory.chmod(0o755)
    program = shutil.copy(str(shutil.which("bwrap")), directory / "bwrap")
    os.chmod(program, 0o4755)
    yield Path(program)
    shutil.rmtree(directory)


@pytest.mark.root
async def test_setuid_bwrap_works_and_reports_what_is_weaker(setuid_bwrap: Path, scratch: Path) -> None:
    backend = NamespaceBackend("bwrap", SandboxConfig(scratch=scratch, bwrap=setuid_bwrap))
    try:
        probe = await backend.probe()
        assert probe.ok, probe
        assert "no process inside has a capability" in probe.detail
        box = await backend.start_sandbox(SandboxSpec())
        result = await bash(box, "grep CapEff /proc/self/status; echo '|/x' > /proc/sys/kernel/core_pattern")
        assert result.stdout == b"CapEff:\t0000000000000000\n" and result.exit_code == 1
        script = "import ctypes as c; print(c.CDLL(None, use_errno=True).shmget(0, 1, 0o1600), c.get_errno())"
        assert (await box.exec(["python3", "-c", script], timeout=20)).stdout.split() == [b"-1", b"%d" % errno.ENOSYS]
    finally:
        await backend.close()


async def test_missing_bwrap_is_one_clear_message() -> None:
    probe = await NamespaceBackend("bwrap", SandboxConfig(bwrap=Path("/nowhere/bwrap"))).probe()
    assert (probe.ok, probe.detail) == (False, "sandbox.bwrap: no program /nowhere/bwrap.")
    assert "Install bubblewrap" in probe.fix


async def test_layers_are_refused(backend: NamespaceBackend, tiny_image: Path) -> None:
    from test_backend_layers import Named

    names = Named()
    names.images["two"] = (str(tiny_image), str(tiny_image))
    other = NamespaceBackend("bwrap", SandboxConfig(scratch=backend.scratch), names)
    try:
        with pytest.raises(SandboxError) as caught:
            await other.start_sandbox(SandboxSpec(image="two"))
    finally:
        await other.close()
    assert caught.value.kind is FailureKind.SANDBOX_UNAVAILABLE and "2 layers" in caught.value.what
