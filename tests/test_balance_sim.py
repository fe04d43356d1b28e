"""The balancer's simulator: what it counts must be exact, or its table would be a story."""

import pytest
from balance_sim import Arm, Incidents, Workload, draw, replay
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.engine import Call, Hardware, SimEngine

from prorl_gym.inference.balance import make_balance_policy

SYSTEM, GROUP = 64, 32
FLEET = Workload("tiny", engines=3, kv_tokens=6000, groups=3, live=8, group_size=4)


def engine(kv_tokens: int = 10_000) -> SimEngine:
    return SimEngine("e", Hardware(kv_tokens=kv_tokens), SYSTEM, GROUP)


def call(session: str, prompt: int, output: int, group: str = "g") -> Call:
    return Call(session, group, prompt, output, asked=0.0)


def finish(one: SimEngine) -> float:
    """Run dry; return when the last call was done."""
    last = 0.0
    while one.next_event != float("inf"):
        last = one.next_event
        one.advance()
    return last


def serve(one: SimEngine, session: str, prompt: int, output: int, at: float = 0.0) -> float:
    """Run dry after one call; return when it was done."""
    one.submit(call(session, prompt, output), at)
    return finish(one)


def test_a_lone_call_takes_its_prefill_and_its_steps():
    one, hardware = engine(), Hardware(kv_tokens=10_000)
    steps = sum(hardware.step_base + hardware.step_per_call + hardware.step_per_token * (500 + n) for n in range(100))
    assert serve(one, "s", 500, 100) == pytest.approx(500 / hardware.prefill_rate + steps)


def test_the_next_turn_finds_everything_but_the_broken_block():
    one = engine()
    serve(one, "s", 500, 101)
    serve(one, "s", 900, 10, at=100.0)
    assert one.tally.hit == 601 // 16 * 16
    assert one.tally.prefilled == 500 + 900 - one.tally.hit


def test_a_group_finds_its_prompt_and_others_the_systems():
    one = engine()
    serve(one, "s0", 400, 10)
    one.submit(call("s1", 400, 10, "g"), 10.0)
    one.submit(call("s2", 400, 10, "h"), 10.0)
    finish(one)
    assert one.tally.hit == (SYSTEM + GROUP) + SYSTEM


def test_idle_tails_are_evicted_from_their_end_the_oldest_first():
    one = engine(kv_tokens=1000)
    for start, session in enumerate(("old", "young")):
        serve(one, session, 400, 10, at=100.0 * start)
    # 96 shared + 2 x 314 private are there; 430 more need 154 of the oldest.
    serve(one, "new", 516, 10, at=300.0)
    hit = one.tally.hit
    serve(one, "young", 420, 5, at=400.0)
    assert one.tally.hit - hit == 410 // 16 * 16, "the younger tail is whole"


def test_a_full_engine_preempts_the_youngest_and_finishes_everything():
    one = engine(kv_tokens=1000)
    done: list[str] = []
    for number in range(3):
        one.submit(Call(f"s{number}", "g", 300, 400, asked=float(number)), 0.0)
    while one.next_event != float("inf"):
        done += [call.session for call in one.advance()]
    assert sorted(done) == ["s0", "s1", "s2"]
    assert one.tally.preemptions > 0
    assert one.tally.sampled == 1200


@given(cuts=st.lists(st.floats(0.0, 3.0), max_size=6))
@settings(max_examples=40, deadline=None)
def test_steps_taken_at_once_are_the_steps_taken_one_by_one(cuts):
    """Calls that end at once only interrupt the closed form; all tokens and all busy time are still accounted for."""
    one, arrivals = engine(), sorted(cuts)
    one.submit(call("long", 300, 150), 0.0)
    for number, when in enumerate(arrivals):
        while one.next_event <= when:
            one.advance()
        one.submit(call(f"short{number}", 120, 1), when)
    finish(one)
    assert one.tally.sampled == 150 + len(arrivals)
    assert one.load().running == 0


@pytest.mark.parametrize("name", ["cost", "sticky", "round_robin", "published"])
@pytest.mark.parametrize("incidents", [Incidents(), Incidents(kill=(5.0, 1)), Incidents(join=5.0, epochs=(8.0,))])
def test_every_session_ends_and_every_token_is_sampled_once(name, incidents):
    trace = draw(FLEET, seed=3)
    arm = Arm(lambda clock: make_balance_policy(name), FLEET.live, aimd=True)
    result = replay(trace, Hardware(60_000), FLEET.engines, arm, incidents)
    assert result.finished == 12
    assert result.sampled == sum(session.output for session in trace.sessions)
