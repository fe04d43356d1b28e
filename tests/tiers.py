"""Which tests a run plays: the default suite, what ``.ci/run`` adds to it, or all.

``slow`` tests, which start real sandboxes or servers, are added by ``--ci``; those that ask for a fixture of a real
sandbox are slow without the mark. A test marked ``default`` is in the default suite though it or its module is slow.
Tests marked ``product`` repeat a promise on
another host (a backend, a user, a way to begin): ``--ci`` plays a tenth of them, which the commit chooses. Tests marked
``release`` are played with ``--all`` only (``make release-check``), which leaves nothing out.
"""

import hashlib
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
PARTS = 10
NOT_DEFAULT = ("release", "product", "slow")
REAL_SANDBOXES = {"backend_name", "backend", "box", "leases", "real_sandboxes"}
"""Fixtures that start some, in every folder."""


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--ci", action="store_true", help="also run what is slow, and a tenth of what is a product")
    parser.addoption("--all", action="store_true", help="run everything")
    parser.addoption("--tenth", type=int, help="which tenth --ci plays, 0 to 9 (by default, the commit decides)")
    parser.addoption("--sample", action="store_true", help="play a tenth of everything, not of products alone")
    parser.addoption("--one-case", action="store_true", help="run the kits, and of each other module one test")


def tenth_of(config: pytest.Config) -> int:
    """Return which tenth of the products this run plays.

    Raises:
        pytest.UsageError: the option names none, or it is not given and there is no commit.
    """
    given = config.getoption("--tenth")
    if given is None:
        asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        if not commit:
            raise pytest.UsageError("this checkout has no commit that chooses a tenth of the products: give --tenth N.")
        return int(commit, 16) % PARTS
    if not 0 <= given < PARTS:
        raise pytest.UsageError(f"--tenth {given}: there are {PARTS}, 0 to {PARTS - 1}.")
    return given


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the tests that start real sandboxes, save those that the default suite has for their class."""
    for item in items:
        if not _has(item, "default") and REAL_SANDBOXES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


def header(config: pytest.Config) -> str:
    """Return what a run prints about its tier."""
    if config.getoption("--ci") or config.getoption("--sample"):
        tenth = tenth_of(config)
        return f"tenth {tenth} of the products (chosen again by --tenth {tenth})"
    return "all tests" if config.getoption("--all") else "the default suite"


def select(
    config: pytest.Config, items: list[pytest.Item], can_run: Callable[[pytest.Item], bool]
) -> list[pytest.Item]:
    """Return the tests of this run's tier, in their order."""
    left_out = () if config.getoption("--all") else ("release",) if config.getoption("--ci") else NOT_DEFAULT
    chosen = [item for item in items if not any(_is(item, name) for name in left_out)]
    if config.getoption("--sample"):
        chosen = _tenth(chosen, lambda item: True, tenth_of(config))
    elif config.getoption("--ci"):
        chosen = _tenth(chosen, lambda item: _has(item, "product"), tenth_of(config))
    return _one_case(chosen, can_run) if config.getoption("--one-case") else chosen


def _has(item: pytest.Item, marker: str) -> bool:
    return item.get_closest_marker(marker) is not None


def _is(item: pytest.Item, tier: str) -> bool:
    return _has(item, tier) and not (tier == "slow" and _has(item, "default"))


def _tenth(items: list[pytest.Item], is_product: Callable[[pytest.Item], bool], tenth: int) -> list[pytest.Item]:
    """Leave out all products but a tenth, to which each module contributes on each host at least one test."""
    groups: dict[tuple[str, ...], list[pytest.Item]] = defaultdict(list)
    for item in filter(is_product, items):
        groups[_place(item)].append(item)
    played: set[pytest.Item] = set()
    for group in groups.values():
        group.sort(key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
        parts = min(len(group), PARTS)
        played.update(group[tenth % parts :: parts])
    return [item for item in items if not is_product(item) or item in played]


def _place(item: pytest.Item) -> tuple[str, ...]:
    """Return the module of a test and the host that it runs on: the parameters of fixtures that a module shares."""
    case = getattr(item, "callspec", None)
    hosts = ("backend_name", "beginning")
    return (item.nodeid.partition("::")[0], *(str(case.params.get(name)) for name in hosts if case is not None))


def _one_case(items: Iterable[pytest.Item], can_run: Callable[[pytest.Item], bool]) -> list[pytest.Item]:
    """Leave out all but the kits and the first test of each module that can run, if there is one."""
    items = list(items)
    first: dict[str, pytest.Item] = {}
    for item in sorted(items, key=lambda item: not can_run(item)):
        first.setdefault(item.nodeid.partition("::")[0], item)
    return [item for item in items if _has(item, "kit") or first[item.nodeid.partition("::")[0]] is item]
