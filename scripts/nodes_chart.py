"""Draw ``docs/images/nodes.svg`` out of ``bench/results/nodes.json``: ``python scripts/nodes_chart.py``.

Throughput of several nodes over that of one, by nodes: Ray nodes on one machine, and simulated ones. There is no
picture while there is no report.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from figures_page import load, meets_target
from svg import BAD, GOOD, INK, LINE, QUIET, document, line, text

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "nodes.svg"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 330, 64, 610, 64, 286
MOST_NODES, MOST_TIMES = 256, 256
_SERIES = {"Ray nodes": ("Ray nodes on one machine", GOOD), "simulated nodes": ("simulated nodes", QUIET)}
_NAME = re.compile(r"(\d+) (Ray nodes|simulated nodes) over \d+ times one$")

Report = Mapping[str, Any]


def times_one(report: Report) -> dict[str, dict[int, float]]:
    """Return throughput over that of one node, by kind of node and by number."""
    found: dict[str, dict[int, float]] = {kind: {1: 1.0} for kind in _SERIES}
    for row in report["figures"]:
        if match := _NAME.match(row["name"]):
            nodes = int(match[1])
            found[match[2]][nodes] = nodes * row["value"] / 100
    return found


def chart(report: Report) -> str:
    """Return the picture."""
    return document(WIDTH, HEIGHT, "Throughput of several nodes over that of one", list(_shapes(report)))


def _x(nodes: float) -> float:
    return LEFT + (RIGHT - LEFT) * math.log(nodes) / math.log(MOST_NODES)


def _y(times: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * math.log(times) / math.log(MOST_TIMES)


def _shapes(report: Report) -> Iterator[str]:
    yield text(16, 24, "Throughput over that of one node", size=15, bold=True)
    for number in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        yield line((_x(number), TOP), (_x(number), BOTTOM))
        yield line((LEFT, _y(number)), (RIGHT, _y(number)))
        yield text(_x(number), BOTTOM + 18, str(number), size=12, color=QUIET, anchor="middle")
        yield text(LEFT - 8, _y(number) + 4, f"{number}x", size=12, color=QUIET, anchor="end")
    yield text((LEFT + RIGHT) / 2, BOTTOM + 36, "nodes", size=12, color=QUIET, anchor="middle")
    yield line((_x(1), _y(1)), (_x(MOST_NODES), _y(MOST_NODES)), color=LINE, width=2, dash="6 4")
    for position, (kind, points) in enumerate(times_one(report).items()):
        words, color = _SERIES[kind]
        drawn = [(_x(nodes), _y(times)) for nodes, times in sorted(points.items())]
        yield line(*drawn, color=color, width=2.5)
        for x, y in drawn:
            yield line((x - 3, y), (x + 3, y), color=color, width=7)
        place = 16 + 210 * position
        yield line((place, 46), (place + 22, 46), color=color, width=3)
        yield text(place + 28, 50, words, size=12, color=INK)
    yield line((436, 46), (458, 46), color=LINE, width=2, dash="6 4")
    yield text(464, 50, "n times one node", size=12, color=INK)
    if not all(meets_target(row) for row in report["figures"] if _NAME.match(row["name"])):
        yield text(RIGHT, BOTTOM - 10, "a target was missed", size=12, color=BAD, anchor="end")


if __name__ == "__main__":
    if (measured := load().get("nodes")) is not None:
        IMAGE.write_text(chart(measured), encoding="utf-8")
