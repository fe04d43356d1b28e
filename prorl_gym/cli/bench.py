"""``prorl-gym bench NAME``: measure a published figure here and now."""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from prorl_gym.errors import ConfigError

_SCRIPTS = Path(__file__).parents[2] / "bench"


def bench(
    name: Annotated[str, typer.Argument(help="Name of the bench, for example shell or service.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    short: Annotated[bool, typer.Option("--short", help="Measure a tenth, to try it; not for publication.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="For bench tokens: directory with Qwen's tokenizer and templates.")
    ] = None,
) -> None:
    """Measure the figures of one bench on this machine."""
    if short:
        os.environ["PRORL_BENCH_SHORT"] = "1"
    if tokenizer is not None:
        os.environ["PRORL_GYM_QWEN"] = str(tokenizer)
    report = run_bench(name, _SCRIPTS)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show(report)


def run_bench(name: str, scripts: Path) -> Mapping[str, Any]:
    """Run ``<scripts>/<name>.py`` and return its report.

    Raises:
        ConfigError: no such script, or this is not a checkout.
    """
    if not (scripts / "_report.py").is_file():
        raise ConfigError(
            "bench: the scripts are part of the repository, not of the installed package.",
            "Clone the repository, install it with `pip install -e .` and run the command there.",
        )
    known = sorted(path.stem for path in scripts.glob("[a-z]*.py"))
    if name not in known:
        raise ConfigError(f"bench: there is no bench '{name}'.", f"Known: {', '.join(known)}.")
    sys.path.insert(0, str(scripts))  # scripts share `_report`
    try:
        return _load(scripts / f"{name}.py").run()
    finally:
        sys.path.remove(str(scripts))


def _load(script: Path) -> Any:
    """Import a script under a name of its own, by which worker processes find its functions."""
    spec = importlib.util.spec_from_file_location(f"_bench_{script.stem}", script)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value", "target", "runs", "beside", title=f"bench {report['bench']}")
    for row in cast(list[dict[str, Any]], report["figures"]):
        met = _meets_target(row)
        style = {True: "green", False: "red", None: ""}[met]
        peers = "\n".join(f"{peer['name']}: {_number(peer['value'])}" for peer in row["peers"])
        name = f"{row['backend']}: {row['name']}" if row["backend"] else row["name"]
        runs = _format_runs(row["runs"])
        value = (
            f"[{style}]{_number(row['value'])} {row['unit']}[/]" if style else f"{_number(row['value'])} {row['unit']}"
        )
        table.add_row(name, value, _target(row), runs, peers)
    console = Console()
    console.print(table)
    if report["ratios"] is None:
        console.print("no ratios: the load average exceeds the cores, and peers suffer from it unequally")
    for name, ratio in cast(dict[str, float], report["ratios"] or {}).items():
        console.print(f"{_number(ratio)}x  {name}", highlight=False)
    versions = ", ".join(f"{name} {version}" for name, version in cast(dict[str, str], report["versions"]).items())
    console.print(f"{report['cores']} cores, load average {report['load_average']:.1f}; {versions}", highlight=False)


def _meets_target(row: Mapping[str, Any]) -> bool | None:
    if row["target"] is None:
        return None
    return row["value"] <= row["target"] if row["better"] == "lower" else row["value"] >= row["target"]


def _target(row: Mapping[str, Any]) -> str:
    if row["target"] is None:
        return ""
    return f"{'<=' if row['better'] == 'lower' else '>='} {_number(row['target'])}"


def _format_runs(runs: Sequence[float]) -> str:
    """Return all of a few runs, and the range of many."""
    if len(runs) <= 5:
        return " ".join(map(_number, runs))
    return f"{_number(min(runs))} to {_number(max(runs))} ({len(runs)})"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
