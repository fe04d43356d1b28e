"""Write ``docs/figures.md`` out of the committed reports: ``python scripts/figures_page.py``.

A report is what ``prorl-gym bench NAME --json`` printed, kept as ``bench/results/NAME.json``. A test compares the page
with what this writes, so no figure is copied by hand, and every row that is lost is marked.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "figures.md", ROOT / "bench" / "results"
BACKENDS = ("userns", "apptainer")

HEAD = """# Figures

What was measured, with which script, under which conditions. In the tables, bold marks where we lose: a missed target
or a better peer. Written by `scripts/figures_page.py` out of the reports in `bench/results`; the chart on the
[front page](../README.md#measured) shows headline figures and every missed target of these tables. A run on two real
vLLM servers has [a page of its own](../bench/results/real-vllm.md). To measure again, on a machine that does nothing
else:

```bash
export PRORL_BENCH_IMAGE=$(bench/make-image)       # python3, git and pytest; as a SIF, too
export PRORL_BENCH_SIF=$PRORL_BENCH_IMAGE.sif
prorl-gym bench shell --json > bench/results/shell.json     # likewise start, density, tokens, balance, service,
                                                            # gateway, gym, nodes, resume, groups, ablation, grade,
                                                            # peers
python scripts/figures_page.py && python scripts/figures_chart.py && python scripts/nodes_chart.py
```

`bench/peers-environment` installs the frameworks that `peers` compares with. Other peers that are not installed with
the package are taken from environment variables: see the heads of the scripts.
Everything in one section comes from one run. Ratios say how many times better ours is; there are none when the load
average at the start exceeded the cores, since busy cores slow some peers more than others.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """One bench on the page."""

    name: str
    title: str
    notes: str
    provides: Sequence[Sequence[str]] = ()
    """Table of what the compared systems do, beside what was measured; the first line is its head."""


PROVIDES = (
    ("what each provides", "isolation", "durable record", "exact token ids", "kept between calls", "grading"),
    (
        "ours",
        "namespaces, no network, own uid, limits, system-call filter",
        "yes, fsync",
        "yes, with log-probs",
        "IPython or shell",
        "killable math workers; hidden tests after the agent's processes have ended",
    ),
    ("ours through Gym", "the same", "yes, until the servers stop", "yes, with log-probs", "IPython", "the same"),
    (
        "NeMo Gym's `math_with_code`",
        "none: a forked process of the server, its uid, network",
        "none",
        "off here",
        "Python; numpy, scipy, pandas loaded",
        "strings, then floats",
    ),
    ("verifiers 0.1 `ToolEnv`, host", "none", "none", "none", "nothing", "math-verify in a worker"),
    (
        "verifiers 0.1 `ToolEnv`, bubblewrap",
        "namespaces, no network, own uid, read-only `/usr`; no limits",
        "none",
        "none",
        "nothing",
        "math-verify in a worker",
    ),
    ("verifiers 0.4 `bash` harness", "none", "off here", "none", "files", "math-verify"),
    ("mini-swe-agent, host", "none", "off here", "none", "files", "hidden tests"),
    ("mini-swe-agent, bubblewrap", "namespaces, no network; no limits", "off here", "none", "files", "hidden tests"),
)

SECTIONS = (
    Section(
        "shell",
        "Commands",
        """The peers on the host have no sandbox around them. The raw pty gives no exit code, no directory and has no
event loop: it is a floor; a megabyte through the shell may take 1.5 times as long as through it.
Beyond the floor an `echo hi` is a few turns of the event loop, a thread that writes its text, and in bash about 70
system calls that read the text and report the exit code and the directory: three hand-overs between threads and
processes, of which one alone, the control channel's round trip below, takes more than the target on this machine.
tmux is polled as OpenHands does: one look at once, then one after every half a second, and a tenth of a second to
clear the screen; a fast command is often seen by the first look. NeMo Gym's provider runs as an ordinary
user on a SIF that Apptainer built, with squashfuse. The mix is fixed in `bench/_mix.py`: ls, grep -r,
sed, git diff, pytest of one file (where the image has pytest), git checkout. The channels are measured on
the `local` backend's guest: descriptors cannot travel over TCP, so that a relay would have to stand
between.""",
    ),
    Section(
        "start",
        "Starts and the python tool",
        """Ours brings a writable root, a guest and a confined first command on top of the same `apptainer exec`: the
difference between the two is about what a `userns` sandbox takes as a whole. That has no single large part: the fork
into six namespaces; pid 1, which is Python and makes about 250 system calls, 23 of them mounts, before it serves; for
the first command a second fork of the interpreter, about 130 calls that set its descriptors, limits, rights and filter,
and the exec; the messages between service, spawner and guest. A start near the floor needs a pid 1 that is no
interpreter; the service hands out warm sandboxes instead. The
kernel over Unix sockets and over TCP is a stock ipykernel on the host, without a sandbox.""",
    ),
    Section(
        "density",
        "Many at once",
        """Memory is the proportional set size. The plain instances have no writable root and no shell; they are started
by as many starters at a time as ours. A busy sandbox runs a shell, two sleepers and a loop.""",
    ),
    Section(
        "balance",
        "Placing calls",
        """Simulated engines, the package's real classes, five seeds, with roomy caches forty
([balancing.md](balancing.md)). A ratio is of the times in which the same work is done; the interval is that of the mean
of the seeds (95 %). Only the time of one decision depends on this machine.""",
    ),
    Section(
        "tokens",
        "Token continuity",
        """The client's own CPU in rollouts of 100 turns and 64,000 tokens, and how often tokens drift in random
conversations: ours, and when the history is rendered and encoded again in every turn. A conversation's sampled ids are
either random, the worst case, or what the tokenizer itself would write, the best one ([tokens.md](tokens.md)).""",
    ),
    Section(
        "service",
        "The service itself",
        """A no-op environment and an instant policy with records of about 20 kB, each rollout durable
(`synchronous=FULL`); client, service and, where there is one, engine share the machine's cores. Added latency is from
the submission until the record is with the client, with arrivals drawn from a Poisson process. Overlap is of what
the slowest stage alone would allow, between the first and the last fifth. Cancels are of real sandboxes and real
engine calls. Workloads stand in `bench/_service_work.py`. Why rates and added latency miss their targets: the
disk would allow the rates, one event loop does not, which makes fewer rollouts in process, without HTTP, than
batches shall reach with it. By a profile, a seventh of that thread's time writes records as JSON; the rest is
spread over stages, slots, tasks and checks of models. Two commits stand in a row: the rollout's before its id is
answered, the record's before it is streamed. Client and service share two cores.""",
    ),
    Section(
        "gateway",
        "The gateway of agent programs",
        """Latency: one program whose history has grown to 64,000 tokens sends it whole with each call; a
call's time as the program sees it, less what the engine needed. Calls a second: 16 programs with histories of
4,000 tokens at once, each with a gateway of its own, beside a proxy that passes bodies on and keeps texts.
Programs, gateway and engine are a process each and share the cores; answers are streamed, and the engine
samples at once. The floors are the same bodies over the same HTTP library, or read as JSON, and nothing else.
Histories: appended to, then edited once, at random. Every preset's tokens are compared with what was sampled
in tests (`tests/environments/test_agent_presets.py`, `tests/real_vllm/test_real_programs.py`). Why the rate
beside the proxy misses its target: a call costs the proxy half a millisecond, nearly all of it HTTP. For the
same call a gateway that sends ids also finds the history's place in the tree of segments, renders and
tokenises what is new, writes every id of the prompt as JSON, checks the ids and log-probs that come back,
decodes them, and writes the answer in the program's wire format.""",
    ),
    Section(
        "gym",
        "Inside NeMo Gym",
        """Rollouts as above, posted to `/run` by Gym's own client: to our agent, and to the environment server in
front of it, which is Gym's relay. *Added* is the percentile of `/run` less that of a direct call: the same rollout
submitted to `prorl-gym serve`'s routes in a process of its own, and its record awaited. The arms take turns of four
seconds over the same Poisson arrivals; all processes share the cores. The floor is what Gym takes for an agent that
answers at once with as many bytes, so the part of what is added that no agent can avoid. The rows at once are posted
with the connection limits that NeMo-RL sets. A start is `gym env start` with the environment's servers and
`vllm_model`, virtual environments reused, ours and Gym's smallest environment in turns; Gym looks at its servers
every three seconds, so the time at which it reports them ready comes in steps. In the agent, a delivered answer is
acknowledged within 0.1 s, together with others.""",
    ),
    Section(
        "nodes",
        "Many nodes",
        """![Throughput over that of one node, by nodes](images/nodes.svg)

The Ray nodes share this machine, so the share of its processors that is in use says whether the machine is
the limit. A rollout has four model calls of a fixed second, three commands in a real sandbox, and is graded by hidden
tests in a clean one; each node runs four at a time. Throughput is between the ends of the first and the last quarter of
the rollouts. The killed node: eight Ray nodes, rollouts of nine calls; half a rollout's time after half of the records
are there, the processes of one Ray node are killed and none takes its place; its rollouts, of which about a third have
begun, are made again when its lease of six seconds is over. Simulated: service, ledger, placement, engine pool and
runners are real, engines, sandboxes, network and time are not; work per node is constant; the head's own work takes no
time there, so its CPU is a figure of its own: a head in its own process, eight nodes whose rollouts only wait and call,
user and system time.

Why targets were missed. Eight Ray nodes: their 32 rollouts wait for calls of the same second and then start sandboxes
and commands together, on two cores; one service with as many slots and without nodes, the floor, takes nearly as long.
The head's CPU of a call: a call needs a decision, and a request that asks for nothing costs the head as much. 64
simulated nodes: they stand beside the mean rate of sixteen single ones, which is above the rate of the work of these
sixteen together; nodes that share their work can reach the latter.""",
    ),
    Section(
        "resume",
        "Resuming after a turn",
        """Rollouts of nine turns, eight of them with a command in a real sandbox, at an engine of fixed speed; the
service gets SIGKILL at random moments, the same with and without `resume`, and is started again until every rollout has
its record. The engine counts what it samples, of calls that a dead service has left behind, too. Worker-seconds are
those of rollouts in a stage.""",
    ),
    Section(
        "groups",
        "Groups",
        """Simulated, with the service's own book on a virtual clock: informative groups per worker-second, five seeds.
Each peer has the best setting of a grid, chosen on these very seeds. The rows of the sweep have no target: they show
where stopping gains nothing. Bias: how far the mean of what is delivered may be from that of all informative groups, at
90 % (equivalence test; [groups.md](groups.md)).""",
    ),
    Section(
        "ablation",
        "What each part is worth",
        """The real service and pool on a virtual clock, with modelled engines and sandboxes, at the published setting;
then a sweep, and one small run with real sandboxes in real time (what ran beside the virtual part does not matter to
it). 0.78 s for an action is the published slow shell.""",
    ),
    Section(
        "grade",
        "Grading",
        """Math: answers of the labelled corpora, two gradings at a time in two worker processes; an answer that never
ends is killed at its deadline and its worker replaced. Code: 50 tests of one program, each in a process and
under limits of its own, beside as many runs of plain `python` on the host. A repair: what grading costs around
the run of its tests. Labelled corpora (`tests/corpora`, both signs): false positives and false negatives, beside
the comparison of strings and, for mathematics, math-verify by its defaults. The unseen half was written without
sight of the graders; what they got wrong *on first sight* is in the READMEs of the environments, since it was
looked at and mended after that.""",
    ),
    Section(
        "peers",
        "End to end beside other frameworks",
        r"""One question: a python call (`12345 * 6789`), then the answer in `\boxed{}`. The shell task: twenty commands
on a small project, three of them edits, then its hidden tests. The program, ours only: tried with bash and python,
handed in, run on hidden tests in a clean sandbox. Every reward was 1 and the engine counted the exact calls, or there
would be no report.

CPU is that of the whole machine (`/proc/stat`) without the engine's process: clients and the removal of sandboxes
count. Time beyond the engine is a rollout's time less 20 ms for each of its calls. At 32 and 128 callers every system
is saturated, so latency there would only repeat the rate; it is measured with one caller, and in an open loop with
starts at a fixed spacing, at half of each system's own rate at 32. Three interleaved runs after a warm-up; verifiers
0.4, which starts a program that imports for a second in each rollout, once, with 10 and 32 rollouts. mini-swe-agent
pays for no model call: its own scripted model answers after 20 ms; its loop and a process per command are its own. NeMo
Gym's servers were started by `gym env start`, ours and its own together. Peers that isolate nothing are named as such.
A sandbox's memory is the PSS of everything below the spawner, the shared template of python workers included, over 32
sandboxes that have run a cell.

Why targets were missed. CPU at 32 callers: near its target, on a shared machine whose runs differ by more than the
miss; most of it is the sandbox and IPython's first cell in it, which have rows of their own. Apptainer: a bare
`apptainer exec`, the floor in that row, takes more than the target alone. Twice the rate of a tool in bubblewrap:
bubblewrap adds little CPU time to this peer, and what it starts is a plain `python3` that is gone after the call; it
has no IPython, no state between calls, no limits, no token ids, no record on a disk. One caller: the time beyond the
engine is nearly all CPU time. Memory: IPython's own pages, which a worker writes to. Warm sandboxes cost more CPU
here, since their shell is started beforehand and this task needs none. The shell task: a call costs a command in the
persistent shell, its durable record and its tokens; the peer's loop on the host writes none.""",
        PROVIDES,
    ),
)


Row = dict[str, Any]
Report = dict[str, Any]


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
    """Return a value, marked where it missed its target."""
    if row is None:
        return ""
    low, high = row.get("interval") or (None, None)
    value = number(row["value"]) + (f" ({number(low)} to {number(high)})" if low is not None else "")
    return value if meets_target(row) else f"**{value} (missed)**"


def ratio_cell(row: Row | None, peer: Row, *, quiet: bool) -> str:
    """Return how a figure compares with a peer; only in words where ratios are refused."""
    if row is None:
        return ""
    times = ratio(row, peer)
    if times < 1 and not quiet:
        return "**the peer is better**"
    if times < 1:
        wanted = "" if peer["target"] is None else f" (wanted: {number(peer['target'])}x)"
        return f"**{number(times)}x: the peer is better**{wanted}"
    if not quiet:
        return "better"
    if peer["target"] is None:
        return f"{number(times)}x" if math.isfinite(times) else "-"
    verdict = "" if times >= peer["target"] else ", **missed**"
    return f"{number(times)}x (wanted: {number(peer['target'])}x{verdict})"


def target_cell(*rows: Row) -> str:
    """Return a target, or ``stated`` where there is none; several where backends have their own."""
    wanted = list(dict.fromkeys(number(row["target"]) for row in rows if row["target"] is not None))
    return f"{'<=' if rows[0]['better'] == 'lower' else '>='} {' / '.join(wanted)}" if wanted else "stated"


def label(row: Row) -> str:
    """Return a figure's name with its unit."""
    return f"{row['name']}, {row['unit']}" if row["unit"] else row["name"]


def by_name(report: Report) -> list[dict[str | None, Row]]:
    """Return the figures, those of the same name together, keyed by backend."""
    groups: dict[str, dict[str | None, Row]] = {}
    for row in report["figures"]:
        groups.setdefault(row["name"], {})[row["backend"]] = row
    return list(groups.values())


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; nothing without rows."""
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def figures_table(groups: Sequence[dict[str | None, Row]]) -> str:
    """Return the sandboxes' figures, a column per backend."""
    rows = [
        [label(first), *(value_cell(group.get(name)) for name in BACKENDS), target_cell(*group.values())]
        for group in groups
        if None not in group
        for first in [next(iter(group.values()))]
    ]
    return table(["figure", *BACKENDS, "target"], rows)


def own_peer(row: Row | None, peer: Row) -> Row:
    """Return a backend's own entry of a peer, whose wanted ratio may differ from that of the other backend."""
    return next((own for own in row["peers"] if own["name"] == peer["name"]), peer) if row else peer


def peers_table(groups: Sequence[dict[str | None, Row]], *, quiet: bool) -> str:
    """Return what the sandboxes' figures stand beside."""
    rows = [
        [
            *(label(first), peer["name"], number(peer["value"])),
            *(ratio_cell(group.get(name), own_peer(group.get(name), peer), quiet=quiet) for name in BACKENDS),
        ]
        for group in groups
        if None not in group
        for first in [next(iter(group.values()))]
        for peer in first["peers"]
    ]
    return table(["figure", "peer, same run", "measured", *(f"{name} against it" for name in BACKENDS)], rows)


def other_table(groups: Sequence[dict[str | None, Row]], *, quiet: bool) -> str:
    """Return the figures that belong to no backend, with their peers."""
    rows: list[list[str]] = []
    for row in (group[None] for group in groups if None in group):
        head = [label(row), value_cell(row), target_cell(row)]
        for peer in row["peers"] or [None]:
            beside = [peer["name"], number(peer["value"]), ratio_cell(row, peer, quiet=quiet)] if peer else [""] * 3
            rows.append([*head, *beside])
            head = [""] * 3
    return table(["figure", "measured", "target", "peer, same run", "measured", "ours against it"], rows)


def conditions(report: Report) -> str:
    """Return when, on what and beside how much else it was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    refused = "" if report["ratios"] is not None else " More was running than there are cores: **no ratios**."
    return (
        f"Measured on {report['date']}: {report['machine']}. Load average {report['load_average']:.1f} when it began, "
        f"{report['load_average_after']:.1f} when it ended.{refused}\n{versions}."
    )


def section(about: Section, report: Report | None) -> str:
    """Return one bench's part of the page."""
    head = f"\n## {about.title}: `prorl-gym bench {about.name}`\n\n"
    if report is None:
        return f"{head}Not measured yet.\n"
    groups, quiet = by_name(report), report["ratios"] is not None
    tables = figures_table(groups) + peers_table(groups, quiet=quiet) + other_table(groups, quiet=quiet)
    provided = table(about.provides[0], about.provides[1:]) if about.provides else ""
    return f"{head}{conditions(report)}\n{tables}{provided}\n{about.notes}\n"


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
