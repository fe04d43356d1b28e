"""Images made of directories, archives, SIF files and definitions, and the python tool's, without a network."""

import asyncio
import gzip
import io
import os
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from images_support import FakeRegistry, entry, layer, tar
from sandbox_support import fails_as, give_to_sandboxes, sandbox_uid

from prorl_gym.errors import ConfigError, FailureKind, SandboxError
from prorl_gym.sandbox.images import python_image
from prorl_gym.sandbox.images.image_import import build_definition, import_image, run_command
from prorl_gym.sandbox.images.store import ImageStore


@pytest.fixture
def tree(place: Path) -> Path:
    path = place / "tree"
    (path / "usr/bin").mkdir(parents=True)
    (path / "usr/bin/tool").write_text("tool")
    (path / "usr/bin/tool").chmod(0o4755)
    (path / "secret").write_text("for root's eyes")
    (path / "secret").chmod(0o600)
    (path / "bin").symlink_to("usr/bin")
    os.link(path / "usr/bin/tool", path / "usr/bin/same")
    return path


def identity(path: str) -> int:
    return os.stat(path).st_ino


def facts(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_uid, stat.S_IMODE(found.st_mode)


async def test_directory_is_copied_for_the_sandboxes(store: ImageStore, tree: Path) -> None:
    await import_image(store, tree, "mine")
    root = Path((await store.resolve("mine")).lower_dirs[0])
    assert facts(root / "usr/bin/tool") == (sandbox_uid(), 0o755)
    assert (root / "secret").read_text() == "for root's eyes"
    assert (root / "usr/bin/tool").stat().st_ino == (root / "usr/bin/same").stat().st_ino
    assert os.readlink(root / "bin") == "usr/bin"


async def test_same_directory_is_the_same_layer(store: ImageStore, tree: Path) -> None:
    first = await import_image(store, tree, "first")
    second = await import_image(store, tree, "second")
    assert first.layers == second.layers
    assert len(store.layers.list_layers()) == 1
    assert os.listdir(store.layers.directory / "building") == []


async def test_archive_is_unpacked(store: ImageStore, place: Path) -> None:
    archive = place / "image.tar.gz"
    archive.write_bytes(gzip.compress(tar(entry("etc/x", b"1"))))
    await import_image(store, archive, "mine")
    assert (Path((await store.resolve("mine")).lower_dirs[0]) / "etc/x").read_bytes() == b"1"


async def test_task_layer_lies_on_its_base(store: ImageStore, fake_registry: FakeRegistry, tree: Path) -> None:
    base = fake_registry.add("base", layer(entry("etc/base", b"1")))
    await import_image(store, tree, "task", base=base)
    image = await store.resolve("task")
    assert [os.listdir(path)[0] in ("usr", "bin", "secret") for path in image.lower_dirs] == [True, False]


async def test_forgotten_image_leaves_no_layer(store: ImageStore, tree: Path) -> None:
    await import_image(store, tree, "mine")
    assert await store.remove_image("mine") == 1
    assert store.layers.list_layers() == []
    with pytest.raises(SandboxError, match="no known name"):
        await store.resolve("mine")


@pytest.mark.parametrize("name", ["host", "A", "a/b", "", "../a"])
async def test_names_that_mean_something_else_are_refused(store: ImageStore, tree: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        await import_image(store, tree, name)


@pytest.fixture
def sif(place: Path) -> Path:
    """A SIF made by Apptainer itself, of a directory."""
    tree = place / "for-sif"
    for name in ("bin", "etc", "locked"):
        (tree / name).mkdir(parents=True)
    (tree / "bin/sh").write_text("#!")
    (tree / "bin/sh").chmod(0o4755)
    (tree / "etc/x").write_text("1")
    (tree / "locked").chmod(0o500)
    give_to_sandboxes(tree)
    path = place / "image.sif"
    subprocess.run(
        [shutil.which("apptainer") or "singularity", "build", path, tree], check=True, capture_output=True, timeout=60
    )
    return path


@pytest.mark.apptainer
async def test_sif_is_unpacked_once(store: ImageStore, sif: Path) -> None:
    image = await store.resolve(str(sif))
    root = Path(image.lower_dirs[0])
    assert facts(root / "bin/sh") == (sandbox_uid(), 0o755)
    assert (root / "etc/x").read_text() == "1"
    made = identity(image.lower_dirs[0])
    assert identity((await store.resolve(str(sif))).lower_dirs[0]) == made


@pytest.mark.apptainer
async def test_cut_sif_is_broken(store: ImageStore, sif: Path) -> None:
    os.truncate(sif, os.path.getsize(sif) // 2)  # noqa: ASYNC240
    with fails_as(FailureKind.IMAGE_BROKEN):
        await store.resolve(str(sif))
    assert store.layers.list_layers() == []


async def test_other_file_is_no_image(store: ImageStore, place: Path) -> None:
    (place / "notes.txt").write_text("hello")
    with pytest.raises(SandboxError, match="neither a directory nor a SIF"):
        await store.resolve(str(place / "notes.txt"))


DEFINITION = """Bootstrap: scratch

%setup
    mkdir -p "${APPTAINER_ROOTFS:-$SINGULARITY_ROOTFS}/bin" "${APPTAINER_ROOTFS:-$SINGULARITY_ROOTFS}/etc"
    echo made > "${APPTAINER_ROOTFS:-$SINGULARITY_ROOTFS}/etc/made"
"""


@pytest.fixture
def definition(place: Path) -> Path:
    path = place / "tiny.def"
    path.write_text(DEFINITION)
    return path


@pytest.mark.apptainer
@pytest.mark.root  # without root a build from scratch needs subordinate uids
async def test_definition_becomes_an_image(store: ImageStore, definition: Path) -> None:
    await build_definition(store, definition, "tiny", seconds=60)
    root = Path((await store.resolve("tiny")).lower_dirs[0])
    assert (root / "etc/made").read_text() == "made\n"
    assert not [name for name in os.listdir(store.layers.directory) if name.startswith(".making-")]


@pytest.mark.apptainer
async def test_wrong_definition_is_reported(store: ImageStore, place: Path) -> None:
    (place / "wrong.def").write_text("Bootstrap: nonsense\n")
    with pytest.raises(ConfigError, match=r"build of .*wrong\.def failed"):
        await build_definition(store, place / "wrong.def", "wrong", seconds=60)
    assert store.records.list_records() == []


async def test_definition_that_is_not_there_is_named(store: ImageStore) -> None:
    with fails_as(FailureKind.IMAGE_MISSING, match=r"/no/such\.def"):
        await build_definition(store, Path("/no/such.def"), "x", seconds=60)


async def test_slow_program_is_killed_with_its_children() -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    with pytest.raises(ConfigError, match="sh was not done after 0 s"):
        await run_command(["sh", "-c", f"exec 9>/proc/{os.getpid()}/fd/{writing}; sleep 60 & sleep 60"], seconds=0.3)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(pipe.read) == b""  # the end comes when the last holder is dead


async def test_missing_program_is_named() -> None:
    with pytest.raises(ConfigError, match="no-such-program is not installed"):
        await run_command(["no-such-program"], seconds=1)


def test_every_wheel_is_pinned_by_version_and_contents() -> None:
    wheels = python_image.locked_wheels()
    assert {name.partition("==")[0] for name in wheels.values()} >= {
        "ipython",
        "numpy",
        "sympy",
        "matplotlib",
        "pytest",
        "ipykernel",
    }
    assert all(digest.startswith("sha256:") and len(digest) == 71 for digest in wheels)


@pytest.mark.root
async def test_changed_package_is_refused(store: ImageStore, place: Path) -> None:
    with tarfile.open(place / "bookworm.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("var/cache/apt/archives/x_1_all.deb"), io.BytesIO())
    (place / "bookworm.lock").write_text("x_1_all.deb sha256:0\n")
    with pytest.raises(ConfigError, match=r"bookworm\.tar does not match bookworm\.lock"):
        await python_image.build(store, place)
