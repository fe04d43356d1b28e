"""The ``apptainer-plain`` backend: what it promises although everything but the guest is the runtime's."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import test_attacks
import test_ipython
import test_killed
import test_root
from sandbox_support import NOBODY, SECRET, bash, closing, fails_as, plain_backend, run_check, scratch_of_nobody
from test_backend_layers import Named

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import Mount, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName
from prorl_gym.testing.sandbox.conformance import CHECKS, Check

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.apptainer, pytest.mark.product]


# What holds here as it does in the other backends.
test_host_files_are_not_there = test_attacks.test_host_files_are_not_there
test_host_loopback_is_another = test_attacks.test_host_loopback_is_another
test_host_abstract_socket_is_out_of_reach = test_attacks.test_host_abstract_socket_is_out_of_reach
test_own_loopback_works = test_attacks.test_own_loopback_works
test_host_settings_are_unchanged_after_an_attempt = test_attacks.test_host_settings_are_unchanged_after_an_attempt
test_killing_everything_kills_only_the_payload = test_attacks.test_killing_everything_kills_only_the_payload
test_init_cannot_be_traced = test_attacks.test_init_cannot_be_traced
test_other_sandboxes_are_not_there = test_attacks.test_other_sandboxes_are_not_there
test_fork_bomb_is_bounded = test_attacks.test_fork_bomb_is_bounded
test_displayed_pictures_come_back = test_ipython.test_displayed_pictures_come_back
test_magics_and_shell_lines_work = test_ipython.test_magics_and_shell_lines_work
test_mount_cannot_be_written = test_ipython.test_mount_cannot_be_written
test_python_tool_is_ipython = test_ipython.test_python_tool_is_ipython
test_killed_service_leaves_nothing = test_killed.test_killed_service_leaves_nothing
test_killed_spawner_takes_its_sandboxes_along = test_killed.test_killed_spawner_takes_its_sandboxes_along
test_service_and_spawner_killed_at_once = test_killed.test_service_and_spawner_killed_at_once
test_git_commits_without_an_identity = test_root.test_git_commits_without_an_identity
test_git_works_in_the_directory_of_another_uid = test_root.test_git_works_in_the_directory_of_another_uid
test_python_has_its_short_name = test_root.test_python_has_its_short_name


@pytest.fixture(scope="module")
def backend_name() -> BackendName:
    return "apptainer-plain"


@pytest.fixture
def own_scratch(ground: Path) -> Path:
    return scratch_of_nobody(ground)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(ground: Path) -> AsyncIterator[NamespaceBackend]:
    os.environ["PRORL_GYM_TEST_SECRET"] = os.environ["APPTAINERENV_LEAK"] = SECRET
    async with closing(plain_backend(scratch_of_nobody(ground))) as backend:
        yield backend
    del os.environ["PRORL_GYM_TEST_SECRET"], os.environ["APPTAINERENV_LEAK"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: Check, backend: NamespaceBackend) -> None:
    await run_check(check, backend)


@pytest.mark.parametrize(
    "script",
    [
        "echo '|/bin/evil' > /proc/sys/kernel/core_pattern",
        "echo h > /proc/sysrq-trigger",
        "mkdir /tmp/m && mount -t tmpfs none /tmp/m",
        "umount /usr",
        "mknod /tmp/mem c 1 1",
        "hostname evil",
        "cat /proc/1/environ",
        "readlink /proc/1/fd/0",
        "ls /proc/1/root/",
        "touch /usr/x",
        "chroot / true",
    ],
)
async def test_refused(box: RunningSandbox, script: str) -> None:
    result = await bash(box, script)
    assert result.exit_code != 0 and not result.timed_out, result


async def test_payload_is_an_ordinary_user_without_capabilities(backend: NamespaceBackend, box: RunningSandbox) -> None:
    status = (await bash(box, "id -u; grep -E 'Cap(Eff|Bnd|Amb)|NoNewPrivs' /proc/self/status")).stdout.decode()
    assert status.split() == [
        *(str(backend.uid), "CapEff:", "0" * 16, "CapBnd:", "0" * 16, "CapAmb:", "0" * 16, "NoNewPrivs:", "1")
    ]


async def test_host_environment_is_not_there(box: RunningSandbox) -> None:
    seen = await bash(box, "env; cat /proc/*/environ 2>/dev/null")
    assert SECRET.encode() not in seen.stdout and b"HOME=/workspace" in seen.stdout


async def test_name_servers_of_the_host_are_not_there(box: RunningSandbox) -> None:
    shown = (await bash(box, "cat /etc/resolv.conf; getent passwd root")).stdout
    assert shown in (b"", b"root:x:0:0:root:/root:/bin/bash\n")


async def test_mounts_are_read_only(backend: NamespaceBackend, ground: Path) -> None:
    source = ground / "given-plain"
    source.mkdir()
    (source / "file").write_text("given")
    async with closing(await backend.start_sandbox(SandboxSpec(mounts=(Mount(str(source), "/given/here"),)))) as box:
        result = await bash(box, "cat /given/here/file; touch /given/here/x")
        assert (result.stdout, result.exit_code) == (b"given", 1)


@pytest.mark.parametrize(
    ("source", "words"),
    [("/does/not/exist", "mount source .*: No such file"), ("odd:rw", "reads colons, commas and backslashes")],
)
async def test_mount_that_cannot_be_is_our_message(
    backend: NamespaceBackend, ground: Path, source: str, words: str
) -> None:
    (ground / "odd:rw").mkdir(exist_ok=True)
    with pytest.raises(SandboxError, match=words):
        await backend.start_sandbox(SandboxSpec(mounts=(Mount(str(ground / source), "/given"),)))


async def test_file_size_is_bounded(backend: NamespaceBackend) -> None:
    async with closing(await backend.start_sandbox(SandboxSpec(limits=SandboxLimits(file_size=1 << 20)))) as box:
        assert (await bash(box, "head -c 3000000 /dev/zero > big; stat -c %s big")).stdout == b"1048576\n"


async def test_watchdog_ends_a_hog_that_the_kernel_might_spare(backend: NamespaceBackend) -> None:
    hog = """
