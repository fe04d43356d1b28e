"""Pictures and figures of runs.

``python curve.py REPORT...`` adds the reports of runs to ``results.json`` beside this file, draws all of them into
``curve.png``, and writes the README's tables: of these runs, and of the other scripts' ``reports``.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, PICTURE, README = HERE / "results.json", HERE / "curve.png", HERE / "README.md"
REPORTS = HERE / "reports"
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
    *("domain, seed", "greedy", "sampled", "rollouts", "mismatch, nats", "KL", "clipped", "idle", "seconds, load"),
    f"CPU s: {', '.join(name for name, _ in _PARTS)}",
)

_MODE_COLUMNS = {
    "rollouts/s": "rollouts_per_second",
    "s per update": "seconds_per_update",
    "trainer idle": "idle_share",
    "worker-seconds per update": "worker_seconds_per_update",
    "rollouts cut": "cut",
    "staleness": "staleness",
    "reward, second half": "reward_last_half",
    "greedy": "greedy",
    "mismatch": "mismatch",
    "load": "load",
}
"""Columns of the table of modes, and what they show of a report."""


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


def runs_table(results: Iterable[Mapping[str, Any]]) -> str:
    """Return the README's table of runs."""
    rows = []
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
        rows.append(cells)
    return _table(_HEAD, rows)


def modes_table(runs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the table of the report of ``modes.py``; the load is the mean of a mode's last minute."""
    figures = [
        (run, mode, {**found, "load": found["load"][0]}) for run, modes in runs.items() for mode, found in modes.items()
    ]
    rows = [[run, mode, *(str(found[name]) for name in _MODE_COLUMNS.values())] for run, mode, found in figures]
    return _table(["", "mode", *_MODE_COLUMNS], rows)


def others_table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of the reports of ``trl_learn.py`` and ``vllm_learn.py``."""
    head = ["", "updates", "rollouts", "greedy", "sampled", "largest mismatch, nats", "seconds"]
    rows = []
    for name, report in reports.items():
        accuracy = (f"{report['before'][kind]:.2f} -> {report['after'][kind]:.2f}" for kind in ("greedy", "sampled"))
        mismatch, seconds = f"{report['largest_mismatch']:.0e}", f"{report['seconds']}"
        rows.append([name, f"{len(report['steps'])}", f"{report['rollouts']}", *accuracy, mismatch, seconds])
    return _table(head, rows)


def tables() -> dict[str, str]:
    """Return every table of the README, by its name there."""
    modes, trl, vllm = (
        json.loads((REPORTS / f"{name}.json").read_text(encoding="utf-8")) for name in ("modes", "trl", "vllm")
    )
    return {
        "runs": runs_table(json.loads(RESULTS.read_text(encoding="utf-8"))),
        "modes": modes_table(modes),
        "others": others_table({"TRL trains": trl, "vLLM samples": vllm}),
    }


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def with_tables(text: str) -> str:
    """Return the README's text with its tables written anew."""
    for name, table in tables().items():
        place = re.compile(rf"(?<=<!-- table of {name} -->\n).*?(?=<!-- end of the table -->)", re.DOTALL)
        text = place.sub(lambda _, table=table: table, text, count=1)
    return text


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
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
