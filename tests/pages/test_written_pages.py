"""The pages and pictures that scripts write are what code and reports say, and hide no missed target."""

import json
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from page_scripts import load_script


@pytest.mark.parametrize("name", ["api_page", "cli_page", "configuration_page", "metrics_page"])
def test_the_committed_page_is_current(name: str) -> None:
    script = load_script(name)
    assert script.page() == script.PAGE.read_text(encoding="utf-8"), f"run: python scripts/{name}.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("figures_page")


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
    wanted = script.page(script.load())
    assert script.PAGE.read_text("utf-8") == wanted, "run: python scripts/figures_page.py"
    assert len(wanted) <= 20_500


def test_every_sandbox_bench_has_a_report(script: ModuleType) -> None:
    assert {about.name for about in script.SECTIONS} == set(script.load())


@pytest.mark.parametrize(
    ("lost", "marks"),
    [
        (row(9.0, peer=10.0), ["**9**", "<= 4 **missed**"]),
        (row(peer=1.0), ["a **0.5**"]),
        (row(wanted=5.0), ["a **4 (wanted 5, missed)**"]),
        (row(peer=1.0, better="higher", target=None), []),
        (row(peer=8.0, better="higher", target=None), ["a **0.25**"]),
        (row(0.9, better="higher", target=None, unit="x", peers=[]), ["**0.9**"]),
        (row(0.0, peer=0.0, target=0.0), []),
    ],
    ids=["target", "peer", "ratio", "higher is better", "lower than a peer", "itself a ratio", "nothing of nothing"],
)
@pytest.mark.parametrize("backend", ["userns", None], ids=["a sandbox's", "no backend's"])
def test_what_is_lost_is_marked(
    script: ModuleType, lost: dict[str, Any], marks: list[str], backend: str | None
) -> None:
    page = script.page({"shell": report({**lost, "backend": backend})}).removeprefix(script.HEAD)
    marked = [cell for line in page.splitlines() if line[:1] == "|" for cell in line.split("|") if "**" in cell]
    assert marked == marks


def test_no_ratio_of_a_busy_machine(script: ModuleType) -> None:
    page = script.page({"shell": report(row(wanted=3.0), row(9.0, backend="apptainer"), ratios=False)})
    assert "**no ratios**" in page
    assert "|2 / **9**|a 8|a better / **worse**|" in page


def test_a_quick_report_is_refused(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "shell.json").write_text(json.dumps({**report(), "quick": True}))
    with pytest.raises(SystemExit, match="--short"):
        script.load(tmp_path)


SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def chart() -> ModuleType:
    return load_script("figures_chart")


@pytest.fixture
def reports(chart: ModuleType) -> dict[str, Any]:
    return deepcopy(chart.load())


def words(picture: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_the_chart_is_what_the_reports_say(chart: ModuleType, reports: dict[str, Any]) -> None:
    assert chart.IMAGE.read_text("utf-8") == chart.chart(reports), "run: python scripts/figures_chart.py"


def test_the_path_is_what_its_script_draws() -> None:
    path = load_script("path_picture")
    assert path.IMAGE.read_text("utf-8") == path.picture(), "run: python scripts/path_picture.py"


def test_the_picture_of_nodes_has_every_count_and_says_what_was_missed(reports: dict[str, Any]) -> None:
    nodes, report = load_script("nodes_chart"), reports["nodes"]
    assert nodes.IMAGE.read_text("utf-8") == nodes.chart(report), "run: python scripts/nodes_chart.py"
    counts = {kind: list(points) for kind, points in nodes.times_one(report).items()}
    assert counts == {"Ray nodes": [1, 2, 4, 8], "simulated nodes": [1, 2, 4, 8, 16, 32, 64, 256]}
    drawn = [row for row in report["figures"] if "times one" in row["name"]]
    for value, is_missed in ((99.0, False), (89.0, True)):
        report["figures"] = [{**row, "value": value} for row in drawn]
        assert ("a target was missed" in words(nodes.chart(report))) is is_missed


def test_every_missed_target_is_in_the_chart(chart: ModuleType, reports: dict[str, Any]) -> None:
    every = [row for report in reports.values() for row in report["figures"]]
    missed = {id(row) for row in every if not chart.meets_target(row)}
    drawn = [id(chart.find(reports, bar)) for bars in chart.measured_rows(reports).values() for bar in bars]
    assert set(drawn) >= missed != set()
    marked = [one for one in words(chart.chart(reports)) if one.endswith(", target missed")]
    assert len(marked) == sum(row in missed for row in drawn), "a figure may stand beside two peers"


def test_a_missed_target_that_is_not_in_the_chart_is_refused(chart: ModuleType, reports: dict[str, Any]) -> None:
    row = next(
        one for one in reports["service"]["figures"] if one["name"].startswith("cancel: engine") and one["target"]
    )
    row["value"] = row["target"] + 1
    with pytest.raises(SystemExit, match="cancel: engine and processes, p99"):
        chart.chart(reports)
