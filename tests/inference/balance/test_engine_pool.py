import asyncio
from dataclasses import replace
from itertools import cycle

import pytest
from fake_vllm import FakeVllm
from hypothesis import given
from hypothesis import strategies as st
from token_codecs import BOUNDED
from virtual_time import virtually

from prorl_gym.deadlines import Deadline
from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.engine_pool import EnginePool, PoolOptions
from prorl_gym.inference.balance.health_monitor import FailoverOptions
from prorl_gym.inference.balance.simple_policies import StickyLeastOutstanding
from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.inference.protocol import (
    CallTimedOut,
    ContextExceeded,
    EngineOverloaded,
    GenerationRequest,
    GenerationResult,
)
from prorl_gym.testing.inference.engine_conformance import request
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply, scripted_replies

QUICK = FailoverOptions(max_attempts=3, recovery_seconds=2.0, first_probe_seconds=0.001, max_probe_seconds=0.01)
INSTANT = FailoverOptions(max_attempts=3, recovery_seconds=2.0, first_probe_seconds=0.0, max_probe_seconds=0.0)
ANSWER = Reply((10, 2))


def fine(request):
    return ANSWER


def down(kind=FailureKind.ENGINE_UNREACHABLE):
    return EngineError(kind, f"engine is down ({kind.value})")


def pool_of(*engines, failover=QUICK, **options):
    pool = EnginePool("policy", failover=failover, **options)
    for engine in engines:
        pool.add_engine(engine)
    return pool


@pytest.mark.parametrize("kind", ["engine_unreachable", "engine_timeout", "engine_overloaded", "engine_contract"])
async def test_a_failed_call_is_made_again_elsewhere_from_the_same_ids(kind):
    bad, good = FakeEngine("bad", lambda _: down(FailureKind(kind))), FakeEngine("good", fine)
    async with pool_of(bad, good) as pool:
        result = await pool.generate(request())
    assert result.engine == "good"
    assert bad.requests[0].prompt_ids == good.requests[0].prompt_ids == (5, 6, 7)
    assert bad.requests[0].request_id != good.requests[0].request_id
    assert pool.failovers == 1


async def test_a_call_that_is_too_long_for_its_time_says_so_and_is_not_made_elsewhere():
    slow, other = FakeEngine("a", scripted_replies([ANSWER, CallTimedOut("a", 3.0)])), FakeEngine("b", fine)
    async with pool_of(slow) as pool:
        await pool.generate(request())
        pool.members.all[0].pace.record_call(seconds=50.0, tokens=100)
        pool.add_engine(other)
        with pytest.raises(EngineError, match=r"At its pace 400 tokens take \d+ s.\nRaise 'request_seconds'") as caught:
            await pool.generate(replace(request(), max_tokens=400))
        assert (caught.value.kind, other.requests) == (FailureKind.ENGINE_TIMEOUT, [])
        assert await pool.measure_paces() == {"a": 0.0, "b": 0.0}


async def test_a_refusal_is_not_tried_elsewhere():
    refusing, other = FakeEngine("a", lambda _: down(FailureKind.ENGINE_REFUSED)), FakeEngine("b", fine)
    async with pool_of(refusing, other) as pool:
        with pytest.raises(EngineError) as caught:
            await pool.generate(request())
        assert pool.healthy == ["a", "b"]
    assert caught.value.kind is FailureKind.ENGINE_REFUSED
    assert other.requests == []


async def test_an_engine_that_failed_this_call_is_the_last_resort():
    class LateFailure(FakeEngine):
        async def generate(self, request):
            for _ in range(10):  # long enough for the first engine to be well again
                await asyncio.sleep(0)
            raise down()

    first = FakeEngine("first", lambda _: down(FailureKind.ENGINE_CONTRACT))
    async with pool_of(first, LateFailure("second", fine), FakeEngine("third", fine), failover=INSTANT) as pool:
        assert (await pool.generate(request())).engine == "third"
    assert len(first.requests) == 1


async def test_attempts_are_bounded_and_the_last_error_comes_out():
    engines = [FakeEngine(f"e{n}", lambda _: down(FailureKind.ENGINE_CONTRACT)) for n in range(5)]
    async with pool_of(*engines) as pool:
        with pytest.raises(EngineError) as caught:
            await pool.generate(request())
    assert caught.value.kind is FailureKind.ENGINE_CONTRACT
    assert sum(len(engine.requests) for engine in engines) == QUICK.max_attempts


