"""What ``bench nodes`` reports of what it measured, and that its simulated part has 100,000 rollouts."""

import _nodes_real
import _nodes_sim
import nodes


def test_the_simulated_points_have_a_hundred_thousand_rollouts() -> None:
    points = _nodes_sim.points()
    rollouts = sum(point.nodes * _nodes_sim.GROUPS * _nodes_sim.SIZE for point in points)
    assert rollouts >= 100_000
    assert {point.nodes for point in points} == {1, 2, 4, 8, 16, 32, 64, 256}


def test_efficiency_is_over_as_many_times_one_node_and_makespan_over_the_undisturbed_one() -> None:
    measured = _nodes_real.Measured(
        throughput={1: 2.0, 2: 3.8, 8: 12.0},
        makespans={"undisturbed": 100.0, "killed": 120.0, "resumed": 110.0},
    )
    values = {row["name"]: (row["value"], row["target"]) for row in nodes.ray_figures(measured)}
    assert values["2 Ray nodes over 2 times one"] == (95.0, None)
    assert values["8 Ray nodes over 8 times one"] == (75.0, 95.0)
    killed = "8 Ray nodes, one killed at half of the work: makespan over undisturbed"
    assert values[killed] == (1.2, 1.25)
    assert values[f"{killed}, with `resume`"] == (1.1, 1.15)