import time
open("/proc/self/oom_score_adj", "w").write("0")
held = [bytes([1]) * (1 << 20) for _ in range(300)]
time.sleep(60)
"""
    async with closing(await backend.start_sandbox(SandboxSpec(limits=SandboxLimits(total_memory=100 << 20)))) as box:
        result = await box.exec(["python3", "-c", hog], timeout=30)
    assert (result.breach, result.exit_code, result.stderr) == (Breach.MEMORY_SANDBOX, 137, b"")


async def test_closed_sandbox_leaves_no_file(own_scratch: Path) -> None:
    async with closing(plain_backend(own_scratch)) as backend:
        box = await backend.start_sandbox(SandboxSpec())
        await bash(box, "mkdir -p a/b; echo x > a/b/c; chmod 0 a")
        assert os.listdir(own_scratch) == [box.id]
        await box.close()
        await asyncio.wait_for(backend.wait_idle(), 20)
        assert os.listdir(own_scratch) == []


@pytest.fixture
def repository(ground: Path, debian_image: str) -> Path:
    """The base image with a repository in it, of which the sandboxes' uid is the owner."""
    copy = ground / "with-repository"
    subprocess.run(["cp", "-a", debian_image, str(copy)], check=True)
    work = copy / "testbed/pkg"
    work.mkdir(parents=True)
    (work / "file").write_text("old")
    if os.geteuid() == 0:
        subprocess.run(["chown", "-hR", f"{NOBODY}:{NOBODY}", str(copy)], check=True)
    return copy


@pytest.mark.root  # who alone may copy an image with all its owners
async def test_working_directory_of_an_image_is_a_true_copy(backend: NamespaceBackend, repository: Path) -> None:
    async with closing(await backend.start_sandbox(SandboxSpec(image=str(repository), workdir="/testbed"))) as box:
        script = "rm -rf pkg; mkdir pkg; mv pkg other; ls -A other; echo new > /usr/new; cat /usr/new"
        result = await bash(box, script)
        assert (result.stdout, result.stderr) == (b"new\n", b"")
    assert (repository / "testbed/pkg/file").read_text() == "old"
    assert not (repository / "usr/new").exists()


@pytest.fixture
def sif(ground: Path, debian_image: str) -> Path:
    path = ground / "image.sif"
    subprocess.run(["apptainer", "-q", "build", str(path), debian_image], check=True, timeout=200)
    return path


@pytest.mark.root  # who alone may copy an image with all its owners
async def test_sif_file_is_used_as_it_is(backend: NamespaceBackend, sif: Path) -> None:
    async with closing(await backend.start_sandbox(SandboxSpec(image=str(sif)))) as box:
        assert (await bash(box, "cat /etc/debian_version; pwd")).stdout.endswith(b"/workspace\n")


async def test_image_that_the_runtime_refuses_is_its_last_word(backend: NamespaceBackend, tiny_image: Path) -> None:
    with fails_as(FailureKind.SANDBOX_UNAVAILABLE) as caught:
        await backend.start_sandbox(SandboxSpec(image=str(tiny_image)))
    assert caught.value.what.startswith(f"apptainer cannot run {tiny_image}: ") and "/dev" in caught.value.what
    assert "needs python3 in the image" in caught.value.fix


async def test_layers_are_refused(backend: NamespaceBackend, tiny_image: Path) -> None:
    names = Named()
    names.images["two"] = (str(tiny_image), str(tiny_image))
    async with closing(plain_backend(backend.scratch, names)) as other:
        with fails_as(FailureKind.SANDBOX_UNAVAILABLE, match="2 layers"):
            await other.start_sandbox(SandboxSpec(image="two"))


@pytest.mark.root
async def test_uid_without_an_account_is_one_clear_message(scratch: Path) -> None:
    backend = NamespaceBackend("apptainer-plain", SandboxConfig(scratch=scratch))
    probe = await backend.probe()
    await backend.close()
    assert probe.detail == "uid 61099 has no account here, and Apptainer by itself runs for accounts only."
    assert "useradd" in probe.fix


async def test_singularitys_name_serves(
    monkeypatch: pytest.MonkeyPatch, ground: Path, backend: NamespaceBackend
) -> None:
    directory = tempfile.mkdtemp(dir=ground)
    os.chmod(directory, 0o755)
    os.symlink(str(shutil.which("apptainer") or shutil.which("singularity")), f"{directory}/singularity")
    monkeypatch.setenv("PATH", directory)
    async with closing(plain_backend(backend.scratch)) as other:
        assert (await other.probe()).ok
