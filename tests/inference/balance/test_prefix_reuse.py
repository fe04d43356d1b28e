"""What large enough caches would have found."""

from prorl_gym.inference.balance.cache_estimate import PrefixReuse
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.testing.inference.engine_conformance import request


def call(session: str, tokens: int, group: str = "") -> GenerationRequest:
    return request(session_id=session, prompt_ids=range(tokens), group_id=group)


def answer(count: int, engine: str = "e") -> GenerationResult:
    return GenerationResult([1] * count, [-1.0] * count, "stop", "raw", engine, [0] * count, 0.0)


def test_the_context_of_the_call_before_is_reusable():
    reuse = PrefixReuse()
    reuse.record_call(call("a", 100), answer(20))
    assert reuse.reusable_tokens == 0
    reuse.record_call(call("a", 150), answer(5))
    assert reuse.reusable_tokens == 120
    reuse.record_call(call("a", 90), answer(5))
    assert reuse.reusable_tokens == 210, "never more than the prompt"


def test_a_groups_first_prompt_is_reusable_while_any_of_its_rollouts_is_known():
    reuse = PrefixReuse()
    reuse.record_call(call("a", 100, "g"), answer(1))
    reuse.record_call(call("b", 100, "g"), answer(1))
    assert reuse.reusable_tokens == 100
    reuse.forget_session("a")
    reuse.forget_session("b")
    reuse.record_call(call("c", 100, "g"), answer(1))
    assert reuse.reusable_tokens == 100


def test_it_is_counted_for_the_engines_that_served_the_calls():
    reuse = PrefixReuse()
    for engine in ("a", "a", "b"):
        reuse.record_call(call("s", 100), answer(0, engine))
    assert [reuse.reusable_tokens_on(engines) for engines in (("a",), ("b",), ("a", "b"), ("c",))] == [100, 100, 200, 0]


def test_what_an_engine_lost_is_not_reusable():
    reuse = PrefixReuse()
    reuse.record_call(call("a", 100), answer(1, "gone"))
    reuse.record_call(call("b", 100), answer(1, "here"))
    reuse.invalidate_cache("gone")
    reuse.record_call(call("a", 110), answer(1))
    reuse.record_call(call("b", 110), answer(1))
    assert reuse.reusable_tokens == 101


def test_new_weights_make_everything_worthless():
    reuse = PrefixReuse()
    reuse.record_call(call("a", 100, "g"), answer(1))
    reuse.invalidate_all()
    reuse.record_call(call("a", 110, "g"), answer(1))
    assert reuse.reusable_tokens == 0


def test_nothing_is_remembered_of_who_is_forgotten():
    reuse = PrefixReuse()
    for n in range(10):
        reuse.record_call(call(f"s{n}", 5, f"g{n % 2}"), answer(1))
    for n in range(11):
        reuse.forget_session(f"s{n}")
    assert reuse.tracked == 0
