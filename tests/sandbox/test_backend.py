"""Starting, refusing, cancelling and closing, and listening: the backend as the pipeline uses it."""

import asyncio
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest
from sandbox_support import closing, give_to_sandboxes, sandbox_uid

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import Mount, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def image(ground: Path) -> Path:
    """An image of nothing but a shell, which leads nowhere."""
    path = Path(tempfile.mkdtemp(dir=ground))
    (path / "bin").mkdir()
    (path / "bin/bash").symlink_to("/nowhere")
    give_to_sandboxes(path)
    return path


async def refusal(backend: NamespaceBackend, spec: SandboxSpec) -> SandboxError:
    with pytest.raises(SandboxError) as caught:
        await backend.start_sandbox(spec)
    assert len(str(caught.value).splitlines()) <= 2
    return caught.value


@pytest.mark.parametrize(
    ("spec", "kind", "what"),
    [
        (SandboxSpec(image="/no/where"), FailureKind.IMAGE_MISSING, "image /no/where: No such file or directory."),
        (
            SandboxSpec(mounts=(Mount("/does/not/exist", "/x"),)),
            *(FailureKind.SANDBOX_UNAVAILABLE, "mount source /does/not/exist: No such file or directory."),
        ),
        (
            SandboxSpec(env={"X": "y" * 300_000}),
            *(FailureKind.SANDBOX_UNAVAILABLE, "the sandbox's spec has 300"),
        ),
    ],
    ids=["image", "mount", "spec too long to send"],
)
async def test_a_start_that_cannot_be_is_refused_in_words(
    backend: NamespaceBackend, spec: SandboxSpec, kind: FailureKind, what: str
) -> None:
    error = await refusal(backend, spec)
    assert error.kind is kind and error.what.startswith(what)


@pytest.mark.parametrize("image", ["docker://debian:12", "prorl-python", "images/base", "./host"])
async def test_image_that_takes_a_store_names_its_setting(backend: NamespaceBackend, image: str) -> None:
    error = await refusal(backend, SandboxSpec(image=image))
    assert error.kind is FailureKind.IMAGE_MISSING
    assert image in error.what and "without an image store" in error.what and "sandbox.images" in error.fix


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        *((SandboxSpec(env={name: "x"}), f"env: {name!r} cannot be a variable") for name in ("A=B", "", "A\0")),
        (SandboxSpec(env={"A": "x\0y"}), "env: 'A' cannot be a variable"),
        (SandboxSpec(env={"A\ud800": "x"}), "contains U+D800"),
        (SandboxSpec(env={"A": "\ud800"}), "contains U+D800"),
        (SandboxSpec(workdir="/\ud800"), "contains U+D800"),
    ],
    ids=["sign", "empty", "NUL in a name", "NUL", "name", "value", "directory"],
)
async def test_text_that_cannot_be_passed_on_is_refused(
    backend: NamespaceBackend, spec: SandboxSpec, words: str
) -> None:
    assert words in (await refusal(backend, spec)).what


async def test_image_that_is_a_file_names_the_unpacking(backend: NamespaceBackend, ground: Path) -> None:
    file = ground / f"{backend.name}.sif"
    file.write_bytes(b"x")
    error = await refusal(backend, SandboxSpec(image=str(file)))
    assert error.kind is FailureKind.IMAGE_BROKEN
    assert "without an image store" in error.what
    unpack = f"apptainer build --sandbox {file}.d {file}"
    assert error.fix == f"Set sandbox.images, which unpacks SIF files, or run: {unpack}"


async def test_image_without_a_shell(backend: NamespaceBackend, image: Path) -> None:
    (image / "bin/bash").unlink()
    error = await refusal(backend, SandboxSpec(image=str(image)))
    assert error.kind is FailureKind.IMAGE_BROKEN
    assert error.what == f"image {image} has no bin/bash and no bin/sh."


@pytest.mark.root
async def test_image_of_another_owner_names_the_right_one(backend: NamespaceBackend, image: Path) -> None:
    os.chown(image, 0, 0)
    error = await refusal(backend, SandboxSpec(image=str(image)))
    assert error.kind is FailureKind.IMAGE_BROKEN
    assert "is not owned by uid 61099, as which sandboxes run" in error.what
    assert error.fix.startswith(f"Run: chown -hR 61099:61099 {image} ")


async def test_image_with_a_file_where_a_directory_must_be(backend: NamespaceBackend, image: Path) -> None:
    (image / "proc").write_text("")
    error = await refusal(backend, SandboxSpec(image=str(image)))
    assert error.kind in (FailureKind.IMAGE_BROKEN, FailureKind.SANDBOX_UNAVAILABLE)


@pytest.fixture
def hostile_image(ground: Path, tiny_image: Path) -> tuple[Path, Path]:
    """An image whose /etc and /workspace point at a host directory that the sandboxes' uid may write; and that one."""
    target = Path(tempfile.mkdtemp(dir=ground))
    give_to_sandboxes(target)
    image = Path(tempfile.mkdtemp(dir=ground)) / "image"
    shutil.copytree(tiny_image, image, symlinks=True, ignore=shutil.ignore_patterns("etc"))
    for name in ("etc", "workspace"):
        (image / name).symlink_to(target)
    give_to_sandboxes(image)
    return image, target