async def test_an_engine_whose_probe_breaks_is_probed_again():
    class Odd(FakeEngine):
        breaks = 2

        async def health(self):
            self.breaks -= 1
            if self.breaks >= 0:
                raise TypeError("an answer that nobody foresaw")
            return await super().health()

    async with pool_of(Odd("e", scripted_replies([down(), ANSWER]))) as pool:
        assert (await pool.generate(request())).token_ids == [10, 2]
        assert pool.healthy == ["e"]
    async with pool_of(Odd("e", fine)) as pool:
        assert (await pool.check_health())["e"].detail == "its health check broke (TypeError)"
        assert (await pool.generate(request())).token_ids == [10, 2]


async def test_patience_ends_with_a_message_that_names_the_pool():
    engine = FakeEngine("e", fine)
    engine.down_error = down()
    failover = FailoverOptions(max_attempts=3, recovery_seconds=0.02, first_probe_seconds=0.001, max_probe_seconds=0.01)
    async with pool_of(engine, failover=failover) as pool:
        health = await pool.check_health()
        assert health["e"].detail == "engine is down (engine_unreachable)"
        with pytest.raises(EngineError) as caught:
            await pool.generate(request())
    assert str(caught.value) == (
        "pool policy: no engine was well for 0.02 s (engine is down (engine_unreachable)).\n"
        "Start the engines, or correct 'engines'."
    )


async def test_retry_after_keeps_the_engine_alone():
    busy = FakeEngine("e", scripted_replies([EngineOverloaded("e", 503, 0.05), ANSWER]))
    failover = FailoverOptions(max_attempts=2, recovery_seconds=2.0, first_probe_seconds=0.001, max_probe_seconds=1.0)
    async with pool_of(busy, failover=failover) as pool:
        started = asyncio.get_running_loop().time()
        await pool.generate(request())
        assert asyncio.get_running_loop().time() - started >= 0.05


async def test_the_context_is_learnt_and_never_overruled():
    engine = FakeEngine("e", lambda _: ContextExceeded(64), max_model_len=128)
    async with pool_of(engine) as pool:
        for _ in range(2):
            with pytest.raises(ContextExceeded):
                await pool.generate(request())
        assert pool.max_model_len == 64
        assert pool.healthy == ["e"]
    async with pool_of(FakeEngine("e", lambda _: ContextExceeded(1), max_model_len=128)) as pool:
        await pool.check_health()
        with pytest.raises(ContextExceeded):
            await pool.generate(request())
        assert pool.max_model_len == 128


async def test_versions_label_tokens():
    engine, late = FakeEngine("e", fine), FakeEngine("late", fine)
    async with pool_of(engine, version=4) as pool:
        assert (await pool.generate(request())).versions == [4, 4]
        pool.set_version(5)
        pool.add_engine(late)
        assert (await pool.generate(request())).versions == [5, 5]
        assert late.version == 5


async def test_removal_of_an_engine_moves_its_calls():
    async with FakeVllm(mode="hang") as server:
        leaving = VllmEngine("leaving", server.url, VllmOptions(model="m", vocab_size=100))
        async with pool_of(leaving, failover=QUICK) as pool:
            call = asyncio.create_task(pool.generate(request()))
            await server.running_is(1)
            pool.add_engine(FakeEngine("staying", fine))
            await pool.remove_engine("leaving")
            assert (await call).engine == "staying"
            assert pool.engines == ["staying"]


async def test_a_drained_engine_ends_its_calls_and_gets_no_more():
    hold = asyncio.Event()
    leaving, staying = FakeEngine("leaving", lambda _: Reply((10, 2), hold=hold)), FakeEngine("staying", fine)
    async with pool_of(leaving) as pool:
        call = asyncio.create_task(pool.generate(request()))
        await leaving.call_held.wait()
        pool.add_engine(staying)
        draining = asyncio.create_task(pool.drain_engine("leaving"))
        await asyncio.sleep(0)
        assert (await pool.generate(request())).engine == "staying"
        assert not draining.done()
        hold.set()
        await draining
        assert (await call).engine == "leaving"
        await pool.remove_engine("leaving")
        assert leaving.closed
        await pool.drain_engine("unknown")


async def test_a_router_is_never_left_alone():
    router = FakeEngine("router", scripted_replies([down(), EngineOverloaded("e", 503, 0.001), ANSWER]))
    async with pool_of(router, failover=INSTANT, options=PoolOptions(is_router=True)) as pool:
        assert (await pool.generate(request())).token_ids == [10, 2]
        assert pool.healthy == ["router"]
        assert (pool.failovers, pool.snapshot().engines[0].failures) == (2, 2)


