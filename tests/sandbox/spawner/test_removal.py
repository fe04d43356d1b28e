"""Removing trees that were made to resist."""

import os
from pathlib import Path

import pytest

from prorl_gym.sandbox.tree_removal import remove_tree

LEVELS = 3000


def test_a_tree_deeper_than_any_path(tmp_path: Path) -> None:
    top = tmp_path / "deep"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(LEVELS):
        os.mkdir("d" * 100, dir_fd=here)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove_tree(top)
    assert os.listdir(tmp_path) == []


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    kept.chmod(0o500)
    doomed = tmp_path / "doomed"
    (doomed / "below").mkdir(parents=True)
    (doomed / "below/link").symlink_to(kept)
    (doomed / "link").symlink_to(kept)
    remove_tree(doomed)
    assert os.listdir(tmp_path) == ["kept"]
    assert (kept / "file").read_text() == "x" and kept.stat().st_mode & 0o777 == 0o500


def test_closed_directories_and_special_files(tmp_path: Path) -> None:
    doomed = tmp_path / "doomed"
    (doomed / "a/b/c").mkdir(parents=True)
    os.mkfifo(doomed / "a/b/c/fifo")
    (doomed / "a/b/ .-0").write_text("")
    for path in ("a/b/c", "a/b", "a"):
        (doomed / path).chmod(0)
    remove_tree(doomed)
    assert os.listdir(tmp_path) == []


def test_gone_already_is_fine(tmp_path: Path) -> None:
    remove_tree(tmp_path / "never")
    assert os.listdir(tmp_path) == []


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OSError):
        remove_tree(tmp_path / "link")
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]
