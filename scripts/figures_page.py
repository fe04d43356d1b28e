"""Write ``docs/figures.md`` out of the committed reports: ``python scripts/figures_page.py``.

A report is what ``prorl-gym bench NAME --json`` printed, kept as ``bench/results/NAME.json``. A test compares the page
with what this writes, so no figure is copied by hand, and every row that is lost is marked.
"""

import json
import math
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "figures.md", ROOT / "bench" / "results"
BACKENDS = ("userns", "apptainer")

HEAD = """# Figures

Written by `scripts/figures_page.py` from the reports in [bench/results](../bench/results), which hold every figure,
run, machine and version. Shown are figures with a target ("missed" marks one that was not reached) and figures in
which a peer of the same run is better; **bold** marks both. A ratio says how many times better ours is; a range
covers the things in brackets. Two values are `userns` / `apptainer`. Letters name the peers above the table. A
*floor* is the least that any implementation needs; shown with targets only. Where the load at the start
exceeded the cores there are no ratios. All ran on two cores, none on a GPU; two real vLLM servers (CPU builds) have
[a page of their own](../bench/results/real-vllm.md).

To measure again, on a machine that does nothing else:

```bash
export PRORL_BENCH_IMAGE=$(bench/make-image)       # python3, git and pytest; as a SIF, too
export PRORL_BENCH_SIF=$PRORL_BENCH_IMAGE.sif
bench/peers-environment                            # the frameworks of `peers`
prorl-gym bench shell --json > bench/results/shell.json
python scripts/figures_page.py && python scripts/figures_chart.py && python scripts/nodes_chart.py
```
"""


@dataclass(frozen=True, slots=True)
class Section:
    """One bench on the page."""

    name: str
    title: str
    notes: str


SECTIONS = (
    Section(
        "shell",
        "Commands",
        """An `echo hi` needs three hand-overs between threads and processes; one of
them alone, the control channel's round trip, takes more than the target here.""",
    ),
    Section(
        "start",
        "Starts and the python tool",
        """Ours adds a writable root, a guest and a confined command to the same `apptainer exec`. Pid 1 is a Python
interpreter, which makes about 250 system calls before it serves.""",
    ),
    Section(
        "density",
        "Many at once",
        """Memory is the proportional set size. Plain instances have no writable root and no shell.""",
    ),
    Section(
        "balance",
        "Placing calls",
        """Simulated engines, the package's own classes, five seeds (roomy caches: forty), 95 % interval of the
mean.""",
    ),
    Section(
        "tokens",
        "Token continuity",
        """Client CPU of rollouts with 100 turns and 64,000 tokens, and how often tokens drift in random conversations
when the history is rendered again each turn.""",
    ),
    Section(
        "service",
        "The service itself",
        """A no-op environment, records of about 20 kB, each durable. Rates and latency miss because one event loop runs
everything, and each rollout needs two commits in a row.""",
    ),
    Section(
        "gateway",
        "The gateway of agent programs",
        """Latency: a history of 64,000 tokens sent whole with each call, less the engine's time. Rate: 16 programs with
4,000 tokens. The proxy only forwards bodies; the gateway also places the history, renders, tokenises and checks.""",
    ),
    Section(
        "gym",
        "Inside NeMo Gym",
        """*Added* is the percentile of `/run` less that of a direct call of the service. The floor is an agent that
answers at once with as many bytes. Starts reuse virtual environments.""",
    ),
    Section(
        "nodes",
        "Many nodes",
        """![Throughput over that of one node, by nodes](images/nodes.svg)

Ray nodes share this machine's two cores, where one service with as many slots takes nearly as long. Simulated nodes:
service, ledger and placement are real; engines, sandboxes, network and time are not. The head's CPU of a call is that
of one HTTP request.""",
    ),
    Section(
        "groups",
        "Groups",
        """Simulated, with the service's own scheduler: informative groups per worker-second, five seeds; each peer
with the best setting of a grid on these seeds. Bias: distance of the delivered mean from that of all informative
groups.""",
    ),
    Section(
        "grade",
        "Grading",
        """Labelled corpora (`tests/corpora`). What graders got wrong on first sight of the "unseen" halves was
repaired since; it is in the READMEs of the environments.""",
    ),
    Section(
        "peers",
        "End to end, with other frameworks",
        """CPU is the machine's without the engine's. Only ours has limits, a durable record and exact token ids;
peers without bubblewrap isolate nothing.""",
    ),
)


Row = dict[str, Any]
Report = dict[str, Any]
Cell = dict[str, Any]


