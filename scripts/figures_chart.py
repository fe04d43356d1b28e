"""Draw ``docs/images/figures.svg`` out of the committed reports: ``python scripts/figures_chart.py``.

Each bar is how many times better a figure is than its peer in the same run; a bar to the left is worse. Every figure
that missed its target is in the chart: one that ``ROWS`` does not name is refused.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures_page import load, meets_target, number, ratio
from svg import BAD, GOOD, INK, LINE, QUIET, box, document, line, text

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "figures.svg"

Row = dict[str, Any]
Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure of the chart.

    Attributes:
        words: what the chart calls it.
        bench: the report that has it.
        name: how the figure's name begins.
        peer: how its peer's name begins; empty: the figure is a ratio to the peer itself; ``target``: its target.
        beside: what the chart calls the peer.
        backend: of figures that backends have each.
    """

    words: str
    bench: str
    name: str
    peer: str
    beside: str
    backend: str | None = None


GYM = "NeMo Gym's provider"
HOST_TOOL, BWRAP_TOOL = "verifiers, no sandbox", "verifiers, bubblewrap"
ROWS: dict[str, tuple[Bar, ...]] = {
    "Sandboxes": (
        Bar("command in a shell, median", "shell", "echo hi, median", "NeMo Gym", GYM, "userns"),
        Bar("command in a shell, median", "shell", "echo hi, median", "raw pty", "raw pty", "userns"),
        Bar("the same, Apptainer backend", "shell", "echo hi, median", "raw pty", "raw pty", "apptainer"),
        Bar("1 MB of output", "shell", "1 MB of output, shell", "raw pty", "raw pty", "userns"),
        Bar("the same, Apptainer backend", "shell", "1 MB of output, shell", "raw pty", "raw pty", "apptainer"),
        Bar("mixed actions, mean", "shell", "mean action", "NeMo Gym", GYM, "userns"),
        Bar("start to first command", "start", "cold start to first command", "NeMo Gym", GYM, "userns"),
        Bar(
            "the same, Apptainer backend",
            "start",
            "cold start",
            "apptainer exec of the image",
            "apptainer exec",
            "apptainer",
        ),
        Bar(
            "python cell 1+1",
            "start",
            "python tool (IPython 9.18.1): 1+1",
            "Jupyter",
            "Jupyter Kernel Gateway",
            "userns",
        ),
        Bar("128 sandboxes up", "density", "128 sandboxes up", "128 plain", "plain Apptainer instances", "userns"),
    ),
    "End to end, one question": (
        Bar(
            "rollouts/s, 32 callers",
            "peers",
            "one question, 32 callers: rollouts",
            "NeMo Gym",
            "Gym's, no sandbox",
            "userns",
        ),
        Bar(
            "the same",
            "peers",
            "one question, 32 callers: rollouts",
            "verifiers 0.1 `ToolEnv`, tool a",
            HOST_TOOL,
            "userns",
        ),
        Bar(
            "the same",
            "peers",
            "one question, 32 callers: rollouts",
            "verifiers 0.1 `ToolEnv`, tool in",
            BWRAP_TOOL,
            "userns",
        ),
        Bar("CPU per rollout", "peers", "one question, 32 callers: CPU", "target", "target", "userns"),
        Bar("the same, Apptainer backend", "peers", "one question, 32 callers: CPU", "target", "target", "apptainer"),
        Bar("beyond the engine, p50", "peers", "one question, 1 caller: beyond", "target", "target", "userns"),
        Bar("memory of a sandbox, python", "peers", "a sandbox with a python", "target", "target", "userns"),
    ),
    "Tokens": (
        Bar(
            "client CPU, 100 turns (Qwen3)",
            "tokens",
            "qwen3: client CPU of a rollout",
            "rendering",
            "render again each turn",
        ),
        Bar(
            "conversations that drift",
            "tokens",
            "qwen3: drifted",
            "rendering again, canonical",
            "render again each turn",
        ),
    ),
    "Placing calls (simulated)": (
        Bar("work done, tight KV cache", "balance", "tight KV: `cost` with AIMD", "", "published heap"),
        Bar("work done, roomy KV cache", "balance", "roomy KV: ours over", "", "best peer"),
    ),
    "Groups (simulated)": (
        Bar("informative groups per worker-second", "groups", "ours over `wait for all`", "", "wait for all"),
        Bar(
            "the same",
            "groups",
            "ours over `stop when the batch is full, what is cut is lost`",
            "",
            "stop when full, lose the cut",
        ),
        Bar("the same", "groups", "ours over `drop stale groups`", "", "drop stale groups"),
    ),
    "Service": (
        Bar("durable rollouts per second", "service", "rollouts, durable", "one fsync", "one fsync per step"),
        Bar("in batches of 64, per second", "service", "HTTP, batches of 64", "target", "target"),
        Bar("single posts per second", "service", "HTTP, single posts", "FastAPI", "bare FastAPI route"),
        Bar("added to single posts, p50", "service", "added to single posts, 200/s, p50", "target", "target"),
        Bar("added to single posts, p99", "service", "added to single posts, 200/s, p99", "target", "target"),
        Bar("added by Gym's `/run`, p50", "gym", "added by the agent's `/run`, 100/s, p50", "target", "target"),
        Bar("added by Gym's `/run`, p99", "gym", "added by the agent's `/run`, 100/s, p99", "target", "target"),
        Bar("the same, Gym's relay in front, p50", "gym", "added by the environment server's", "target", "target"),
    ),
    "Agent programs": (
        Bar("added to a call, 64 k tokens, p50", "gateway", "added latency, 64 k history: p50", "target", "target"),
        Bar("calls per second", "gateway", "calls a second, 4 k history", "a proxy", "a proxy that only captures"),
    ),
    "Many nodes": (
        Bar("8 Ray nodes on one machine", "nodes", "8 Ray nodes over 8", "target", "target", "userns"),
        Bar("64 nodes (simulated)", "nodes", "64 simulated nodes over", "target", "target"),
        Bar("256 nodes (simulated)", "nodes", "256 simulated nodes over", "target", "target"),
        Bar("makespan, one node killed", "nodes", "8 Ray nodes, one killed", "target", "target", "userns"),
        Bar(
            "the same, with `resume`",
            "nodes",
            "8 Ray nodes, one killed at half of the work: makespan over undisturbed, with",
            "target",
            "target",
            "userns",
        ),
        Bar("head's CPU of a rollout", "nodes", "head's CPU of a rollout", "target", "target"),
        Bar("head's CPU of a model call", "nodes", "head's CPU of a model call", "target", "target"),
    ),
    "Grading": (
        Bar(
            "50 tests of one program",
            "grade",
            "50 tests of one program, stdin",
            "plain python",
            "plain python on the host",
            "userns",
        ),
        Bar(
            "math: right answers refused", "grade", "math, outside, seen half: false neg", "math-verify", "math-verify"
        ),
    ),
}

