"""Additive increase, multiplicative decrease."""

from prorl_gym.inference.balance.aimd_share import AimdOptions, AimdShare
from prorl_gym.records import EngineLoad

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


def test_it_grows_while_all_is_well():
    share = AimdShare(OPTIONS)
    assert [look(share, load(queries=100 * n, hits=95 * n), reusable=96 * n) for n in (1, 2)] == [0.6, 0.7]


def test_it_does_not_grow_when_no_rollout_waits():
    assert look(AimdShare(OPTIONS), load(), used_up=False) == 0.5


def test_it_never_exceeds_the_most():
    share = AimdShare(AimdOptions(initial_share=0.5, increase=1.0, max_share=0.8))
    assert look(share, load()) == 0.8


def test_a_preemption_cuts_it():
    share = AimdShare(OPTIONS)
    look(share, load(), used_up=False)
    assert look(share, load(preemptions=1)) == 0.25


def test_what_was_preempted_before_we_looked_is_no_reason():
    assert look(AimdShare(OPTIONS), load(preemptions=50), used_up=False) == 0.5


def test_prompts_computed_again_cut_it():
    share = AimdShare(OPTIONS)
    look(share, load(queries=100, hits=90), reusable=90, used_up=False)
    assert look(share, load(queries=200, hits=140), reusable=180) == 0.25


def test_new_prompts_that_no_cache_could_hold_do_not():
    share = AimdShare(OPTIONS)
    look(share, load(queries=100, hits=90), reusable=90, used_up=False)
    assert look(share, load(queries=200, hits=91), reusable=91) == 0.6


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


def test_it_never_falls_below_the_least():
    share = AimdShare(AimdOptions(initial_share=0.2, min_share=0.15, decrease_factor=0.1))
    look(share, load(), used_up=False)
    assert look(share, load(preemptions=1)) == 0.15


def test_an_engine_that_was_started_again_is_no_sign():
    share = AimdShare(OPTIONS)
    look(share, load(queries=1000, hits=900, preemptions=7), reusable=900, used_up=False)
    assert look(share, load(queries=10, hits=0), reusable=1000) == 0.6


def test_it_does_not_grow_while_an_engine_queues_with_a_full_cache():
    assert look(AimdShare(OPTIONS), load(waiting=3, usage=0.99)) == 0.5


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
