"""docs/published-faults.md and docs/own-faults.md: every fault has its line, and every test that it names is there."""

import re

import pytest
from sources import TESTS, files_of_tests, functions_of

KITS = TESTS.parent / "prorl_gym" / "testing" / "sandbox" / "conformance"
"""Checks that each backend's tests run."""
PAGES = {name: (TESTS.parent / "docs" / name).read_text("utf-8") for name in ("published-faults.md", "own-faults.md")}
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def there() -> set[str]:
    tests = [file for file in files_of_tests() if file.name.startswith("test_")]
    return {name for file in (*tests, *KITS.glob("*.py")) for name in functions_of(file)}


def test_every_fault_of_the_published_server_has_its_line() -> None:
    assert [int(number) for number, *_ in ROW.findall(PAGES["published-faults.md"])] == list(range(1, 42))


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_a_table_is_malformed(page: str) -> None:
    lines = [line for line in PAGES[page].splitlines() if re.match(r"\| \d", line)]
    assert [int(number) for number, *_ in ROW.findall(PAGES[page])] == list(range(1, len(lines) + 1)) and lines


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_is_named_exists(page: str, there: set[str]) -> None:
    for number, _, _, tests in ROW.findall(PAGES[page]):
        named = re.findall(r"`([^`]+)`", tests)
        assert named, f"fault {number}: no test"
        assert set(named) <= there, f"fault {number}: {sorted(set(named) - there)}"
