"""Counting a tree that is large, linked, hidden or too deep."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_gym.sandbox.guest.disk_watch import TreeUsage, TreeWalker


@pytest.fixture
def top(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def whole(census: TreeWalker) -> TreeUsage:
    while not census.advance(0):
        continue
    return census.usage


def test_bytes_and_files(tmp_path: Path, top: int) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_bytes(bytes(1 << 20))
    os.sync()
    found = whole(TreeWalker(top))
    assert found.files == 3 and not found.is_too_deep
    assert 1 << 20 <= found.bytes < (1 << 20) + (64 << 10)


def test_hard_links_count_once_and_links_lead_nowhere(tmp_path: Path, top: int) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    os.link(tmp_path / "file", tmp_path / "again")
    (tmp_path / "link").symlink_to("/usr")
    (tmp_path / "circle").symlink_to(".")
    found = whole(TreeWalker(top))
    assert found.files == 3 and found.bytes < 2 << 20


def test_holes_do_not_count(tmp_path: Path, top: int) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    assert whole(TreeWalker(top)).bytes < 1 << 20


def test_it_takes_its_time_in_pieces(tmp_path: Path, top: int) -> None:
    for number in range(300):
        (tmp_path / f"{number}").mkdir()
    census = TreeWalker(top)
    assert not census.advance(0) and census.is_walking and 0 < census.usage.files < 300
    assert whole(census).files == 300 and not census.is_walking


def test_what_is_too_deep_is_reported(tmp_path: Path, top: int) -> None:
    here = os.dup(top)
    for _ in range(25):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert whole(TreeWalker(top)).is_too_deep
