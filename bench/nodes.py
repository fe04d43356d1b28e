"""What more nodes bring, what they cost the head, and what the loss of one costs.

Three parts: Ray nodes that share this machine, with real sandboxes (``_nodes_real``); 1 to 256 simulated nodes on a
virtual clock, where only engines, sandboxes and the network are not real (``_nodes_sim``); and the head's CPU with
10,000 rollouts in flight (``_nodes_real``). Needs ``prorl-gym[ray]``. ``--short`` measures a tenth: to try it.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean

import _nodes_real
import _nodes_sim
from _report import Better, Figure, Peer, Report, figure, peer, report

EFFICIENCY_TARGETS = {8: 95.0}
SIMULATED_TARGETS = {64: 95.0, 256: 90.0}
KILLED_TARGET, RESUMED_TARGET = 1.25, 1.15
ROLLOUT_MS, CALL_MS = 1.0, 0.1


def ray_figures(measured: _nodes_real.Measured) -> list[Figure]:
    one, most = measured.throughput[1], max(measured.throughput)
    usual = measured.makespans["undisturbed"]
    lost = f"{most} Ray nodes, one killed at half of the work: makespan over undisturbed"
    return [
        _real(
            f"rollouts/s of {most} Ray nodes",
            *(measured.throughput[most], ""),
            better="higher",
            peers=[peer(f"one service without nodes, with the slots of {most} (floor)", [measured.without_nodes])],
        ),
        *(
            _real(
                *(f"{count} Ray nodes over {count} times one", 100 * value / (count * one), "%"),
                better="higher",
                target=EFFICIENCY_TARGETS.get(count),
            )
            for count, value in measured.throughput.items()
            if count > 1
        ),
        _real(lost, measured.makespans["killed"] / usual, "", target=KILLED_TARGET),
        _real(*(f"{lost}, with `resume`", measured.makespans["resumed"] / usual, ""), target=RESUMED_TARGET),
    ]


def _real(
    name: str,
    value: float,
    unit: str,
    *,
    better: Better = "lower",
    target: float | None = None,
    peers: Sequence[Peer] = (),
) -> Figure:
    return figure(name, [value], unit, better=better, backend="userns", target=target, peers=peers)


def simulate() -> dict[int, list[_nodes_sim.PointResult]]:
    """Run the simulation's points, by nodes; as many at a time as there are cores."""
    found: dict[int, list[_nodes_sim.PointResult]] = {}
    points = _nodes_sim.points()
    # On a virtual clock, so that other work may go first.
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), initializer=os.nice, initargs=(10,)) as pool:
        for point, result in zip(points, pool.map(_nodes_sim.execute, points), strict=True):
            found.setdefault(point.nodes, []).append(result)
            print(f"{point.nodes} simulated nodes, seed {point.seed}: {result}", file=sys.stderr, flush=True)
    return dict(sorted(found.items()))


def simulated_figures(found: Mapping[int, Sequence[_nodes_sim.PointResult]]) -> list[Figure]:
    one = mean(result.throughput for result in found[1])
    return [
        figure(
            f"{count} simulated nodes over {count} times one",
            # The seeds together: each alone is one draw of few rollouts.
            [100 * mean(result.throughput for result in results) / (count * one)],
            "%",
            better="higher",
            target=SIMULATED_TARGETS.get(count),
        )
        for count, results in found.items()
        if count > 1
    ]


def head_figures(cost: _nodes_real.HeadCost) -> list[Figure]:
    flight = f"{_nodes_real.IN_FLIGHT:,} in flight"
    return [
        figure(*(f"head's CPU of a rollout on a node, {flight}", [cost.per_rollout], "ms"), target=ROLLOUT_MS),
        figure(
            *(f"head's CPU of a model call of a node, {flight}", [cost.per_call], "ms"),
            target=CALL_MS,
            peers=[peer("a request that only asks whether the head lives (floor)", [cost.per_request])],
        ),
    ]


def run() -> Report:
    figures = ray_figures(asyncio.run(_nodes_real.measure_nodes()))
    figures += head_figures(asyncio.run(_nodes_real.measure_head()))
    figures += simulated_figures(simulate())
    return report("nodes", figures, "ray")