def number(value: float) -> str:
    """Return three significant digits, without an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def ratio(row: Row, peer: Row) -> float:
    """Return how many times better a figure is than its peer; below 1 the peer is better."""
    ours, theirs = (row["value"], peer["value"]) if row["better"] == "lower" else (peer["value"], row["value"])
    return theirs / ours if ours else float("inf") if theirs else 1.0


def meets_target(row: Row) -> bool:
    """Whether a figure has reached its target, or has none."""
    if row["target"] is None:
        return True
    return row["value"] <= row["target"] if row["better"] == "lower" else row["value"] >= row["target"]


def value_cell(row: Row | None) -> str:
    """Return a value, in bold where it missed its target."""
    if row is None:
        return "-"
    low, high = row.get("interval") or (None, None)
    value = number(row["value"]) + (f" ({number(low)} to {number(high)})" if low is not None else "")
    return value if meets_target(row) and not is_lost(row) else f"**{value}**"


def ratio_cell(row: Row | None, peer: Row, *, quiet: bool) -> str:
    """Return how a figure compares with a peer; only in words where ratios are refused."""
    if row is None:
        return "-"
    times = ratio(row, peer)
    if not quiet:
        return "better" if times >= 1 else "**worse**"
    text = f"{times:.2g}" if times < 100 else number(times) if math.isfinite(times) else "inf"
    if peer["target"] is not None and times < peer["target"]:
        return f"**{text} (wanted {number(peer['target'])}, missed)**"
    return text if times >= 1 else f"**{text}**"


def ratios_cell(group: Sequence[Row], peers: Sequence[Row], letters: dict[str, str], *, quiet: bool) -> str:
    """Return how a figure compares with each peer, by the peers' letters."""
    cells = [[ratio_cell(row, own_peer(row, peer), quiet=quiet) for row in group] for peer in peers]
    if len(peers) > 1 and all(cell == "better" for each in cells for cell in each):
        return "all better"
    return "; ".join(f"{letters[peer['name']]} {' / '.join(each)}" for peer, each in zip(peers, cells, strict=True))


def target_cell(*rows: Row) -> str:
    """Return a target, or nothing where there is none; several where backends have their own."""
    wanted = list(dict.fromkeys(number(row["target"]) for row in rows if row["target"] is not None))
    if not wanted:
        return ""
    sign = "<=" if rows[0]["better"] == "lower" else ">="
    return f"{sign} {' / '.join(wanted)}{'' if all(map(meets_target, rows)) else ' **missed**'}"


def label(row: Row) -> str:
    """Return a figure's name with its unit; how a peer's grid or a corpus was made up is in the report."""
    name = re.sub(r" \((?:best of its grid|[\d,]+ right and)[^)]*\)|, mended since first sight", "", row["name"])
    return f"{name}, {row['unit']}" if row["unit"] not in ("", "x") else name


def by_name(report: Report) -> list[list[Row]]:
    """Return the figures, those of the same name together, in the order of the backends."""
    groups: dict[str, dict[str | None, Row]] = {}
    for row in report["figures"]:
        groups.setdefault(row["name"], {})[row["backend"]] = row
    order = (None, *BACKENDS)
    return [[group[name] for name in order if name in group] for group in groups.values()]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; nothing without rows."""
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "\n".join(f"|{'|'.join(line)}|" for line in lines) + "\n"


def is_floor(peer: Row) -> bool:
    """Whether a peer is a lower bound that no implementation can beat."""
    return peer["name"].endswith("(floor)")


def shown_peers(group: Sequence[Row]) -> list[Row]:
    """Return the peers of a figure that the page shows: none where it has no target and nothing is lost."""
    has_target = any(row["target"] is not None or any(p["target"] is not None for p in row["peers"]) for row in group)
    peers = group[0]["peers"] if has_target else [peer for peer in group[0]["peers"] if not is_floor(peer)]
    lost = any(ratio(row, own_peer(row, peer)) < 1 for row in group for peer in peers)
    return peers if has_target or lost else []


def own_peer(row: Row, peer: Row) -> Row:
    """Return a backend's own entry of a peer, whose wanted ratio may differ from that of the other backend."""
    return next((own for own in row["peers"] if own["name"] == peer["name"]), peer)


def is_lost(row: Row) -> bool:
    """Whether a figure without target and peers is itself a ratio to a peer, and below 1."""
    return row["unit"] == "x" and row["better"] == "higher" and row["target"] is None and row["value"] < 1