WIDTH, NAMES, LEFT, RIGHT, STEP = 960, 262, 276, 584, 22
LOW, HIGH = 0.05, 1000.0
"""Ends of the axis; what is beyond ends in an arrow."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A bar with its figures.

    Attributes:
        times: how many times better than the peer.
        target: the same of the figure's target, if it has one.
        value: the figure as text.
        beside: the peer's figure as text; empty where there is none of its own.
        missed: whether the target was missed.
    """

    times: float
    target: float | None
    value: str
    beside: str
    missed: bool


def find(reports: dict[str, Report], bar: Bar) -> Row:
    """Return the figure of a bar."""
    rows = reports[bar.bench]["figures"]
    found = [row for row in rows if row["name"].startswith(bar.name) and row["backend"] == bar.backend]
    if not found:
        raise SystemExit(f"bench/results/{bar.bench}.json has no figure {bar.name!r} ({bar.backend}): see ROWS.")
    return found[0]


def measured_rows(reports: dict[str, Report]) -> dict[str, tuple[Bar, ...]]:
    """Return the groups of bars whose benches have a report."""
    rows = {name: tuple(bar for bar in bars if bar.bench in reports) for name, bars in ROWS.items()}
    return {name: bars for name, bars in rows.items() if bars}


def height(reports: dict[str, Report]) -> int:
    """Return the height of the picture."""
    return 70 + sum(STEP * (len(bars) + 1) + 6 for bars in measured_rows(reports).values())


