"""docs/threat-model.md and docs/sandbox-attacks.md name tests that exist, and each promise names one."""

import re

import pytest
from sources import TESTS, files_of_tests, functions_of

from prorl_gym.testing.sandbox import conformance

DOCS = TESTS.parent / "docs"
NAMED = re.compile(r"`(test_\w+)?(?:::(test_\w+))?`")


@pytest.fixture(scope="module")
def there() -> dict[str, set[str]]:
    """Functions of each test file, by its name without the ending. Files of one name are taken together."""
    found: dict[str, set[str]] = {}
    shared: dict[str, set[str]] = {}
    for file in files_of_tests():
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


@pytest.mark.parametrize("page", ["threat-model.md", "sandbox-attacks.md"])
def test_every_promise_names_tests_that_exist(page: str, there: dict[str, set[str]]) -> None:
    table = rows(page, "tests")
    assert len(table) > 10
    for promise, tests in table:
        names, file = 0, ""
        for file_name, function in NAMED.findall(tests):
            file = file_name or file
            assert file in there, f"{promise}: there is no {file}.py"
            assert not function or function in there[file], f"{promise}: {file} has no {function}"
            names += 1
        assert names or "kit " in tests, f"{promise}: no test"


def test_every_check_of_the_kit_that_is_named_exists() -> None:
    checks = {check.__name__ for check in conformance.CHECKS}
    for attack, tests in rows("sandbox-attacks.md", "tests"):
        for kit in re.findall(r"kit ((?:`\w+`(?:, )?)+)", tests):
            assert set(re.findall(r"`(\w+)`", kit)) <= checks, attack


def test_every_page_that_is_linked_exists() -> None:
    for page in (DOCS / "threat-model.md", TESTS.parent / "SECURITY.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page.name}: {target}"
