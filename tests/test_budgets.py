"""Rooms keep to the lines that ``docs/architecture.md`` allows them, and the documentation to its size."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import ROOT, in_one_worker, package_files

pytestmark = in_one_worker
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`[^|\n]+) \|(?:[^|\n]+\|)* ([\d,]+) \|$", PAGE, re.MULTILINE)


def budgets() -> dict[tuple[str, ...], int]:
    """Lines allowed, by the rooms that share them: packages, modules of the package's root, or top-level folders."""
    return {
        tuple(name.removesuffix("/") for name in re.findall(r"`([\w/]+)`", rooms)): int(lines.replace(",", ""))
        for rooms, lines in ROWS
    }


def files_of(room: str) -> Iterator[Path]:
    if room in ("tests", "bench"):
        yield from (ROOT / room).rglob("*.py")
    else:
        package = ROOT / "prorl_gym" / room
        yield from package.rglob("*.py") if package.is_dir() else [package.with_suffix(".py")]


def lines_of(files: Iterator[Path]) -> int:
    return sum(file.read_bytes().count(b"\n") for file in files)


@pytest.mark.parametrize("rooms", budgets(), ids=",".join)
def test_a_room_keeps_to_its_budget(rooms: tuple[str, ...]) -> None:
    assert lines_of(file for room in rooms for file in files_of(room)) <= budgets()[rooms]


def test_every_file_of_the_package_lies_in_a_room() -> None:
    counted = [file for rooms in budgets() for room in rooms for file in files_of(room)]
    assert set(package_files()) - set(counted) == {ROOT / "prorl_gym/__init__.py", ROOT / "prorl_gym/__main__.py"}
    assert len(counted) == len(set(counted)), "a file lies in two rooms"


def test_the_documentation_keeps_to_its_size() -> None:
    pages, kilobytes = map(int, re.findall(r"`docs/`: at most (\d+) pages and (\d+) kB", PAGE)[0])
    found = list((ROOT / "docs").glob("*.md"))
    assert len(found) <= pages
    assert sum(page.stat().st_size for page in found) <= kilobytes * 1000
