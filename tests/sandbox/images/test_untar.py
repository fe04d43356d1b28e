"""Unpacking a layer that wants out: links, devices, bombs; and deletions as overlayfs understands them."""

import io
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from images_support import directory, entry, symlink, tar
from sandbox_support import fails_as

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.images.unpack import LayerLimits, UnpackStats, unpack_tar

ROOMY = LayerLimits(1 << 20, 1000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def put(root: Path, *entries: Any, bounds: LayerLimits = ROOMY) -> UnpackStats:
    return unpack_tar(io.BytesIO(tar(*entries)), str(root), bounds)


def test_files_keep_contents_modes_and_dates(root: Path) -> None:
    put(root, directory("usr"), entry("usr/x", b"1", mode=0o755), symlink("lib", "usr/lib"))
    found = (root / "usr/x").stat()
    assert ((root / "usr/x").read_bytes(), stat.S_IMODE(found.st_mode), found.st_mtime) == (b"1", 0o755, 1_600_000_000)
    assert os.readlink(root / "lib") == "usr/lib"


def test_absolute_names_are_below_the_root(root: Path) -> None:
    put(root, entry("/etc/x", b"1"))
    assert (root / "etc/x").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["../out", "a/../../out", "a/.."])
def test_dots_are_refused(root: Path, name: str) -> None:
    with pytest.raises(SandboxError, match="leads outside"):
        put(root, entry(name, b"1"))
    assert [path.name for path in root.parent.iterdir()] == ["root"]


@pytest.mark.parametrize("absolute", [True, False])
def test_file_below_a_link_stays_inside(root: Path, absolute: bool) -> None:
    (root.parent / "outside").mkdir()
    target = str(root.parent / "outside") if absolute else "../outside"
    put(root, symlink("a", target), entry(f"{str(root.parent)[1:]}/outside/seen"), directory("outside"), entry("a/x"))
    assert list((root.parent / "outside").iterdir()) == []
    assert any(path.name == "x" for path in root.rglob("x"))


def test_link_is_replaced_not_followed(root: Path) -> None:
    victim = root.parent / "victim"
    victim.write_text("mine")
    put(root, symlink("a", str(victim)), entry("a", b"theirs"))
    assert (victim.read_text(), (root / "a").read_text()) == ("mine", "theirs")


def test_directory_over_link_does_not_change_its_target(root: Path) -> None:
    outside = root.parent / "outside"
    outside.mkdir(mode=0o700)
    put(root, symlink("a", str(outside)), directory("a", 0o777))
    assert (stat.S_IMODE(outside.stat().st_mode), (root / "a").is_symlink()) == (0o700, False)


@pytest.mark.parametrize("link", ["../victim", "/etc/hostname", "way/victim"])
def test_hard_link_to_the_outside_is_refused(root: Path, link: str) -> None:
    (root.parent / "victim").write_text("mine")
    with fails_as(FailureKind.IMAGE_BROKEN):
        put(root, symlink("way", str(root.parent)), entry("x", kind=tarfile.LNKTYPE, link=link))
    assert not (root / "x").exists()


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_are_left_out(root: Path, kind: bytes) -> None:
    assert put(root, entry("null", kind=kind)).skipped == 1
    assert list(root.iterdir()) == []


def test_setuid_bits_are_dropped(root: Path) -> None:
    put(root, entry("su", b"x", mode=0o6755), directory("tmp", 0o3777))
    assert stat.S_IMODE((root / "su").stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "tmp").stat().st_mode) == 0o1777


def test_closed_directories_stay_open_to_their_owner(root: Path) -> None:
    put(root, directory("a", 0o000), entry("a/x", b"1", mode=0o000))
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "a/x").stat().st_mode) == 0o400


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh..."])
def test_deletion_of_nothing_is_refused(root: Path, name: str) -> None:
    with pytest.raises(SandboxError, match="deletes"):
        put(root, entry(f"etc/{name}"))


def test_extended_attributes_are_dropped(root: Path) -> None:
    info, data = entry("a", b"1")
    info.pax_headers = {"SCHILY.xattr.user.overlay.redirect": "/etc", "SCHILY.xattr.security.capability": "x"}
    put(root, (info, data))
    assert os.listxattr(root / "a") == []


@pytest.mark.parametrize(
    ("entries", "words", "left"),
    [
        ([entry("a", b"12345"), entry("b", b"123456")], "more than 10 bytes", ["a"]),
        ([entry(str(number)) for number in range(6)], "or 5 entries", [*"01234"]),
    ],
    ids=["bytes", "entries"],
)
def test_too_much_is_refused_before_it_is_written(root: Path, entries: list[Any], words: str, left: list[str]) -> None:
    with pytest.raises(SandboxError, match=words):
        put(root, *entries, bounds=LayerLimits(10, 5))
    assert sorted(path.name for path in root.iterdir()) == left


WHOLE = tar(entry("a", b"1" * 600), entry("b", b"2" * 600))


@pytest.mark.parametrize("data", [WHOLE[:600], WHOLE[:1100], b"no archive at all" * 100], ids=["cut", "torn", "noise"])
def test_damaged_archive_is_refused(root: Path, data: bytes) -> None:
    with pytest.raises(SandboxError, match="damaged"):
        unpack_tar(io.BytesIO(data), str(root), ROOMY)