async def test_links_of_an_image_lead_nowhere_outside(
    backend: NamespaceBackend, hostile_image: tuple[Path, Path]
) -> None:
    image, target = hostile_image
    try:
        box = await backend.start_sandbox(SandboxSpec(image=str(image)))
    except SandboxError:
        pass  # refusing it is as good
    else:
        await box.close()
    assert os.listdir(target) == []


async def test_cancelled_start_leaves_nothing(backend: NamespaceBackend) -> None:
    for delay in (0.0, 0.001, 0.003, 0.006, 0.01):
        start = asyncio.create_task(backend.start_sandbox(SandboxSpec()))
        await asyncio.sleep(delay)  # at whatever moment of the start this falls
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        if not start.cancelled():
            await start.result().close()
    await asyncio.wait_for(backend.wait_idle(), 10)
    assert os.listdir(backend.scratch) == []


async def test_many_start_at_once(backend: NamespaceBackend) -> None:
    boxes = await asyncio.gather(*(backend.start_sandbox(SandboxSpec()) for _ in range(12)))
    assert all(await asyncio.gather(*(box.is_alive() for box in boxes)))
    assert len({box.id for box in boxes}) == 12
    assert sorted(os.listdir(backend.scratch)) == sorted(box.id for box in boxes)
    await asyncio.gather(*(box.close() for box in boxes))
    await asyncio.wait_for(backend.wait_idle(), 10)
    assert os.listdir(backend.scratch) == []


async def test_probe_works_and_reports_how(backend: NamespaceBackend) -> None:
    probe = await backend.probe()
    assert probe.ok, probe
    assert f"uid {sandbox_uid()}" in probe.detail
    assert await backend.probe() is probe


async def test_closed_backend_starts_nothing(own_backend: NamespaceBackend) -> None:
    box = await own_backend.start_sandbox(SandboxSpec())
    await own_backend.close()
    await own_backend.close()
    assert not await box.is_alive()
    assert (await refusal(own_backend, SandboxSpec())).kind is FailureKind.SANDBOX_UNAVAILABLE
    assert box.id not in os.listdir(own_backend.scratch)


async def test_missing_apptainer_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for program, detail, fix in (
        (None, "Apptainer is not installed.", "userns"),
        (Path("/nowhere/apptainer"), "sandbox.apptainer: no program /nowhere/apptainer.", "Install apptainer"),
    ):
        probe = await NamespaceBackend("apptainer", SandboxConfig(apptainer=program)).probe()
        assert (probe.ok, probe.detail) == (False, detail) and fix in probe.fix


@pytest.mark.slow
@pytest.mark.root
async def test_scratch_out_of_reach_is_one_clear_message() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as closed:
        backend = NamespaceBackend("userns", SandboxConfig(scratch=Path(closed, "scratch")))
        probe = await backend.probe()
        await backend.close()
    assert not probe.ok
    assert f"{closed}/scratch is out of reach of uid 61099" in probe.detail


async def test_only_the_sandbox_itself_reaches_the_port(box: RunningSandbox, backend: NamespaceBackend) -> None:
    async with closing(await backend.start_sandbox(SandboxSpec())) as other:
        # Bound but not listening: the host refuses connections to the port that the sandbox listens on.
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            port = silent.getsockname()[1]
            connect = ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}"]
            with await box.listen(port) as listener:
                assert listener.getsockname() == ("127.0.0.1", port)
                assert (await other.exec(connect, timeout=20)).exit_code != 0
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(silent.getsockname(), timeout=5)
                assert (await box.exec(connect, timeout=20)).exit_code == 0


async def test_the_end_of_a_sandbox_cuts_its_connections(backend: NamespaceBackend) -> None:
    loop = asyncio.get_running_loop()
    doomed = await backend.start_sandbox(SandboxSpec())
    with await doomed.listen(0) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        program = asyncio.ensure_future(
            doomed.exec(["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}; read -r line <&3"], timeout=60)
        )
        async with asyncio.timeout(20):
            connection, _ = await loop.sock_accept(listener)
            with connection:
                await doomed.close()
                assert await loop.sock_recv(connection, 1) == b""
    await asyncio.gather(program, return_exceptions=True)


def fork_once() -> None:
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)


async def test_the_process_of_the_service_never_forks(own_backend: NamespaceBackend) -> None:
    """It has threads, so its sandboxes come from a process without any."""
    forks: list[int] = []
    os.register_at_fork(before=lambda: forks.append(os.getpid()))
    fork_once()
    assert len(forks) == 1, "a fork would be seen"
    box = await own_backend.start_sandbox(SandboxSpec())
    assert (await box.exec(["echo", "here"], timeout=20)).stdout == b"here\n"
    await own_backend.close()
    assert len(forks) == 1
