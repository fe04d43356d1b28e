"""Which tests a run plays."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiers


@dataclass(frozen=True, eq=False)
class Item:
    """As much of a test as its tier depends on."""

    nodeid: str
    marks: tuple[str, ...] = ()
    params: dict[str, str] = field(default_factory=dict)

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(params=self.params)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


HOSTS = ("userns", "apptainer")
PLAIN = [Item("a.py::test_plain"), Item("a.py::test_plain_too"), Item("b.py::test_plain")]
SLOW = [Item("a.py::test_slow", ("slow",))]
FORGIVEN = [Item("a.py::test_one_attack", ("slow", "default"))]
"""Slow, and in the default suite."""
LONG = [Item("a.py::test_long", ("slow", "release"))]
KIT = [Item(f"c.py::test_kit[{number}]", ("kit",)) for number in range(3)]
ATTACKS = [
    Item(f"d.py::test_attack[{host}-{number}]", ("slow", "product"), {"backend_name": host})
    for host in HOSTS
    for number in range(23)
]
ALONE = [Item("e.py::test_once", ("slow", "default", "product"))]
ALL = [*PLAIN, *SLOW, *FORGIVEN, *LONG, *KIT, *ATTACKS, *ALONE]


def config(*flags: str, tenth: int | None = None) -> pytest.Config:
    options: dict[str, Any] = {f"--{flag}": True for flag in flags} | {"--tenth": tenth}
    return cast(pytest.Config, SimpleNamespace(getoption=lambda name: options.get(name)))


def played(*flags: str, tenth: int | None = None, missing: str = "") -> list[Any]:
    chosen = tiers.select(config(*flags, tenth=tenth), cast(Any, ALL), lambda item: item.nodeid != missing)
    return list(chosen)


def test_the_default_suite_leaves_out_what_is_slow_or_long_or_a_product() -> None:
    assert played() == [*PLAIN, *FORGIVEN, *KIT]


def test_all_leaves_nothing_out() -> None:
    assert played("all") == ALL


def test_ten_tenths_have_every_product_and_each_has_a_case_of_each_host() -> None:
    tenths = [[item for item in played("ci", tenth=tenth) if item in ATTACKS] for tenth in range(10)]
    assert Counter(item for tenth in tenths for item in tenth) == Counter(ATTACKS)
    for tenth in tenths:
        hosts = Counter(item.params["backend_name"] for item in tenth)
        assert set(hosts) == set(HOSTS) and set(hosts.values()) <= {2, 3}


def test_ci_has_all_that_is_slow_and_a_lone_product_but_nothing_long() -> None:
    assert [item for item in played("ci", tenth=7) if item not in ATTACKS] == [*PLAIN, *SLOW, *FORGIVEN, *KIT, *ALONE]


def test_a_sample_is_a_tenth_of_everything() -> None:
    chosen = played("ci", "sample", tenth=3)
    assert Counter(item.nodeid.partition(":")[0] for item in chosen if item not in ATTACKS) == Counter(
        {"a.py": 1, "b.py": 1, "c.py": 1, "e.py": 1}
    )


@pytest.mark.parametrize(("missing", "of_a"), [("", PLAIN[0]), (PLAIN[0].nodeid, PLAIN[1])])
def test_one_case_keeps_the_kits_and_a_test_of_each_module_that_can_run(missing: str, of_a: Item) -> None:
    assert played("one-case", missing=missing) == [of_a, PLAIN[2], *KIT]


def test_the_commit_chooses_a_tenth_and_the_header_says_how_to_choose_it_again() -> None:
    tenth = tiers.tenth_of(config("ci"))
    assert 0 <= tenth < 10
    assert f"--tenth {tenth}" in tiers.header(config("ci"))


def test_a_tenth_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(pytest.UsageError, match="0 to 9"):
        tiers.tenth_of(config("ci", tenth=10))
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    with pytest.raises(pytest.UsageError, match="no commit"):
        tiers.tenth_of(config("ci"))
