"""Write ``docs/failures.md`` out of the committed report: ``python scripts/failures_page.py``.

The report is what ``prorl-gym bench failures --json`` printed, kept as ``bench/results/failures.json``. A test compares
the page with what this writes, so no count is copied by hand, and every row that is lost is on the page.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from figures_page import RESULTS, ROOT, conditions, number, table

PAGE, REPORT = ROOT / "docs" / "failures.md", RESULTS / "failures.json"
HEALTHY = "none"
Cell = dict[str, Any]

HEAD = """# When the engine fails

What rollouts come to when the engine fails on purpose: ours beside NeMo Gym's own environments, verifiers and
mini-swe-agent, on the same rows. Written by `scripts/failures_page.py` out of `bench/results/failures.json`. To measure
again, after `bench/peers-environment`:

```bash
prorl-gym bench failures --json > bench/results/failures.json && python scripts/failures_page.py
```

With a healthy engine every row has reward 1 in every system, or there is no report. So whatever is below 1 here is the
engine's failure. A rollout is counted as

- **solved**: reward 1, no mark;
- **a silent zero**: a lower reward that looks like the policy's, and is trained on;
- **marked**: recorded as failed or masked, so that a trainer can leave it out;
- **lost**: an exception, an HTTP error or no answer in 90 s instead of a result.

Which calls fail is fixed by their number and a seed (`bench/_failures_plan.py`); a call that a system repeats has a
number of its own. Retries are those that each system has by default:

| system | calls | rollouts |
|---|---|---|
| ours | 3 attempts, elsewhere or after a trial; 30 s of waiting for an engine | again after an engine's failure |
| NeMo Gym | 3 attempts after 404, 408, 429 and 5xx; without end after a broken connection | none |
| verifiers 0.1 | 10 more by its HTTP client | none |
| verifiers 0.4 | those of the harness's program | none |
| mini-swe-agent | 10 attempts, 4 to 60 s apart | none |

Where a system has a setting for the longest duration of a call, it is 10 s; NeMo Gym's model server has none. Turns are
capped at 256 tokens in ours and NeMo Gym's, so that a full turn takes less than that.
"""

NOTES = """
## What to know of it

- New weights are reported to our service by `client.weight_update()`, in the middle of the batch. The others have no
  such call; the engine changes its weights under them, as a trainer does that updates in flight.
- Token ids are off by default in verifiers and mini-swe-agent; NeMo Gym's model server ran with
  `return_token_id_information`. The answer of `/run` has no field for versions of the policy, with our environments
  too; our records and the stream have them.
- Spoilt log-probs harm no system that does not ask for them.
- `gym eval run` ends at the first lost row unless `route_failures_to_sidecar` is set (read in 0.7.0, not measured).
- Ours tells a hung call from a long one by the engine's pace. `request_seconds` has to be longer than a turn of
  `max_turn_tokens` takes: with 10 s, turns of 4,096 tokens and an engine of 400 tokens a second, 14 of 48 rollouts were
  graded as cut off by the policy's own slowness. The default is 900 s.
- Ours rests an engine that hung for longer after each time; 16 answered calls make up for one. So hung calls are the
  last fault here: when they came before the log-probs, 8 rollouts of mathematics took 20 s under "one log-prob too
  few", and 1 of 8 shell tasks was not answered in 90 s.
- The published counts come from four processes (`PRORL_BENCH_SYSTEMS`) of one evening, three of them at once, on a
  machine that had much else to do: counts can be compared, seconds hardly.
