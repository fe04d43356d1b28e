"""Tests that are scripts of assertions: played without the program, with results that it was asked for."""

import ast
import json
from typing import Any

import pytest
from code_support import mark
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.environments.code import assertion_player
from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import GraderError

CHECK = """
def check(candidate):
    for n in range(3):
        found = candidate([n, n + 1])
        assert found == (n, n + 1), found
    assert abs(candidate([0.5])[0] - 0.5) < 1e-6
check(f)
"""


def script(*scripts: str, setup: str = "") -> dict[str, Any]:
    return {"kind": "script", "entry": "f", "setup": setup, "cases": [{"script": text} for text in scripts]}


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("def f(x): return tuple(x)", 1.0),
        ("from collections import namedtuple\nP = namedtuple('P', 'a b', defaults=[0])\ndef f(x): return P(*x)", 1.0),
        ("def f(x): return x", 0.0),
        ("def f(x): return tuple(x) if len(x) > 1 else 1 / 0", 0.0),
        ("class A(tuple):\n    __eq__ = lambda *_: True\ndef f(x): return A()", 0.0),
        ("class A(tuple):\n    __repr__ = lambda _: 'found'\ndef f(x): return A(x)", 1.0),
        ("import os\ndef f(x): os.write(3, b'true'); os._exit(0)", 0.0),
        ("def f(x): return eval('[' * 80 + ']' * 80)", 0.0),
    ],
)
async def test_a_program_is_rewarded_for_results_with_which_the_assertions_hold(
    leases: Leases, program: str, reward: float
):
    assert (await mark(script(CHECK), program, leases)).reward == reward


async def test_arguments_may_depend_on_results_and_a_share_may_be_paid(leases: Leases):
    scripts = ["assert f(f(f(1))) == k", "x = f(2)\nwhile x < 9:\n    x = f(x)\nassert x == 16", "assert f(3) == 7"]
    score = await mark(script(*scripts, setup="k = 8"), "def f(x): return 2 * x", leases, partial=True)
    assert score.reward == pytest.approx(2 / 3)
    assert score.report == "failed test 3: wrong result\npassed test 1\npassed test 2"


@pytest.mark.parametrize("text", ["assert 1 == 1", "1 / 0", "assert f(object())", "assert g(1) == 2", "assert f("])
async def test_a_script_that_fails_before_it_has_results_is_no_reward(leases: Leases, text: str):
    with pytest.raises(GraderError, match="fails, or calls nothing"):
        await mark(script(text), "def f(x): return x", leases)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2) | st.binary(max_size=1),
    lambda inner: st.lists(inner, max_size=2) | st.lists(inner, max_size=2).map(tuple) | st.sets(st.integers(0, 2)),
    max_leaves=4,
)
STEPS = st.one_of(
    st.tuples(VALUES, VALUES).map(lambda pair: f"assert f({pair[0]!r}) == {pair[1]!r}"),
    VALUES.map(lambda value: f"x = f({value!r})"),
    st.just("assert f(x) == x"),
    VALUES.map(lambda value: f"for y in ({value!r}, 1, x):\n    assert f(y) == f(f(y)), f(y)"),
    VALUES.map(lambda value: f"if f({value!r}):\n    x = [f(x)]\nelse:\n    assert f(0) in (0, None)"),
)
PROGRAMS = (lambda x: x, lambda x: [x], lambda x: not x, lambda x: (x, 1)[0])


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(STEPS, min_size=1, max_size=4), program=st.sampled_from(PROGRAMS))
def test_a_script_ends_as_one_that_calls_the_program_itself(steps: list[str], program: Any):
    text = "\n".join(["x = 0", *steps])
    try:
        exec(text, {"f": program})
        wanted = True
    except AssertionError:
        wanted = False
    known: dict[str, str] = {}
    while isinstance(found := assertion_player.play("f", text, known), list):
        known |= {call: repr(program(*map(ast.literal_eval, json.loads(call)))) for call in found}
    assert found is wanted
