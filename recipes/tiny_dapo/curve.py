"""A picture of a run: ``python curve.py results/tiny_dapo/report.json curve.png``."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

_SMOOTHED = 4


def draw(report: Mapping[str, Any], file: Path) -> None:
    """Draw accuracy and reward by update, and the mismatch below them."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 1))
    rewards = [step["reward"] for step in report["steps"]]
    means = [sum(part) / len(part) for n in range(len(rewards)) if (part := rewards[max(0, n - _SMOOTHED + 1) : n + 1])]
    updates = range(1, len(rewards) + 1)
    top.plot(updates, means, color="tab:gray", label=f"reward in training, mean of {_SMOOTHED} updates")
    for name, mark in (("greedy", "o-"), ("sampled", "s--")):
        if report[name]:
            top.plot(*zip(*report[name], strict=True), mark, label=f"held out, {name}")
    top.set(ylabel="solved", ylim=(0, 1), title=f"tiny_dapo, seed {report['seed']}: {report['rollouts']} rollouts")
    top.legend(loc="best")
    bottom.semilogy(updates, [max(step["mismatch"]["max_abs_diff"], 1e-9) for step in report["steps"]], color="tab:red")
    bottom.axhline(1e-4, linestyle=":", color="black")
    bottom.set(xlabel="update", ylabel="largest\nmismatch, nats")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