class Slow(FakeEngine):
    """Fails a call after a while; the next it answers."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        if not self.requests:
            self.requests.append(request)
            await asyncio.sleep(0.1)
            raise down()
        return await super().generate(request)


@virtually
async def test_no_deadline_pays_for_what_a_call_loses_to_an_engine_that_fails():
    async with pool_of(Slow("e", fine), failover=INSTANT) as pool, Deadline(60.0) as deadline:
        await pool.generate(request())
    assert deadline.paused_seconds >= 0.1
    assert deadline.charged_seconds < 0.1


async def test_no_deadline_pays_for_a_wait_at_the_gate_or_for_an_engine_that_comes_back():
    engine = FakeEngine("e", fine)
    engine.down_error = down()
    async with pool_of(engine, failover=INSTANT) as pool, Deadline(60.0) as deadline:
        await pool.check_health()
        pool.gate.close()
        call = asyncio.create_task(pool.generate(request()))
        await asyncio.sleep(0.05)
        pool.gate.open()
        await asyncio.sleep(0.05)
        engine.down_error = None
        await call
        assert deadline.paused_seconds >= 0.08


async def test_a_snapshot_shows_what_engines_did():
    engine = FakeEngine("e", fine)
    async with pool_of(engine, version=2) as pool:
        await pool.generate(request())
        (state,) = pool.snapshot().engines
    assert (state.calls, state.sampled_tokens, state.version) == (1, 2, 2)
    assert (state.is_serving, state.cache_hit_rate) == (True, None)


async def test_cancel_by_id_reaches_the_engine_of_the_moment():
    hold = asyncio.Event()
    engine = FakeEngine("e", lambda _: Reply((10, 11, 12, 2), hold=hold))
    async with pool_of(engine) as pool:
        one = request()
        call = asyncio.create_task(pool.generate(one))
        await asyncio.sleep(0)
        assert await pool.cancel(one.request_id)
        result = await call
        assert (result.token_ids, result.finish_reason) == ([10, 11], "abort")
        assert not await pool.cancel(one.request_id)


@pytest.mark.parametrize("is_gate_closed", [True, False])
async def test_closing_ends_calls_that_wait(is_gate_closed):
    engine = FakeEngine("e", fine)
    pool = pool_of(engine, failover=FailoverOptions(recovery_seconds=60))
    if is_gate_closed:
        pool.gate.close()
    else:
        engine.down_error = down()
        await pool.check_health()
    call = asyncio.create_task(pool.generate(request()))
    await asyncio.sleep(0)
    await pool.close()
    with pytest.raises(EngineError):
        await asyncio.wait_for(call, 5)
    assert engine.closed


async def test_a_name_is_taken_once():
    async with pool_of(FakeEngine("e", fine)) as pool:
        with pytest.raises(ValueError, match="already has an engine e"):
            pool.add_engine(FakeEngine("e", fine))


# The whole scenario is drawn before it runs: its order of events may not depend on the clock.
moves = st.lists(
    st.tuples(
        st.sampled_from(["none", "cancel", "abort", "remove", "add", "forget"]),
        st.integers(0, 3),  # session
        st.integers(0, 3),  # turns of the event loop before the move
        st.integers(0, 11),  # which call it is about
    ),
    min_size=1,
    max_size=12,
)
answers = st.lists(st.sampled_from(["ok", "fail", "refuse", "hold"]), min_size=1, max_size=12)


@BOUNDED
@given(moves=moves, answers=answers)
def test_reservations_return_to_zero_under_any_interleaving(moves, answers):
    policy, upcoming = StickyLeastOutstanding(), cycle(answers)

    def script(request):
        match next(upcoming):
            case "ok":
                return ANSWER
            case "fail":
                return down()
            case "refuse":
                return down(FailureKind.ENGINE_REFUSED)
        return Reply((10, 2), hold=asyncio.Event())

    async def scenario():
        pool = pool_of(*(FakeEngine(f"e{n}", script) for n in range(3)), balance_policy=policy, failover=INSTANT)
        calls, ids = [], []
        for step, (move, session, turns, which) in enumerate(moves):
            one = request(session_id=f"s{session}")
            ids.append(one.request_id)
            calls.append(asyncio.create_task(pool.generate(one)))
            for _ in range(turns):
                await asyncio.sleep(0)
            match move:
                case "cancel":
                    calls[which % len(calls)].cancel()
                case "abort":
                    await pool.cancel(ids[which % len(ids)])
                case "remove" if len(pool.engines) > 1:
                    await pool.remove_engine(pool.engines[0])
                case "add":
                    pool.add_engine(FakeEngine(f"new{step}", script))
                case "forget":
                    pool.forget_session("s0")
        for call in calls:
            call.cancel()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        await pool.close()
        for session in range(4):
            pool.forget_session(f"s{session}")
        return ends

    for end in asyncio.run(scenario()):
        assert isinstance(end, GenerationResult | EngineError | asyncio.CancelledError)
    names = [f"e{n}" for n in range(3)] + [f"new{n}" for n in range(12)]
    assert [policy.reservations[name] for name in names] == [0] * len(names)
    assert [policy.live_rollouts(name) for name in names] == [0] * len(names)