def unnamed(reports: dict[str, Report]) -> list[str]:
    """Return the figures that missed their target and are not in ``ROWS``."""
    shown = [find(reports, bar) for bars in measured_rows(reports).values() for bar in bars]
    every = [row for report in reports.values() for row in report["figures"]]
    return [row["name"] for row in every if not meets_target(row) and not any(row is one for one in shown)]


def measure(row: Row, bar: Bar) -> Drawn:
    """Return how a figure compares with the peer of its bar."""
    unit = f" {row['unit']}" if row["unit"] not in ("", "x", "1/s") else ""
    value, missed = f"{number(row['value'])}{unit}", not meets_target(row)
    if not bar.peer:
        return Drawn(row["value"], row["target"], f"{number(row['value'])}x", "", missed)
    if bar.peer == "target":
        peer = {"value": row["target"]}
        return Drawn(ratio(row, peer), 1.0, value, f"{number(row['target'])}{unit}", missed)
    peer = next(one for one in row["peers"] if one["name"].startswith(bar.peer))
    target = None if row["target"] is None else ratio({**row, "value": row["target"]}, peer)
    return Drawn(ratio(row, peer), target, value, f"{number(peer['value'])}{unit}", missed)


def place(times: float) -> float:
    """Return where on the logarithmic axis a ratio stands."""
    inside = min(max(times, LOW), HIGH)
    return LEFT + (RIGHT - LEFT) * math.log(inside / LOW) / math.log(HIGH / LOW)


def shapes(reports: dict[str, Report]) -> Iterator[str]:
    """Yield the parts of the chart."""
    yield text(16, 24, "Times better than a peer in the same run", size=15, bold=True)
    for x, color, words in ((404, GOOD, "better"), (474, BAD, "worse than the peer, or target missed")):
        yield box(x, 13, 13, 13, fill=color, stroke="none", round_by=1)
        yield text(x + 18, 24, words, size=12, color=QUIET)
    yield line((730, 11), (730, 28), color=INK, width=2.5)
    yield text(738, 24, "target", size=12, color=QUIET)
    for tick in (0.1, 1.0, 10.0, 100.0, 1000.0):
        x = place(tick)
        yield line((x, 56), (x, height(reports) - 8), color=INK if tick == 1 else LINE)
        yield text(x, 50, f"{tick:g}x", color=QUIET, size=12, anchor="middle")
    y = 56.0
    for name, bars in measured_rows(reports).items():
        y += STEP
        yield text(16, y, name, bold=True)
        for bar in bars:
            y += STEP
            yield from bar_shapes(bar, measure(find(reports, bar), bar), y)
        y += 6


def bar_shapes(bar: Bar, drawn: Drawn, y: float) -> Iterator[str]:
    """Yield one bar with its words; ``y`` is the line that they stand on."""
    worse = drawn.times < 1
    start, end = sorted((place(1), place(drawn.times)))
    color = BAD if worse or drawn.missed else GOOD
    yield text(NAMES, y, bar.words, anchor="end")
    yield box(start, y - 11, max(end - start, 1), 13, fill=color, stroke="none", round_by=1)
    if drawn.target is not None and LOW < drawn.target < HIGH:
        x = place(drawn.target)
        yield line((x, y - 14), (x, y + 5), color=INK, width=2.5)
    if drawn.times > HIGH:
        yield line((end - 8, y - 8.5), (end - 2, y - 4.5), (end - 8, y - 0.5), color="#ffffff", width=2)
    beside = f"{drawn.beside} ({bar.beside})" if drawn.beside else bar.beside
    words = f"{drawn.value} vs {beside}{', target missed' if drawn.missed else ''}"
    yield text(RIGHT + 16, y, words, size=12, color=BAD if color == BAD else QUIET)


def chart(reports: dict[str, Report]) -> str:
    """Return the picture.

    Raises:
        SystemExit: a figure missed its target and is not in the chart.
    """
    if left_out := unnamed(reports):
        raise SystemExit(f"Missed its target and is not in the chart: {', '.join(left_out)}. Name it in ROWS.")
    return document(
        WIDTH, height(reports), "How many times better than its peers each headline figure is", list(shapes(reports))
    )


if __name__ == "__main__":
    IMAGE.write_text(chart(load()), encoding="utf-8")
