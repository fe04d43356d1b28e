"""What every balancing policy must do, and what the named ones promise beyond."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.inference.balance import CostPolicy, make_balance_policy
from prorl_gym.inference.balance.cost_policy import CostModel
from prorl_gym.inference.protocol import CallOutcome, GenerationRequest
from prorl_gym.records import EngineLoad
from prorl_gym.testing.inference.engine_conformance import request as make_request

NAMES = ("cost", "sticky", "least_outstanding", "min_heap", "round_robin", "published")
ENGINES = ("a", "b", "c")


def call(session: str = "s", prompt: int = 1000, group: str = "", number: int = 0) -> GenerationRequest:
    ids, name = range(prompt), f"{session}/{number}"
    return make_request(request_id=name, session_id=session, prompt_ids=ids, max_tokens=100, group_id=group)


def served(policy, request, engine, **changes):
    policy.release(request, engine, CallOutcome(sampled_tokens=10, **changes))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["call", "end", "fail", "forget", "drop", "observe", "refresh"]),
        st.integers(0, 7),
        st.sets(st.sampled_from(ENGINES), min_size=1),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", NAMES)
@given(steps=STEPS)
@settings(max_examples=40, deadline=None)
def test_every_reservation_is_returned_under_any_interleaving(name, steps):
    policy: Any = make_balance_policy(name)
    flying: dict[int, tuple[GenerationRequest, str]] = {}
    for number, (step, session, healthy) in enumerate(steps):
        if step == "call" and session not in flying:
            request = call(f"s{session}", 100 + 50 * number, f"g{session // 4}", number)
            engine = policy.choose(request, sorted(healthy))
            assert engine in healthy
            flying[session] = (request, engine)
        elif step in ("end", "fail") and session in flying:
            policy.release(*flying.pop(session), CallOutcome(sampled_tokens=5 * (step == "end"), failed=step == "fail"))
        elif step == "forget":
            policy.forget_session(f"s{session}")
        elif step == "drop":
            policy.invalidate_cache(sorted(healthy)[0])
        elif step == "observe":
            policy.observe_load(sorted(healthy)[0], EngineLoad(running=1, waiting=0, kv_usage=0.5, kv_capacity=900))
    for request, engine in flying.values():
        policy.release(request, engine, CallOutcome())
    assert [policy.in_flight(engine) for engine in ENGINES] == [0, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_a_place_that_was_never_taken_cannot_be_returned(name):
    with pytest.raises(ValueError, match="no reservation on engine a"):
        make_balance_policy(name).release(call(), "a", CallOutcome())


@pytest.mark.parametrize("name", NAMES)
def test_ties_spread(name):
    policy = make_balance_policy(name)
    chosen = [policy.choose(call(f"s{number}"), ENGINES) for number in range(6)]
    assert sorted(chosen) == ["a", "a", "b", "b", "c", "c"]


@pytest.mark.parametrize("name", ["cost", "sticky", "min_heap", "published"])
def test_a_rollout_stays_where_its_prefix_is(name):
    policy = make_balance_policy(name)
    homes = {}
    for turn in range(5):
        for session in ("s0", "s1", "s2", "s3"):
            request = call(session, 1000 + 500 * turn, number=turn)
            engine = policy.choose(request, ENGINES)
            served(policy, request, engine)
            assert homes.setdefault(session, engine) == engine


@pytest.mark.parametrize("name", ["cost", "sticky", "min_heap", "published"])
def test_a_failure_ends_stickiness(name):
    policy = make_balance_policy(name)
    request = call()
    home = policy.choose(request, ENGINES)
    policy.release(request, home, CallOutcome(failed=True))
    others = [engine for engine in ENGINES if engine != home]
    request = call(number=1)
    second = policy.choose(request, others)
    served(policy, request, second)
    assert policy.choose(call(number=2), ENGINES) == second


def test_sticky_counts_idle_rollouts_among_equals():
    policy = make_balance_policy("sticky")
    served(policy, call("s0"), policy.choose(call("s0"), ENGINES[:2]))
    assert policy.choose(call("s1"), ENGINES[:2]) == "b"


def test_round_robin_takes_turns():
    policy = make_balance_policy("round_robin")
    assert [policy.choose(call(number=number), ENGINES) for number in range(4)] == ["a", "b", "c", "a"]


def test_least_outstanding_counts_calls():
    policy = make_balance_policy("least_outstanding")
    first = call("s0")
    assert policy.choose(first, ENGINES) == "a"
    assert policy.choose(call("s1"), ENGINES) == "b"
    served(policy, first, "a")
    assert policy.choose(call("s2"), ENGINES) == "a"


@pytest.mark.parametrize(("name", "late"), [("published", 6), ("min_heap", 2), ("sticky", 2), ("cost", 2)])
def test_what_a_late_joiner_is_given(name, late):
    """The published heap overloads it; policies that count live calls give it its share."""
    policy = make_balance_policy(name)
    for number in range(6):
        request = call(f"old{number}", number=number)
        served(policy, request, policy.choose(request, ["a", "b"]))
        policy.forget_session(request.session_id)
    chosen = [policy.choose(call(f"new{number}"), ENGINES) for number in range(6)]
    # The published heap has given three to each of the others before it gives the newcomer its third.
    assert chosen.count("c") == (4 if name == "published" else late)


def test_cost_sends_a_group_where_its_prompt_is():
    clock = Clock()
    policy = CostPolicy(clock=clock)
    first = call("s0", 20_000, "g")
    home = policy.choose(first, ENGINES)
    clock.now += 5.0  # its prefill is done by then
    served(policy, first, home)
    assert [policy.choose(call(f"s{number}", 20_000, "g"), ENGINES) for number in (1, 2)] == [home, home]


def test_cost_does_not_pile_a_group_upon_one_engine():
    policy = CostPolicy(clock=Clock())
    chosen = [policy.choose(call(f"s{number}", 2000, "g"), ENGINES) for number in range(60)]
    assert all(chosen.count(engine) >= 10 for engine in ENGINES)


@pytest.mark.parametrize(("hysteresis", "stays"), [(0.1, False), (0.99, True)])
def test_cost_leaves_a_home_that_is_dearer_by_more_than_the_hysteresis(hysteresis, stays):
    policy = CostPolicy(CostModel(hysteresis=hysteresis), clock=Clock())
    request = call("s", 2000)
    home = policy.choose(request, ["a", "b"])
    served(policy, request, home)
    for number in range(30):
        policy.choose(call(f"load{number}", 20_000), [home])
    assert (policy.choose(call("s", 2500, number=1), ["a", "b"]) == home) is stays


def test_cost_spares_an_engine_whose_cache_is_full_of_live_rollouts():
    policy = CostPolicy(clock=Clock())
    for engine in ("a", "b"):
        policy.observe_load(engine, EngineLoad(running=0, waiting=0, kv_usage=0.0, kv_capacity=100_000))
    resident = call("old", 95_000)
    served(policy, resident, policy.choose(resident, ["a"]))
    light = call("light", 30_000)
    policy.choose(light, ["b"])  # busier, but with room
    assert policy.choose(call("new", 30_000), ["a", "b"]) == "b"


@given(load=st.integers(0, 20), more=st.integers(1, 20), prompt=st.integers(100, 50_000))
@settings(max_examples=25, deadline=None)
def test_cost_is_monotone_in_load(load, more, prompt):
    policy = CostPolicy(clock=Clock())
    for number in range(load):
        policy.choose(call(f"a{number}", 3000), ["a"])
    for number in range(load + more):
        policy.choose(call(f"b{number}", 3000), ["b"])
    assert policy.choose(call("new", prompt), ["b", "a"]) == "a"


def test_cost_learns_that_an_engine_is_slow():
    clock = Clock()
    policy = CostPolicy(clock=clock)
    for number in range(400):
        for engine, seconds in (("slow", 20.0), ("fast", 2.0)):
            request = call(f"{engine}{number}", 2000)
            policy.choose(request, [engine])
            clock.now += seconds
            policy.release(request, engine, CallOutcome(sampled_tokens=100))
            policy.forget_session(request.session_id)
    for number in range(3):
        policy.choose(call(f"load{number}", 2000), ["fast"])
    assert policy.choose(call("new", 2000), ["slow", "fast"]) == "fast"


def test_cost_learns_nothing_of_answers_from_calls_that_were_cut_before_the_first_token():
    clock = Clock()
    policy, fresh = CostPolicy(clock=clock), CostPolicy(clock=clock)
    for number in range(200):
        request = call(f"cut{number}", 2000)
        policy.release(request, policy.choose(request, ["a"]), CallOutcome())
        policy.forget_session(request.session_id)
    for one in (policy, fresh):
        clock.now += 1000.0
        served(one, call("s", 9000), one.choose(call("s", 9000), ["a"]))
        clock.now += 1000.0
        for number in range(60):  # a long answer would take long in such a batch
            one.choose(call(f"busy{number}", 100), ["a"])
        clock.now += 1000.0
        assert one.choose(call("s", 9000, number=1), ["a", "b"]) == "b"


def test_cost_forgets_rollouts_and_groups():
    policy = CostPolicy(clock=Clock())
    for number in range(50):
        request = call(f"s{number}", 2000, f"g{number // 8}")
        served(policy, request, policy.choose(request, ENGINES))
        policy.forget_session(request.session_id)
    assert policy.tracked == 0


@pytest.mark.parametrize("new_weights", [False, True])
def test_cost_meets_new_weights_with_no_beliefs(new_weights):
    clock = Clock()
    policy = CostPolicy(CostModel(hysteresis=0.0), clock=clock)
    request = call("s", 40_000)
    home = policy.choose(request, ["a", "b"])
    clock.now += 10.0
    served(policy, request, home)
    if new_weights:
        policy.invalidate_cache(home)
    policy.choose(call("load", 1000), [home])
    clock.now += 10.0
    stays = policy.choose(call("s", 40_000, number=1), ["a", "b"]) == home
    assert stays is not new_weights
