"""Whole clusters on a virtual clock: what clients do and which faults occur is drawn from a seed.

A seed that fails is in the failing test's message and replays exactly: ``play(seed)`` of ``cluster_story``.
"""

import pytest
from cluster_story import play

BATCH = 25


def check_seeds(seeds: range) -> None:
    results = [play(seed) for seed in seeds]
    failed = {result.seed: result.complaints[:3] for result in results if result.complaints}
    assert not failed, f"seeds with violations: {failed}"
    assert all(result.rollouts for result in results)


@pytest.mark.slow
def test_invariants_hold_under_faults() -> None:
    check_seeds(range(6))


@pytest.mark.slow
def test_a_seed_replays_exactly() -> None:
    first, second = play(11), play(11)
    assert first.faults
    assert first == second
    assert play(10).trace_hash != first.trace_hash


@pytest.mark.release
@pytest.mark.parametrize("first", range(0, 1000, BATCH))
def test_invariants_hold_for_many_seeds(first: int) -> None:
    check_seeds(range(first, first + BATCH))
