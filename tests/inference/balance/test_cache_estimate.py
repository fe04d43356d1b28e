"""The model of an engine's prefix cache, and what large enough caches would have found."""

from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.inference.balance.cache_estimate import CacheEstimate, PrefixReuse
from prorl_gym.testing.inference.engine_conformance import request


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
    for session in ("s0", "s1", "s2", "s3"):
        cache.begin_call(session, "", 100)
        cache.end_call(session, 100)
    assert [cache.cached_tokens(session, "", 100) for session in ("s0", "s1", "s2", "s3")] == [0, 50, 100, 100]


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


BLOCK = 128
"""Tokens are counted in such blocks."""


def make_call(reuse: PrefixReuse, session: str, blocks: int, *, group: str = "", engine: str = "e", sampled: int = 0):
    """Make a call with a prompt of so many blocks and one token more."""
    made = request(session_id=session, prompt_ids=range(blocks * BLOCK + 1), group_id=group)
    reuse.begin_call(made, engine)
    reuse.end_call(made, engine, sampled)


def blocks_of(reuse: PrefixReuse, *engines: str) -> int:
    return reuse.reusable_tokens_on(engines or ("e",)) // BLOCK


def test_the_context_of_the_call_before_is_reusable():
    reuse = PrefixReuse()
    make_call(reuse, "a", 10, sampled=2 * BLOCK)
    assert reuse.reusable_tokens == 0
    make_call(reuse, "a", 15)
    assert blocks_of(reuse) == 12
    make_call(reuse, "a", 9)
    assert blocks_of(reuse) == 21, "never more than the prompt"


def test_it_is_counted_when_the_call_begins():
    reuse = PrefixReuse()
    make_call(reuse, "a", 10)
    reuse.begin_call(request(session_id="a", prompt_ids=range(12 * BLOCK)), "e")
    assert blocks_of(reuse) == 10


def test_what_fills_no_whole_block_is_found_by_no_cache():
    reuse = PrefixReuse()
    for _ in range(2):
        reuse.begin_call(request(session_id="a", prompt_ids=range(BLOCK)), "e")
        reuse.end_call(request(session_id="a", prompt_ids=range(BLOCK)), "e", 0)
    assert reuse.reusable_tokens == 0, "the last token of a prompt is always computed"


def test_a_groups_first_prompt_is_reusable_while_any_of_its_rollouts_is_known():
    reuse = PrefixReuse()
    make_call(reuse, "a", 10, group="g")
    make_call(reuse, "b", 10, group="g")
    assert blocks_of(reuse) == 10
    reuse.forget_session("a")
    reuse.forget_session("b")
    make_call(reuse, "c", 10, group="g")
    assert blocks_of(reuse) == 10


def test_a_group_shares_its_first_prompt_and_no_more():
    reuse = PrefixReuse()
    make_call(reuse, "a", 10, group="g", engine="other")
    make_call(reuse, "a", 30, group="g")  # it brings a long context of its own
    make_call(reuse, "b", 20, group="g")
    assert blocks_of(reuse) == 10


def test_another_engine_has_not_computed_it():
    reuse = PrefixReuse()
    for engine in ("a", "a", "b", "a"):
        make_call(reuse, "s", 10, engine=engine)
    assert [blocks_of(reuse, *engines) for engines in (("a",), ("b",), ("a", "b"), ("c",))] == [10, 0, 10, 0]


def test_what_an_engine_lost_is_not_reusable():
    reuse = PrefixReuse()
    make_call(reuse, "a", 10, engine="gone")
    make_call(reuse, "b", 10, engine="here")
    reuse.invalidate_cache("gone")
    make_call(reuse, "a", 11, engine="gone")
    make_call(reuse, "b", 11, engine="here")
    assert blocks_of(reuse, "gone", "here") == 10


def test_a_forgotten_context_leaves_the_prompt_of_the_group():
    reuse = PrefixReuse()
    make_call(reuse, "a", 10, group="g")
    make_call(reuse, "b", 10, group="g")
    make_call(reuse, "b", 30, group="g")
    reuse.forget_context("b")
    before = blocks_of(reuse)
    make_call(reuse, "b", 35, group="g")
    assert blocks_of(reuse) - before == 10


def test_new_weights_make_everything_worthless():
    reuse = PrefixReuse()
    make_call(reuse, "a", 10, group="g")
    reuse.invalidate_all()
    make_call(reuse, "a", 11, group="g")
    assert reuse.reusable_tokens == 0


def test_nothing_is_remembered_of_who_is_forgotten():
    reuse = PrefixReuse()
    for number in range(10):
        make_call(reuse, f"s{number}", 5, group=f"g{number % 2}")
    for number in range(11):
        reuse.forget_session(f"s{number}")
    assert reuse.tracked == 0
