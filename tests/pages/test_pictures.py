"""The drawn pictures of the documentation are what their scripts draw, and the chart hides no missed target."""

import sys
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return import_module(name)
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def chart() -> ModuleType:
    return script("figures_chart")


@pytest.fixture
def reports(chart: ModuleType) -> dict[str, Any]:
    return deepcopy(chart.load())


def words(picture: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_the_chart_is_what_the_reports_say(chart: ModuleType, reports: dict[str, Any]) -> None:
    assert chart.IMAGE.read_text("utf-8") == chart.chart(reports), "run: python scripts/figures_chart.py"


def test_the_path_is_what_its_script_draws() -> None:
    path = script("path_picture")
    assert path.IMAGE.read_text("utf-8") == path.picture(), "run: python scripts/path_picture.py"


@pytest.fixture
def nodes_report() -> dict[str, Any]:
    """What ``bench nodes`` measures, by its own functions, from made-up throughputs."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        bench, ray, sim, head = map(import_module, ("nodes", "_nodes_ray", "_nodes_sim", "_node_head_cost"))
    finally:
        sys.path.pop(0)
    counts = (1, 2, 4, 8)
    measured = ray.Measured(
        throughput={count: float(count) for count in counts},
        busy=dict.fromkeys(counts, 50.0),
        makespans={"undisturbed": 100.0, "killed": 110.0, "resumed": 105.0},
        resumed_turns=4.0,
    )
    simulated = {n: [sim.PointResult(0.9 * n, 0.8 * n, 1.0, 1.0, 100, 0.9)] for n in (1, 2, 4, 8, 16, 32, 64, 256)}
    simulated[1] = [sim.PointResult(1.0, 1.0, 1.0, 1.0, 100, 0.9)]
    cost = head.HeadCost(0.5, 0.2, 0.2)
    rows = bench.ray_figures(measured) + bench.head_figures(cost) + bench.simulated_figures(simulated)
    return {"figures": rows}


def test_the_nodes_are_what_their_report_says(reports: dict[str, Any]) -> None:
    nodes = script("nodes_chart")
    drawn = nodes.IMAGE.read_text("utf-8") if nodes.IMAGE.exists() else None
    wanted = nodes.chart(reports["nodes"]) if "nodes" in reports else None
    assert drawn == wanted, "run: python scripts/nodes_chart.py"


def test_the_picture_of_nodes_has_every_count_and_says_what_was_missed(nodes_report: dict[str, Any]) -> None:
    nodes = script("nodes_chart")
    assert nodes.times_one(nodes_report) == {
        "Ray nodes": {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0},
        "simulated nodes": {1: 1.0, **{n: pytest.approx(0.9 * n) for n in (2, 4, 8, 16, 32, 64, 256)}},
    }
    assert "a target was missed" in words(nodes.chart(nodes_report)), "64 nodes are at 90 %, below 95"


def test_the_chart_takes_a_report_on_nodes(
    chart: ModuleType, reports: dict[str, Any], nodes_report: dict[str, Any]
) -> None:
    said = words(chart.chart({**reports, "nodes": nodes_report}))
    assert {"64 nodes (simulated)", "256 nodes (simulated)", "the same, with `resume`"} <= set(said)
    others = words(chart.chart({name: report for name, report in reports.items() if name != "nodes"}))
    missed = [sum(one.endswith(", target missed") for one in texts) for texts in (said, others)]
    assert missed[0] - missed[1] == 2, "64 nodes, and the head's CPU of a call"


def test_the_readme_shows_both() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert "](docs/images/path.svg)" in text and "](docs/images/figures.svg)" in text


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


def test_a_figure_that_no_report_has_is_named(chart: ModuleType, reports: dict[str, Any]) -> None:
    reports["balance"]["figures"] = []
    with pytest.raises(SystemExit, match=r"balance\.json has no figure"):
        chart.chart(reports)


@pytest.mark.parametrize(
    ("changes", "times", "missed"),
    [
        ({}, 4.0, False),
        ({"value": 16.0}, 0.5, True),
        ({"value": 16.0, "target": None}, 0.5, False),
        ({"better": "higher"}, 0.25, True),
        ({"value": 0.0}, float("inf"), False),
    ],
)
def test_a_bar_is_how_many_times_better(chart: ModuleType, changes: dict[str, Any], times: float, missed: bool) -> None:
    row = {"value": 2.0, "target": 4.0, "better": "lower", "unit": "ms", "peers": [{"name": "rival", "value": 8.0}]}
    drawn = chart.measure({**row, **changes}, chart.Bar("speed", "shell", "speed", "rival", "a rival"))
    assert (drawn.times, drawn.missed) == (times, missed)


def test_worse_stands_left_of_the_middle_and_the_ends_hold(chart: ModuleType) -> None:
    assert chart.LEFT == chart.place(0.0) < chart.place(0.5) < chart.place(1.0) < chart.place(2.0)
    assert chart.place(float("inf")) == chart.RIGHT