def spread(values: Sequence[float]) -> str:
    """Return the smallest and the largest value."""
    low, high = (number(one) if math.isfinite(one) else "inf" for one in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def merged(groups: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """Return the figures by what they measure, where several do for different things and all are won, or all lost."""
    found: dict[Any, list[Row]] = {}
    for group in groups:
        row = group[0]
        is_won = row["target"] is not None and meets_target(row) and all(ratio(row, peer) >= 1 for peer in row["peers"])
        subject, colon, measured = label(row).rpartition(": ")
        is_one = len(group) == 1 and colon and ((is_won and not row.get("interval")) or is_lost(row))
        key = (measured, row["target"]) if is_one else (label(row), subject)
        found.setdefault(key, []).extend(group)
    return list(found.values())


def merged_cells(rows: Sequence[Row], letters: dict[str, str], *, quiet: bool) -> list[str]:
    """Return the line of figures that measure the same of several things."""
    subjects = [label(row).rpartition(": ")[0] for row in rows]
    ours = spread([row["value"] for row in rows])
    peers: dict[str, list[tuple[Row, Row]]] = {}
    for row in rows:
        for peer in row["peers"]:
            peers.setdefault(letters[peer["name"]], []).append((row, peer))
    ratios = {letter: [ratio(row, peer) for row, peer in pairs] for letter, pairs in peers.items()}
    return [
        f"{label(rows[0]).rpartition(': ')[2]} ({'; '.join(subjects)})",
        f"**{ours}**" if is_lost(rows[0]) else ours,
        "; ".join(f"{letter} {spread([peer['value'] for _, peer in pairs])}" for letter, pairs in peers.items()),
        "; ".join(f"{letter} {spread(every)}" for letter, every in ratios.items())
        if quiet or not peers
        else "all better",
        target_cell(*rows),
    ]


def figures_table(groups: Sequence[Sequence[Row]], *, quiet: bool) -> str:
    """Return the names of the peers and one table: ours, peers, ratios, target."""
    shown = [(group, shown_peers(group)) for group in merged(groups)]
    shown = [
        (group, peers)
        for group, peers in shown
        if peers or any(row["target"] is not None or is_lost(row) for row in group)
    ]
    several = [group for group, _ in shown if len({row["name"] for row in group}) > 1]
    every = [peers for _, peers in shown] + [row["peers"] for group in several for row in group]
    names = list(dict.fromkeys(peer["name"] for peers in every for peer in peers))
    letters = dict(zip(names, string.ascii_letters, strict=False))
    rows = [
        merged_cells(group, letters, quiet=quiet)
        if group in several
        else [
            label(group[0]),
            " / ".join(value_cell(row) for row in group),
            "; ".join(f"{letters[peer['name']]} {number(peer['value'])}" for peer in peers),
            ratios_cell(group, peers, letters, quiet=quiet),
            target_cell(*group),
        ]
        for group, peers in shown
    ]
    for line, following in reversed(list(pairwise(rows))):  # the same things measured twice are named once
        subjects = re.search(r" \(.*; .*\)$", following[0])
        if subjects and line[0].endswith(subjects[0]):
            following[0] = following[0].replace(subjects[0], " (of the same)")
    known = "; ".join(f"{letter} {name}" for name, letter in letters.items())
    return (f"\nPeers: {known}.\n" if known else "") + table(["figure", "ours", "peers", "ratio", "target"], rows)


def conditions(report: Report) -> str:
    """Return when and beside how much else it was measured."""
    refused = "" if report["ratios"] is not None else " More was running than there are cores: **no ratios**."
    load = f"load {report['load_average']:.1f} to {report['load_average_after']:.1f}"
    return f"{report['date']}; {load}.{refused}"


def section(about: Section, report: Report | None) -> str:
    """Return one bench's part of the page."""
    head = f"\n## {about.title}: `prorl-gym bench {about.name}`\n\n"
    if report is None:
        return f"{head}Not measured yet.\n"
    groups = by_name(report)
    shown = figures_table(groups, quiet=report["ratios"] is not None)
    return f"{head}{conditions(report)} {about.notes}\n{shown}"


def page(reports: dict[str, Report]) -> str:
    """Return ``docs/figures.md``."""
    return HEAD + "".join(section(about, reports.get(about.name)) for about in SECTIONS)


def load(results: Path = RESULTS) -> dict[str, Report]:
    """Return the committed reports by the names of their benches."""
    places = {about.name: results / f"{about.name}.json" for about in SECTIONS}
    reports = {name: json.loads(path.read_text("utf-8")) for name, path in places.items() if path.exists()}
    for name, report in reports.items():
        if report["quick"]:
            raise SystemExit(f"bench/results/{name}.json was made with --short: measure again without it.")
    return reports


if __name__ == "__main__":
    PAGE.write_text(page(load()), encoding="utf-8")
