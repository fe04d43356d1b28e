"""What large enough caches would have found. Tokens are counted in blocks of 128."""

from prorl_gym.inference.balance.cache_estimate import PrefixReuse
from prorl_gym.testing.inference.engine_conformance import request

BLOCK = 128


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
