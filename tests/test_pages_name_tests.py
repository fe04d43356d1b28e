"""Pages name tests that exist: the threat model, the table of faults, and the promises of the README."""

import re

import pytest
from sources import TESTS, functions_of

from prorl_gym.testing.sandbox import conformance

DOCS = TESTS.parent / "docs"
CHECKS = {check.__name__ for check in conformance.CHECKS}
NAMED = re.compile(r"`(test_\w+)?(?:::(test_\w+))?`")


@pytest.fixture(scope="module")
def there() -> dict[str, set[str]]:
    """Functions of each test file, by its name without the ending. Files of one name are taken together."""
    found: dict[str, set[str]] = {}
    shared: dict[str, set[str]] = {}
    for file in TESTS.rglob("*.py"):
        found.setdefault(file.stem, set()).update(functions_of(file))
        shared.setdefault(file.stem, set()).update(re.findall(r"^from (\w+) import \*", file.read_text("utf-8"), re.M))
    return {
        name: functions.union(*(found[module] for module in shared.get(name, ())))
        for name, functions in found.items()
        if name.startswith("test_")
    }


def rows(page: str, last: str) -> list[tuple[str, str]]:
    """First and last cell of each row of the tables whose last column has this name."""
    found: list[tuple[str, str]] = []
    for table in re.findall(r"(?:^\|.*\n)+", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE):
        cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
        if cells[0][-1] == last:
            found += [(row[0], row[-1]) for row in cells[2:]]
    return found


def test_every_promise_names_tests_that_exist(there: dict[str, set[str]]) -> None:
    table = rows("threat-model.md", "tests")
    assert len(table) > 50
    for promise, tests in table:
        names, file = 0, ""
        for file_name, function in NAMED.findall(tests):
            file = file_name or file
            assert file in there, f"{promise}: there is no {file}.py"
            assert not function or function in there[file], f"{promise}: {file} has no {function}"
            names += 1
        assert names or "kit " in tests, f"{promise}: no test"


def test_every_check_of_the_kit_that_is_named_exists() -> None:
    for attack, tests in rows("threat-model.md", "tests"):
        for kit in re.findall(r"kit ((?:`\w+`(?:, )?)+)", tests):
            assert set(re.findall(r"`(\w+)`", kit)) <= CHECKS, attack


FAULTS = (DOCS / "faults.md").read_text("utf-8").partition("## The published server")[2]
PARTS = dict(zip(("published", "own"), FAULTS.split("## Our own"), strict=True))
FAULT = re.compile(r"^\|([^| -][^|]+)\|([^|]+)\|$", re.MULTILINE)


def test_every_published_fault_has_its_line() -> None:
    assert len(FAULT.findall(PARTS["published"])) == 41


@pytest.mark.parametrize("part", PARTS)
def test_every_fault_names_tests_that_exist(part: str, there: dict[str, set[str]]) -> None:
    known = {name.removeprefix("test_") for name in CHECKS.union(*there.values())}
    for fault, tests in FAULT.findall(PARTS[part]):
        named = re.findall(r"`(\w+)`", tests)
        assert named, f"{fault}: no test"
        assert set(named) <= known, f"{fault}: {sorted(set(named) - known)}"


def test_each_promise_of_the_readme_names_a_test_that_exists() -> None:
    readme = (TESTS.parent / "README.md").read_text(encoding="utf-8")
    promises = readme.partition("## What it promises")[2].partition("##")[0]
    found = re.findall(r"^\| \*\*(.+?)\*\* \|.*\[`(test_\w+)`\]\((tests/[\w/.]+)\) \|$", promises, re.MULTILINE)
    assert len(found) == 5
    for promise, test, file in found:
        assert test in functions_of(TESTS.parent / file), promise
