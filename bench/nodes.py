"""What more nodes bring, what they cost the head, and what the loss of one costs.

Three parts: Ray nodes that share this machine, with real sandboxes (``_nodes_ray``); 1 to 256 simulated nodes on a
virtual clock, where only engines, sandboxes and the network are not real (``_nodes_sim``); and the head's CPU with
10,000 rollouts in flight (``_node_head_cost``). Needs ``prorl-gym[ray]``. ``--short`` measures a tenth: to try it.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean

import _node_head_cost
import _nodes_ray
import _nodes_sim
from _report import Better, Figure, Peer, Report, StartConditions, figure, peer, report

EFFICIENCY_TARGETS = {8: 95.0}
SIMULATED_TARGETS = {64: 95.0, 256: 90.0}
KILLED_TARGET, RESUMED_TARGET = 1.25, 1.15
ROLLOUT_MS, CALL_MS = 1.0, 0.1


def ray_figures(measured: _nodes_ray.Measured) -> list[Figure]:
    """Return the figures of the Ray nodes."""
    one, most = measured.throughput[1], max(measured.throughput)
    usual = measured.makespans["undisturbed"]
    lost = f"{most} Ray nodes, one killed at half of the work: makespan over undisturbed"
    return [
        _real("rollouts/s of one Ray node", one, ""),
        _real(
            f"rollouts/s of {most} Ray nodes",
            *(measured.throughput[most], ""),
            peers=[peer(f"one service without nodes, with the slots of {most} (floor)", [measured.without_nodes])],
        ),
        *(
            _real(
                *(f"{count} Ray nodes over {count} times one", 100 * value / (count * one), "%"),
                target=EFFICIENCY_TARGETS.get(count),
            )
            for count, value in measured.throughput.items()
            if count > 1
        ),
        *(
            _real(f"{count} Ray nodes: processors in use", value, "%", better="lower")
            for count, value in measured.busy.items()
        ),
        _real(f"{most} Ray nodes: makespan", usual, "s", better="lower"),
        _real(lost, measured.makespans["killed"] / usual, "", better="lower", target=KILLED_TARGET),
        _real(
            *(f"{lost}, with `resume`", measured.makespans["resumed"] / usual, ""),
            better="lower",
            target=RESUMED_TARGET,
        ),
        _real("turns of 9 that a lost rollout went on from", measured.resumed_turns, ""),
    ]


def _real(
    name: str,
    value: float,
    unit: str,
    *,
    better: Better = "higher",
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
    """Return the figures of the simulated nodes."""
    one = mean(result.throughput for result in found[1])
    rollouts = sum(result.rollouts for results in found.values() for result in results)
    return [
        figure("simulated: rollouts in all", [rollouts], "", better="higher"),
        *(
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
        ),
        *(
            figure(
                f"{count} simulated nodes: share of the time for which engines work",
                [100 * mean(result.engine_share for result in results)],
                "%",
                better="higher",
            )
            for count, results in found.items()
            if count in (1, *SIMULATED_TARGETS)
        ),
    ]


def head_figures(cost: _node_head_cost.HeadCost) -> list[Figure]:
    """Return the figures of the head."""
    flight = f"{_node_head_cost.IN_FLIGHT:,} in flight"
    return [
        figure(
            *(f"head's CPU of a rollout on a node, {flight}", [cost.per_rollout], "ms"),
            better="lower",
            target=ROLLOUT_MS,
        ),
        figure(
            *(f"head's CPU of a model call of a node, {flight}", [cost.per_call], "ms"),
            better="lower",
            target=CALL_MS,
            peers=[peer("a request that only asks whether the head lives (floor)", [cost.per_request])],
        ),
    ]


def run() -> Report:
    """Measure all parts, one after the other."""
    begun = StartConditions.capture()
    figures = ray_figures(asyncio.run(_nodes_ray.measure()))
    figures += head_figures(asyncio.run(_node_head_cost.measure()))
    figures += simulated_figures(simulate())
    return report("nodes", figures, "ray", begun=begun)


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
