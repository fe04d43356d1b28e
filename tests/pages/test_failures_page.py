"""The page about failing engines says what the committed report says, and leaves out no row that is lost."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)
    yield import_module("failures_page")
    for name in {"failures_page", "figures_page"} - before:
        del sys.modules[name]


def cell(system: str, fault: str, **changes: Any) -> dict[str, Any]:
    counts = ("silent", "marked", "lost", "unanswered", "marked_zeros")
    given = {"system": system, "row": "program", "fault": fault, "rollouts": 8, "solved": 8, **dict.fromkeys(counts, 0)}
    tokens = dict.fromkeys(("kept_tokens", "exact_tokens", "kept_versions", "right_versions"), 0)
    return {**given, **tokens, "seconds": 2.0, "has_died": False, "reasons": [], **changes}


def test_the_page_is_what_the_report_says(script: ModuleType) -> None:
    report = json.loads(script.REPORT.read_text("utf-8"))
    assert not report["quick"], "made with --short: measure again without it"
    assert script.PAGE.read_text("utf-8") == script.page(report), "run: python scripts/failures_page.py"


def test_every_system_was_measured_and_solved_its_rows_with_a_healthy_engine(script: ModuleType) -> None:
    report = json.loads(script.REPORT.read_text("utf-8"))
    healthy = [cell for cell in report["cells"] if cell["fault"] == script.HEALTHY]
    assert healthy and all(cell["solved"] == cell["rollouts"] for cell in healthy)
    assert len({cell["system"] for cell in healthy}) == 7


def test_outcomes_are_in_words(script: ModuleType) -> None:
    assert script.outcome(cell("ours", "f")) == "all solved; 2 s"
    failed = cell("ours", "f", solved=4, silent=2, marked=1, lost=1, has_died=True)
    assert script.outcome(failed) == "4 solved, **2 silent zeros**, 1 marked, 1 lost, **stopped working**; 2 s"


def test_totals_leave_out_the_healthy_engine(script: ModuleType) -> None:
    table = script.total_table([cell("ours", "none"), cell("ours", "f", solved=7, silent=1), cell("ours", "g")])
    assert "| program | ours | 15 of 16 | **1** | 0 (0) | 0 (0) | none kept | none kept | 4 |" in table


def test_where_a_peer_is_better_is_named(script: ModuleType) -> None:
    cells = [
        cell("ours", "f", solved=7, lost=1),
        cell("rival", "f"),
        cell("ours", "g", seconds=3.0),
        cell("rival", "g"),
        cell("ours", "h"),
        cell("rival", "h", solved=5, silent=3, seconds=1.0),
    ]
    assert list(script.losses(cells)) == [
        "program, ours, f: 7 solved; rival: 8",
        "program, ours: rival solved as many in less time under: g (3 s; 2 s)",
    ]
