"""Who may talk to engines, and how many: decisions without a clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_codecs import BOUNDED

from prorl_gym.inference.balance.admission_state import AdmissionState, AimdOptions, AimdShare, ShortfallSum
from prorl_gym.records import EngineLoad


def test_one_is_admitted_however_large_it_is():
    book = AdmissionState(budget=10)
    book.request_turn("a", 500)
    book.request_turn("b", 500)
    assert book.admit() == ["a"]


def test_the_youngest_waits_when_the_live_outgrow_the_budget_and_the_oldest_goes_on():
    book = AdmissionState(budget=300)
    for name in ("old", "middle", "young"):
        book.request_turn(name, 100)
    assert book.admit() == ["old", "middle", "young"]
    assert book.request_turn("old", 250)
    assert book.request_turn("middle", 45), "the young one makes room enough"
    assert not book.request_turn("young", 100)
    assert (book.live, book.waiting, book.suspensions) == (2, 1, 1)
    assert book.admit() == []


def test_who_was_suspended_comes_back_before_anybody_new():
    book = AdmissionState(budget=300)
    for name in ("old", "young"):
        book.request_turn(name, 100)
    book.admit()
    book.request_turn("old", 290)
    assert not book.request_turn("young", 100)
    book.request_turn("new", 10)
    book.remove_session("old")
    assert book.admit() == ["young", "new"]


def test_evaluation_is_admitted_first_and_not_suspended_for_training():
    book = AdmissionState(budget=200)
    book.request_turn("train", 100)
    book.request_turn("other", 100)
    book.request_turn("eval", 100, priority=1)
    assert book.admit() == ["eval", "train"]
    assert book.request_turn("eval", 190)
    assert not book.request_turn("train", 100)


def test_new_rollouts_count_with_their_expected_length():
    book = AdmissionState(budget=1000)
    for name in ("a", "b"):
        book.request_turn(name, 10)
    book.admit()
    assert book.request_turn("a", 800)
    book.remove_session("a")  # rollouts end at 800, so one that begins counts with half of it
    for name in ("c", "d"):
        book.request_turn(name, 10)
    assert book.admit() == ["c"]


def test_who_rests_has_no_place_and_comes_back_before_anybody_new():
    book = AdmissionState(budget=200)
    for name in ("a", "b", "c"):
        book.request_turn(name, 100)
    assert book.admit() == ["a", "b"]
    book.release_slot("a")
    book.release_slot("a")
    book.release_slot("c")  # it waits: it has no place to give
    assert book.admit() == ["c"]
    assert (book.live, book.waiting, book.used) == (2, 0, 200)
    book.request_turn("new", 100)
    assert not book.request_turn("a", 100)
    assert (book.live, book.waiting) == (2, 2)
    book.remove_session("b")
    assert book.admit() == ["a"]


def test_who_rests_and_is_over_leaves_nothing():
    book = AdmissionState(budget=200)
    book.request_turn("a", 100, group="g", shared=50)
    book.admit()
    book.release_slot("a")
    assert book.used == 0
    book.remove_session("a")
    assert (book.live, book.waiting, book.tracked) == (0, 0, 0)


numbers = st.integers(0, 20) | st.integers(0, 10**9)


@BOUNDED
@given(st.lists(st.tuples(st.sampled_from(["add", "add", "remove", "expect"]), numbers), max_size=60))
def test_a_shortfall_is_the_one_that_adding_up_gives(steps: list[tuple[str, int]]):
    shortfall, kept = ShortfallSum(), list[int]()
    for step, number in steps:
        if step == "add":
            shortfall.add(number)
            kept.append(number)
        elif step == "expect":
            shortfall.expect(number / 2)
        elif kept:
            shortfall.remove(kept.pop(number % len(kept)))
        lacking = sum(max(0.0, shortfall.expected - each) for each in kept)
        assert shortfall.total == pytest.approx(lacking, rel=1e-9, abs=1e-3)


def test_there_is_room_for_what_rollouts_come_to():
    book = AdmissionState(1000)
    assert [book.has_room(coming) for coming in (0, 7, 8)] == [True, True, False]
    for name in ("a", "b"):
        book.request_turn(name, 300)
    book.admit()
    assert [book.has_room(coming) for coming in (0, 1)] == [True, False], "one may come and be seen waiting"
    book.request_turn("c", 500)
    book.admit()
    assert not book.has_room(0)


# Additive increase, multiplicative decrease.
OPTIONS = AimdOptions(initial_share=0.5, increase=0.1, decrease_factor=0.5, cooldown_seconds=10.0)


def load(*, preemptions: int = 0, queries: int = 0, hits: int = 0, waiting: int = 0, usage: float = 0.3) -> EngineLoad:
    return EngineLoad(
        running=1,
        waiting=waiting,
        kv_usage=usage,
        kv_capacity=1000,
        preemptions=preemptions,
        prefix_queries=queries,
        prefix_hits=hits,
    )


def look(share: AimdShare, figures: EngineLoad, *, reusable: int = 0, used_up: bool = True, now: float = 0.0) -> float:
    return round(share.update_share({"e": figures}, reusable, is_used_up=used_up, now=now), 6)


NARROW = AimdOptions(initial_share=0.5, increase=1.0, decrease_factor=0.1, min_share=0.15, max_share=0.8)
NO_LOAD = load(), 0


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ((load(queries=100, hits=95), 96), (load(queries=200, hits=190), 192), 0.6),
        (NO_LOAD, (load(preemptions=1), 0), 0.25),
        ((load(preemptions=50), 0), (load(preemptions=50), 0), 0.6),
        ((load(queries=100, hits=90), 90), (load(queries=200, hits=140), 180), 0.25),
        ((load(queries=100, hits=90), 90), (load(queries=200, hits=91), 91), 0.6),
        ((load(queries=1000, hits=900, preemptions=7), 900), (load(queries=10), 1000), 0.6),
        (NO_LOAD, (load(waiting=3, usage=0.99), 0), 0.5),
    ],
    ids=[
        "all is well",
        "a preemption",
        "preempted before we looked",
        "prompts computed again",
        "new prompts that no cache could hold",
        "an engine that was started again",
        "an engine that queues with a full cache",
    ],
)
def test_signs_of_overload_cut_it_and_their_absence_raises_it(
    before: tuple[EngineLoad, int], after: tuple[EngineLoad, int], share: float
):
    aimd = AimdShare(OPTIONS)
    assert look(aimd, before[0], reusable=before[1], used_up=False) == 0.5, "no rollout waits for a larger one"
    assert look(aimd, after[0], reusable=after[1]) == share


@pytest.mark.parametrize(("preemptions", "share"), [(0, 0.8), (1, 0.15)])
def test_it_stays_within_its_bounds(preemptions: int, share: float):
    aimd = AimdShare(NARROW)
    look(aimd, load(), used_up=False)
    assert look(aimd, load(preemptions=preemptions)) == share


def test_an_engine_whose_figures_were_missed_is_no_sign():
    share = AimdShare(OPTIONS)
    both = {engine: load(queries=100, hits=95) for engine in ("a", "b")}
    share.update_share(both, 190, is_used_up=False, now=0.0)
    share.update_share({"a": load(queries=200, hits=190)}, 285, is_used_up=False, now=5.0)
    share.update_share({engine: load(queries=300, hits=285) for engine in both}, 570, is_used_up=False, now=10.0)
    assert share.cuts == 0


def test_after_a_cut_it_waits_for_the_effect():
    share = AimdShare(OPTIONS)
    look(share, load(), used_up=False)
    cuts = [look(share, load(preemptions=n), now=float(n)) for n in (1, 5, 12)]
    assert cuts == [0.25, 0.25, 0.125]
    assert share.cuts == 2


def test_one_overloaded_engine_cuts_its_own_share_only():
    share = AimdShare(OPTIONS)
    share.update_share({name: load() for name in "abcd"}, 0, is_used_up=False, now=0.0)
    loads = {name: load() for name in "abc"} | {"d": load(preemptions=1)}
    assert round(share.update_share(loads, 0, is_used_up=True, now=1.0), 6) == (3 * 0.6 + 0.25) / 4


def test_of_many_engines_one_is_always_overloaded_and_the_share_grows_all_the_same():
    share, preemptions = AimdShare(OPTIONS), dict.fromkeys(range(100), 0)
    before = share.share
    for look_number in range(10):
        preemptions[look_number] += 1
        loads = {str(name): load(preemptions=count) for name, count in preemptions.items()}
        share.update_share(loads, 0, is_used_up=True, now=20.0 * look_number)
    assert share.share > before


def test_a_new_engine_begins_with_the_share_of_the_fleet():
    share = AimdShare(OPTIONS)
    look(share, load(), used_up=False)
    look(share, load(preemptions=1))
    loads = {"e": load(preemptions=1), "new": load(preemptions=9)}
    assert share.update_share(loads, 0, is_used_up=False, now=1.0) == 0.25
