"""Pictures and figures of runs.

``python curve.py REPORT...`` adds the reports of runs to ``results.json`` beside this file, draws all of them into
``curve.png``, and writes their table into the README.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, PICTURE, README = HERE / "results.json", HERE / "curve.png", HERE / "README.md"
_TABLE = re.compile(r"(?<=<!-- table of results\.json -->\n).*?(?=<!-- end of the table -->)", re.DOTALL)
_PARTS = (
    ("warm-up", ("warm-up",)),
    ("engine", ("engine",)),
    ("service", ("service",)),
    ("sandboxes", ("children of the service",)),
    ("learning", ("learning",)),
    ("exchange", ("evaluation", "exchange")),
)
"""Columns of CPU time, and the parts of a report that each is the sum of."""
_HEAD = (
    "| domain, seed | greedy | sampled | rollouts | mismatch, nats | KL | clipped | idle | seconds, load "
    f"| CPU s: {', '.join(name for name, _ in _PARTS)} |"
)


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the picture and the table need of a report."""
    steps = report["steps"]
    return {
        **{key: report[key] for key in ("environment", "seed", "greedy", "sampled", "rollouts", "ends")},
        "reward": [round(step["reward"], 3) for step in steps],
        "mismatch": [float(f"{step['mismatch']['max_abs_diff']:.1e}") for step in steps],
        "kl": [float(f"{step['mismatch']['kl']:.1e}") for step in steps],
        "clipped": [round(step["clipped"], 4) for step in steps],
        "staleness": [round(step["staleness"], 2) for step in steps],
        "cpu": {part: round(seconds, 1) for part, seconds in report["cpu"].items()},
        "wall": {part: round(seconds, 1) for part, seconds in report["wall"].items()},
        **{key: round(report[key], 2) for key in ("idle", "seconds", "load")},
    }


def draw(results: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw accuracy by update, a column for each domain and a line for each seed, and the mismatch below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    domains = list(dict.fromkeys(run["environment"] for run in results))
    figure, rows = plt.subplots(
        2, len(domains), figsize=(1.5 + 3.5 * len(domains), 4.5), squeeze=False, sharex="col", sharey="row",
        height_ratios=(3, 1),
    )  # fmt: skip
    for column, domain in enumerate(domains):
        top, bottom = rows[:, column]
        for color, run in enumerate(run for run in results if run["environment"] == domain):
            for name, mark in (("greedy", "o-"), ("sampled", "s--")):
                top.plot(*zip(*run[name], strict=True), mark, color=f"C{color}", label=f"{name}, seed {run['seed']}")
            updates = range(1, len(run["reward"]) + 1)
            top.plot(updates, run["reward"], color=f"C{color}", alpha=0.3, linewidth=1)
            bottom.semilogy(updates, [max(value, 1e-16) for value in run["mismatch"]], color=f"C{color}")
        bottom.axhline(1e-4, linestyle=":", color="black")
        top.set(title=domain, ylim=(0, 1.02))
        top.legend(loc="lower right", fontsize="x-small")
        bottom.set(xlabel="update", ylim=(1e-16, 1e-2))
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    rows[0][0].set_ylabel("solved; thin: reward in training")
    rows[1][0].set_ylabel("mismatch, nats\n(dots: bound)", fontsize="small")
    for axes in rows.flat:
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=100)
    plt.close(figure)


def table(results: Iterable[Mapping[str, Any]]) -> str:
    """Return the README's table of runs."""
    lines = [_HEAD, "|---" * (_HEAD.count("|") - 1) + "|"]
    for run in results:
        greedy, sampled = ([accuracy for _, accuracy in run[name]] for name in ("greedy", "sampled"))
        cpu = (f"{sum(run['cpu'][part] for part in parts):.0f}" for _, parts in _PARTS)
        cells = (
            f"{run['environment']}, {run['seed']}",
            f"{greedy[0]:.2f} -> {greedy[-1]:.2f}",
            f"{sampled[0]:.2f} -> {sampled[-1]:.2f}",
            f"{run['rollouts']}",
            f"{max(run['mismatch']):.0e}",
            f"{max(run['kl']):.0e}",
            f"{sum(run['clipped']) / len(run['clipped']):.1%}",
            f"{run['idle']:.0%}",
            f"{run['seconds']:.0f}, {run['load']:.0f}",
            ", ".join(cpu),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(reports: Sequence[str]) -> None:
    """Add reports, and write picture and table anew."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    runs = {(run["environment"], run["seed"]): run for run in results}
    for report in reports:
        run = summary(json.loads(Path(report).read_text(encoding="utf-8")))
        runs[run["environment"], run["seed"]] = run
    order = ("math", "code", "stem", "swe")
    results = sorted(runs.values(), key=lambda run: (order.index(run["environment"]), run["seed"]))
    lines = ",\n".join(json.dumps(run) for run in results)
    RESULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    draw(results, PICTURE)
    README.write_text(_TABLE.sub(lambda _: table(results), README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
