"""The figures on the pages are those of the committed reports, and every lost row is marked."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "figures_page.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("figures_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def report(*rows: dict[str, Any], ratios: bool = True) -> dict[str, Any]:
    return {
        **{"bench": "shell", "date": "2026-01-02", "quick": False, "figures": list(rows), "machine": "2 cores"},
        **{"ratios": {} if ratios else None, "load_average": 1.0, "load_average_after": 1.5, "cores": 2},
        "versions": {"python": "3.13"},
    }


def row(value: float = 2.0, *, peer: float = 8.0, wanted: float | None = None, **changes: Any) -> dict[str, Any]:
    peers = [{"name": "rival", "value": peer, "target": wanted}]
    given = {"name": "speed", "backend": "userns", "unit": "ms", "better": "lower", "target": 4.0, "runs": [value]}
    return {**given, "value": value, "peers": peers, **changes}


def test_the_page_is_what_the_reports_say(script: ModuleType) -> None:
    assert script.PAGE.read_text("utf-8") == script.page(script.load()), "run: python scripts/figures_page.py"


def test_every_sandbox_bench_has_a_report(script: ModuleType) -> None:
    assert {about.name for about in script.SECTIONS} == set(script.load())


def test_a_figure_stands_beside_its_peer_with_the_ratio(script: ModuleType) -> None:
    page = script.page({"shell": report(row(wanted=3.0))})
    assert "| speed, ms | 2 |  | <= 4 |" in page
    assert "| speed, ms | rival | 8 | 4x (wanted: 3x) |  |" in page


def test_backends_with_targets_of_their_own(script: ModuleType) -> None:
    page = script.page({"shell": report(row(), row(backend="apptainer", target=40.0))})
    assert "| speed, ms | 2 | 2 | <= 4 / 40 |" in page


@pytest.mark.parametrize(
    ("lost", "mark"),
    [
        (row(9.0, peer=10.0), "**9 (missed)**"),
        (row(peer=1.0), "**0.5x: the peer is better**"),
        (row(wanted=5.0), "4x (wanted: 5x, **missed**)"),
        (row(peer=1.0, better="higher", target=None), ""),
        (row(peer=8.0, better="higher", target=None), "**0.25x: the peer is better**"),
        (row(0.0, peer=0.0, target=0.0), ""),
    ],
    ids=["target", "peer", "ratio", "higher is better", "lower than a peer", "nothing left of nothing"],
)
@pytest.mark.parametrize("backend", ["userns", None], ids=["a sandbox's", "no backend's"])
def test_what_is_lost_is_marked(script: ModuleType, lost: dict[str, Any], mark: str, backend: str | None) -> None:
    page = script.page({"shell": report({**lost, "backend": backend})}).removeprefix(script.HEAD)
    marked = [cell for line in page.splitlines() for cell in line.split(" | ") if "**" in cell]
    assert [cell.strip("| ") for cell in marked] == ([mark] if mark else [])


def test_a_better_peer_keeps_the_ratio_that_was_wanted(script: ModuleType) -> None:
    page = script.page({"shell": report(row(peer=1.5, wanted=0.7))})
    assert "| speed, ms | rival | 1.5 | **0.75x: the peer is better** (wanted: 0.7x) |  |" in page


def test_a_ratio_that_is_wanted_of_one_backend_only(script: ModuleType) -> None:
    page = script.page({"shell": report(row(wanted=3.0), row(backend="apptainer"))})
    assert "| speed, ms | rival | 8 | 4x (wanted: 3x) | 4x |" in page


def test_no_ratio_of_a_busy_machine(script: ModuleType) -> None:
    page = script.page({"shell": report(row(wanted=3.0), row(9.0, backend="apptainer"), ratios=False)})
    assert "no ratios" in page
    assert "| rival | 8 | better | **the peer is better** |" in page
    assert "4x" not in page


def test_a_quick_report_is_refused(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "shell.json").write_text(json.dumps({**report(), "quick": True}))
    with pytest.raises(SystemExit, match="--short"):
        script.load(tmp_path)
