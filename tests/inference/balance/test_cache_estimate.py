"""The model of an engine's prefix cache."""

from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.inference.balance.cache_estimate import CacheEstimate


def test_what_ran_is_cached():
    cache = CacheEstimate()
    cache.begin_call("s", "", 100)
    cache.end_call("s", 130)
    assert cache.cached_tokens("s", "", 200) == 130
    assert cache.cached_tokens("s", "", 50) == 50


def test_a_group_shares_its_first_prompt_once():
    cache = CacheEstimate()
    for session in ("s0", "s1"):
        cache.begin_call(session, "g", 100)
        cache.end_call(session, 130)
    assert cache.used == 160
    assert cache.cached_tokens("s2", "g", 500) == 100
    assert cache.cached_tokens("s0", "g", 500) == 130


def test_a_rollout_that_comes_late_brings_only_the_groups_prompt_as_shared():
    cache = CacheEstimate()
    cache.begin_call("s0", "g", 900, shared=100)
    assert cache.cached_tokens("s1", "g", 500) == 100


def test_what_was_used_longest_ago_is_evicted_from_its_end():
    cache = CacheEstimate(capacity=250)
    for session in ("s0", "s1", "s2"):
        cache.begin_call(session, "", 100)
        cache.end_call(session, 100)
    assert [cache.cached_tokens(session, "", 100) for session in ("s0", "s1", "s2")] == [50, 100, 100]


def test_a_running_call_is_not_evicted():
    cache = CacheEstimate(capacity=150)
    cache.begin_call("running", "", 100)
    cache.begin_call("other", "", 100)
    cache.end_call("other", 100)
    cache.end_call("running", 100)
    assert cache.cached_tokens("running", "", 100) == 100


def test_two_calls_of_a_rollout_at_once_are_one_context():
    cache = CacheEstimate()
    for _ in range(2):
        cache.begin_call("s", "g", 100)
    assert cache.used == 100
    for _ in range(2):
        cache.end_call("s", 120)
    cache.forget_session("s")
    assert (cache.used, cache.cached_tokens("s", "g", 100)) == (0, 0)


def test_what_is_over_is_gone():
    cache = CacheEstimate()
    cache.begin_call("s", "g", 100)
    cache.end_call("s", 120)
    cache.forget_session("s")
    assert (cache.used, cache.cached_tokens("s", "g", 100)) == (0, 0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "end", "forget", "clear"]), st.integers(0, 5), st.integers(1, 400)),
        max_size=80,
    )
)
@settings(max_examples=150, deadline=None)
def test_the_books_balance(steps):
    cache, running = CacheEstimate(capacity=700), set()
    for step, number, tokens in steps:
        session, group = f"s{number}", f"g{number // 3}"
        if step == "begin" and session not in running:
            running.add(session)
            cache.begin_call(session, group, 50 + tokens, shared=50)
        elif step == "end" and session in running:
            running.discard(session)
            cache.end_call(session, 50 + tokens)
        elif step == "forget":
            cache.forget_session(session)
        elif step == "clear":
            cache.clear()
        assert cache.used >= 0
        for other in range(6):
            assert 0 <= cache.cached_tokens(f"s{other}", f"g{other // 3}", 10_000) <= cache.used
    for number in range(6):
        cache.forget_session(f"s{number}")
    assert cache.used == 0