- An aborted answer is not continued, unless a pause of ours aborted it: the turn is sampled again.
"""


def outcome(cell: Cell) -> str:
    """Return what came of a batch, in words."""
    parts = [
        f"**{cell['silent']} silent zero{'s' if cell['silent'] > 1 else ''}**" if cell["silent"] else "",
        f"{cell['marked']} marked" if cell["marked"] else "",
        f"{cell['lost']} lost" if cell["lost"] else "",
    ]
    failed = ", ".join(filter(None, parts))
    solved = f"{cell['solved']} solved" if failed else "all solved"
    died = ", **stopped working**" if cell["has_died"] else ""
    return f"{solved}{', ' if failed else ''}{failed}{died}; {number(cell['seconds'])} s"


def systems_of(cells: Sequence[Cell], row: str) -> list[str]:
    """Return the systems that have a row, in the order of the report."""
    return list(dict.fromkeys(cell["system"] for cell in cells if cell["row"] == row))


def row_table(cells: Sequence[Cell], row: str) -> str:
    """Return what came of a row: a line for each fault, a column for each system."""
    names = systems_of(cells, row)
    found = {(cell["fault"], cell["system"]): cell for cell in cells if cell["row"] == row}
    faults = dict.fromkeys(fault for fault, _ in found)
    lines = [[fault, *(outcome(found[fault, name]) for name in names)] for fault in faults]
    return table(["fault", *names], lines)


def total_table(cells: Sequence[Cell]) -> str:
    """Return one line for each system and row: the sums over all faults."""
    failed = [cell for cell in cells if cell["fault"] != HEALTHY]
    lines: list[list[str]] = []
    for row in dict.fromkeys(cell["row"] for cell in failed):
        for name in systems_of(failed, row):
            own = [cell for cell in failed if (cell["row"], cell["system"]) == (row, name)]
            total = {key: sum(cell[key] for cell in own) for key in own[0] if isinstance(own[0][key], int | float)}
            kept, labelled = total["kept_tokens"], total["kept_versions"]
            lines.append(
                [
                    row,
                    name,
                    f"{total['solved']} of {total['rollouts']}",
                    f"**{total['silent']}**" if total["silent"] else "0",
                    f"{total['marked']} ({total['marked_zeros']})",
                    f"{total['lost']} ({total['unanswered']})",
                    f"{total['exact_tokens']} of {kept}" if kept else "none kept",
                    f"{total['right_versions']} of {labelled}" if labelled else "none kept",
                    number(total["seconds"]),
                ]
            )
    head = ["row", "system", "solved", "silent zeros", "marked (with reward 0)", "lost (no answer in 90 s)"]
    return table([*head, "tokens and log-probs exact", "versions right", "seconds"], lines)


def losses(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield where a peer did better than ours on the same row: more rollouts solved, or as many sooner."""
    found = {(cell["row"], cell["system"], cell["fault"]): cell for cell in cells}
    for row, ours in dict.fromkeys((cell["row"], cell["system"]) for cell in cells):
        if not ours.startswith("ours"):
            continue
        for other in (name for name in systems_of(cells, row) if not name.startswith("ours")):
            pairs = [
                (fault, own, found[row, other, fault])
                for (of, system, fault), own in found.items()
                if (of, system) == (row, ours)
            ]
            for fault, own, peer in pairs:
                if peer["solved"] > own["solved"]:
                    yield f"{row}, {ours}, {fault}: {own['solved']} solved; {other}: {peer['solved']}"
            sooner = [
                f"{fault} ({number(own['seconds'])} s; {number(peer['seconds'])} s)"
                for fault, own, peer in pairs
                if peer["solved"] == own["solved"] and peer["seconds"] < own["seconds"]
            ]
            if sooner:
                yield f"{row}, {ours}: {other} solved as many in less time under: {', '.join(sooner)}"


def page(report: dict[str, Any]) -> str:
    """Return ``docs/failures.md``."""
    cells: list[Cell] = report["cells"]
    rows = "".join(f"\n### {row}\n{row_table(cells, row)}" for row in dict.fromkeys(cell["row"] for cell in cells))
    lost = "".join(f"- {line}\n" for line in losses(cells)) or "- nowhere\n"
    absent = "".join(f"- {name}: {why}\n" for name, why in report["left_out"].items())
    many = cells[0]["rollouts"]
    return (
        f"{HEAD}\n## All faults together\n\n{conditions(report)}\n{total_table(cells)}"
        f"\n## Fault by fault\n\n{many} rollouts at once in each field, and the seconds until the last answer.\n{rows}"
        f"\n## Where we lose\n\n{lost}\n## What was not run\n\n{absent}{NOTES}"
    )


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(REPORT.read_text("utf-8"))), encoding="utf-8")
