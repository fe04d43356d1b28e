"""Starting, refusing, cancelling and closing: the backend as the pipeline uses it."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox_support import give_to_sandboxes, sandbox_uid

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import HOST_IMAGE, Mount, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend

pytestmark = pytest.mark.asyncio(loop_scope="module")


def make_image(ground: Path, build: Callable[[Path], None]) -> Path:
    path = Path(tempfile.mkdtemp(dir=ground))
    build(path)
    give_to_sandboxes(path)
    return path


def with_shell(path: Path) -> None:
    (path / "bin").mkdir()
    (path / "bin/bash").symlink_to("/nowhere")


async def refusal(backend: NamespaceBackend, spec: SandboxSpec) -> SandboxError:
    with pytest.raises(SandboxError) as caught:
        await backend.start_sandbox(spec)
    assert len(str(caught.value).splitlines()) <= 2
    return caught.value


async def test_missing_image(backend: NamespaceBackend, ground: Path) -> None:
    error = await refusal(backend, SandboxSpec(image=str(ground / "nowhere")))
    assert error.kind is FailureKind.IMAGE_MISSING
    assert error.what == f"image {ground}/nowhere: No such file or directory."


@pytest.mark.parametrize("image", ["docker://debian:12", "prorl-python", "images/base"])
async def test_image_that_takes_a_store_names_its_setting(backend: NamespaceBackend, image: str) -> None:
    error = await refusal(backend, SandboxSpec(image=image))
    assert error.kind is FailureKind.IMAGE_MISSING
    assert image in error.what and "without an image store" in error.what and "sandbox.images" in error.fix


@pytest.mark.parametrize("env", [{"A=B": "x"}, {"": "x"}, {"A": "x\0y"}, {"A\0": "x"}])
async def test_variables_that_no_program_can_have(backend: NamespaceBackend, env: dict[str, str]) -> None:
    error = await refusal(backend, SandboxSpec(env=env))
    assert error.what.startswith(f"env: {next(iter(env))!r} cannot be a variable")


async def test_image_that_is_a_file_names_the_unpacking(backend: NamespaceBackend, ground: Path) -> None:
    file = ground / f"{backend.name}.sif"
    file.write_bytes(b"x")
    error = await refusal(backend, SandboxSpec(image=str(file)))
    assert error.kind is FailureKind.IMAGE_BROKEN
    assert "without an image store" in error.what
    unpack = f"apptainer build --sandbox {file}.d {file}"
    assert error.fix == f"Set sandbox.images, which unpacks SIF files, or run: {unpack}"


async def test_image_without_a_shell(backend: NamespaceBackend, ground: Path) -> None:
    image = make_image(ground, lambda path: None)
    error = await refusal(backend, SandboxSpec(image=str(image)))
    assert error.kind is FailureKind.IMAGE_BROKEN
    assert error.what == f"image {image} has no bin/bash and no bin/sh."


@pytest.mark.root
async def test_image_of_another_owner_names_the_right_one(backend: NamespaceBackend, ground: Path) -> None:
    image = make_image(ground, with_shell)
    os.chown(image, 0, 0)
    error = await refusal(backend, SandboxSpec(image=str(image)))
    assert error.kind is FailureKind.IMAGE_BROKEN
    assert "is not owned by uid 61099, as which sandboxes run" in error.what
    assert error.fix.startswith(f"Run: chown -hR 61099:61099 {image} ")


async def test_image_with_a_file_where_a_directory_must_be(backend: NamespaceBackend, ground: Path) -> None:
    def build(path: Path) -> None:
        with_shell(path)
        (path / "proc").write_text("")

    error = await refusal(backend, SandboxSpec(image=str(make_image(ground, build))))
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


async def test_missing_mount_source(backend: NamespaceBackend) -> None:
    error = await refusal(backend, SandboxSpec(mounts=(Mount("/does/not/exist", "/x"),)))
    assert error.kind is FailureKind.SANDBOX_UNAVAILABLE
    assert error.what == "mount source /does/not/exist: No such file or directory."


async def test_spec_too_long_to_send(backend: NamespaceBackend) -> None:
    error = await refusal(backend, SandboxSpec(env={"X": "y" * 300_000}))
    assert error.kind is FailureKind.SANDBOX_UNAVAILABLE and "at most" in error.what


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


async def test_dead_spawner_is_replaced(backend_name: str, scratch: Path) -> None:
    backend = NamespaceBackend("apptainer" if backend_name == "apptainer" else "userns", SandboxConfig(scratch=scratch))
    try:
        box = await backend.start_sandbox(SandboxSpec())
        spawner = await backend.spawner_pid()
        os.kill(spawner, 9)
        with pytest.raises(SandboxError) as caught:
            while True:  # ends with the kernel's answer to the kill
                await box.exec(["true"], timeout=5)
        assert caught.value.kind is FailureKind.SANDBOX_LOST
        assert not await box.is_alive()
        await box.close()
        other = await backend.start_sandbox(SandboxSpec())
        assert await other.is_alive()
        assert await backend.spawner_pid() != spawner
    finally:
        await backend.close()


async def test_closed_backend_starts_nothing(backend_name: str, scratch: Path) -> None:
    backend = NamespaceBackend("apptainer" if backend_name == "apptainer" else "userns", SandboxConfig(scratch=scratch))
    box = await backend.start_sandbox(SandboxSpec())
    await backend.close()
    await backend.close()
    assert not await box.is_alive()
    assert (await refusal(backend, SandboxSpec())).kind is FailureKind.SANDBOX_UNAVAILABLE
    assert box.id not in os.listdir(scratch)


async def test_missing_apptainer_is_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    probe = await NamespaceBackend("apptainer", SandboxConfig()).probe()
    assert (probe.ok, probe.detail) == (False, "Apptainer is not installed.")
    assert "userns" in probe.fix


async def test_missing_program_of_the_configuration_is_one_clear_message() -> None:
    probe = await NamespaceBackend("apptainer", SandboxConfig(apptainer=Path("/nowhere/apptainer"))).probe()
    assert (probe.ok, probe.detail) == (False, "sandbox.apptainer: no program /nowhere/apptainer.")
    assert "Install apptainer" in probe.fix


@pytest.mark.slow
async def test_unusable_scratch_is_one_clear_message(ground: Path) -> None:
    link = ground / "link"
    link.symlink_to("/var/tmp")
    backend = NamespaceBackend("userns", SandboxConfig(scratch=link))
    probe = await backend.probe()
    await backend.close()
    assert not probe.ok
    assert probe.detail == f"scratch directory {link} is not a directory (symbolic links are refused)."


@pytest.mark.slow
@pytest.mark.root
async def test_scratch_out_of_reach_is_one_clear_message() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as closed:
        backend = NamespaceBackend("userns", SandboxConfig(scratch=Path(closed, "scratch")))
        probe = await backend.probe()
        await backend.close()
    assert not probe.ok
    assert f"{closed}/scratch is out of reach of uid 61099" in probe.detail


async def test_image_and_host_are_distinguished_by_name_only(backend: NamespaceBackend) -> None:
    assert (await refusal(backend, SandboxSpec(image=f"./{HOST_IMAGE}"))).kind is FailureKind.IMAGE_MISSING
