"""The bench command on a bench of its own; what it measures is not tested, only its form and its complaints."""

import json
import sys
from pathlib import Path
from typing import Any

import _report
import pytest
import typer
from typer.testing import CliRunner

from prorl_gym.cli import installation
from prorl_gym.errors import ConfigError

SCRIPT = """
from _report import figure, peer, report

def run():
    floor = peer("floor", [0.5], target=2.0)
    figures = [figure("speed", [1.0, 3.0, 2.0], "ms", better="lower", target=2.5, peers=[floor])]
    return report("tiny", figures)
"""


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    source = Path(installation.__file__).parents[2] / "bench" / "_report.py"
    (tmp_path / "_report.py").write_text(source.read_text())
    (tmp_path / "tiny.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture
def app(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    run_bench = installation.run_bench
    monkeypatch.setattr(installation, "run_bench", lambda name, _: run_bench(name, scripts))
    app = typer.Typer()
    app.command()(installation.bench)
    return app


def test_json_has_the_published_form(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["tiny", "--json"])
    report = json.loads(result.output)
    assert list(report) == [
        *("bench", "date", "quick", "figures", "ratios", "load_average", "load_average_after"),
        *("cores", "machine", "versions"),
    ]
    assert report["figures"] == [
        {
            "name": "speed",
            "backend": None,
            "value": 2.0,
            "unit": "ms",
            "target": 2.5,
            "better": "lower",
            "peers": [{"name": "floor", "value": 0.5, "target": 2.0}],
            "runs": [1.0, 3.0, 2.0],
            "interval": None,
        }
    ]


def test_a_short_run_says_so(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_BENCH_SHORT", "")
    monkeypatch.delitem(sys.modules, "_report", raising=False)
    assert json.loads(CliRunner().invoke(app, ["tiny", "--short", "--json"]).output)["quick"] is True
    del sys.modules["_report"]
    monkeypatch.setenv("PRORL_BENCH_SHORT", "")
    assert json.loads(CliRunner().invoke(app, ["tiny", "--json"]).output)["quick"] is False


@pytest.mark.parametrize(("load", "ratios"), [(2.0, {"speed against floor": 0.25}), (2.1, None)])
def test_ratios_are_refused_on_a_busy_machine(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, load: float, ratios: object
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.delitem(sys.modules, "_report", raising=False)
    assert json.loads(CliRunner().invoke(app, ["tiny", "--json"]).output)["ratios"] == ratios
    output = CliRunner().invoke(app, ["tiny"], env={"COLUMNS": "150"}).output
    assert "2 ms" in output and "<= 2.5" in output and "floor: 0.5" in output
    assert ("no ratios" in output) == (ratios is None)


@pytest.mark.parametrize(("better", "times"), [("lower", 4.0), ("higher", 0.25)])
def test_below_one_the_peer_is_better(better: Any, times: float) -> None:
    row = _report.figure("x", [2.0], "", better=better)
    assert _report.times_better(row, _report.peer("p", [8.0])) == times


def test_an_unknown_bench_is_named(scripts: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        installation.run_bench("tinny", scripts)
    assert str(raised.value) == "bench: there is no bench 'tinny'.\nKnown: tiny."


def test_outside_a_checkout_the_fix_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Clone the repository"):
        installation.run_bench("shell", tmp_path)


def test_a_script_may_work_in_several_processes(scripts: Path) -> None:
    """What it hands to them has to be found again by its name."""
    (scripts / "wide.py").write_text(
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from multiprocessing import get_context\n\n\n"
        "def twice(n):\n    return 2 * n\n\n\n"
        "def run():\n"
        "    with ProcessPoolExecutor(2, mp_context=get_context('fork')) as workers:\n"
        "        return {'made': list(workers.map(twice, [1, 2]))}\n"
    )
    assert installation.run_bench("wide", scripts) == {"made": [2, 4]}
