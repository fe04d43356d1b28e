"""Which bodies the processes of run C get, and what a guess is worth against them."""

import math
import random
from collections import Counter

import pytest

from prorl_gym.environments.swe.controls.control_checks import draw_variants
from prorl_gym.environments.swe.controls.control_plan import MAX_CONTROL_RUNS, Edit, TestFunction


def functions(count: int, variants: int = 8) -> list[TestFunction]:
    edits = tuple(Edit(start=number, end=number, text="x") for number in range(variants))
    return [TestFunction(path="t.py", name=f"test_{n}", defined=f"test_{n}", variants=edits) for n in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_function_runs_as_it_is_and_with_a_control(count: int) -> None:
    for seed in range(200):
        drawn = draw_variants(functions(count), random.Random(seed))
        assert len(drawn) == MAX_CONTROL_RUNS
        for function in functions(count):
            edits = [edit for each, edit in drawn if each == function]
            assert None in edits and any(edits)


def test_many_functions_get_a_process_each_and_a_coin() -> None:
    kinds: Counter[bool] = Counter()
    for seed in range(400):
        drawn = draw_variants(functions(30), random.Random(seed))
        assert len({function.name for function, _ in drawn}) == MAX_CONTROL_RUNS
        kinds.update(edit is None for _, edit in drawn)
    assert 0.45 < kinds[True] / kinds.total() < 0.55


@pytest.mark.parametrize("variants", [1, 2, 4, 8])
def test_how_often_a_body_is_seen_does_not_tell_the_real_one(variants: int) -> None:
    """Processes that share a sandbox can compare notes."""
    (function,) = functions(1, variants)
    found = 0
    for seed in range(2000):
        counts = Counter(edit for _, edit in draw_variants([function], random.Random(seed)))
        most = [edit for edit, count in counts.items() if count == max(counts.values())]
        found += random.Random(f"{seed} guess").choice(most) is None
    assert found / 2000 < 1.3 / (min(variants, MAX_CONTROL_RUNS) + 1)


@pytest.mark.parametrize("accepted", [0.1, 0.25, 0.5])
def test_a_rule_about_bodies_is_seldom_right_in_all_processes(accepted: float) -> None:
    """Processes in sandboxes of their own can only decide by what they see, each body always in the same way."""
    (function,) = functions(1)
    won = 0
    for seed in range(2000):
        rule = random.Random(f"{seed} rule")
        is_taken = {edit: rule.random() < accepted for edit in (None, *function.variants)}
        won += all(is_taken[edit] is (edit is None) for _, edit in draw_variants([function], random.Random(seed)))
    assert won / 2000 < 1.5 / (math.e * 8)
