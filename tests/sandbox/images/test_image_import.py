"""Taking in directories, archives and SIF files, and what an overlay of their layers shows."""

import gzip
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from images_support import FakeRegistry, directory, entry, layer, tar
from sandbox_support import give_to_sandboxes, sandbox_uid

from prorl_gym.errors import ConfigError, FailureKind, SandboxError
from prorl_gym.sandbox.images.image_import import import_image
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


async def test_overlay_of_the_layers_shows_deletions(store: ImageStore, fake_registry: FakeRegistry) -> None:
    low = layer(directory("etc"), entry("etc/gone", b"1"), entry("etc/kept", b"1"), entry("opt/old", b"1"))
    high = layer(entry("etc/.wh.gone"), entry("opt/.wh..wh..opq"), entry("opt/new", b"1"))
    image = await store.resolve(fake_registry.add("image", low, high))
    script = f'mount -t overlay -o "lowerdir={":".join(image.lower_dirs)},userxattr" o /mnt && cd /mnt && ls etc opt'
    command = ["unshare", *(["--mount"] if os.geteuid() == 0 else ["--map-root-user", "--mount"]), "sh", "-ec", script]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: ASYNC221
    assert (shown.stdout, shown.stderr) == ("etc:\nkept\n\nopt:\nnew\n", "")


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
    with pytest.raises(SandboxError) as caught:
        await store.resolve(str(sif))
    assert caught.value.kind is FailureKind.IMAGE_BROKEN
    assert store.layers.list_layers() == []


async def test_other_file_is_no_image(store: ImageStore, place: Path) -> None:
    (place / "notes.txt").write_text("hello")
    with pytest.raises(SandboxError, match="neither a directory nor a SIF"):
        await store.resolve(str(place / "notes.txt"))
