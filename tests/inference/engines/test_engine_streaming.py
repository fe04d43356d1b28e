"""Streams of engines: what they report, and what becomes of those that break."""

import asyncio

import pytest
from engine_cases import BASIC, CASES
from fake_vllm import FakeVllm

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.inference.protocol import ContextExceeded
from prorl_gym.testing.inference.engine_conformance import STOP_ID, request


@pytest.fixture(params=["vllm-0.32", "sglang"])
async def case(request):
    async with CASES[request.param]() as opened:
        opened.server.ids = [10, 11, 12, STOP_ID]
        yield opened


async def test_only_a_call_that_asks_for_it_is_streamed(case):
    await case.engine.generate(request())
    await case.engine.generate(request(on_tokens=lambda ids: None))
    case.reopen(record_routed_experts=True)
    await case.engine.generate(request(on_tokens=lambda ids: None))
    assert [body.get("stream", False) for body in case.server.bodies] == [False, True, False]


@pytest.mark.parametrize("written", [None, b"5,6,7"])
async def test_a_stream_that_breaks_is_an_abort_with_what_was_reported(case, written):
    case.server.mode = "cut"
    reported = []
    result = await case.engine.generate(request(on_tokens=reported.extend, prompt_ids_json=written))
    assert (result.finish_reason, result.token_ids, result.logprobs) == ("abort", [10], [-0.25])
    assert reported == [10]


async def test_a_stream_that_takes_too_long_is_an_abort_with_what_was_reported(case):
    case.server.mode = "hang"
    case.reopen(request_seconds=0.3)
    result = await case.engine.generate(request(on_tokens=lambda ids: None))
    assert (result.finish_reason, result.token_ids) == ("abort", [10])


@pytest.mark.parametrize("mode", ["open", "undone", "lost"])
async def test_a_stream_is_whole_before_its_connection_ends(case, mode):
    """It ends with ``[DONE]``, or with a finish reason and the usage; what the connection does then is no matter."""
    case.server.mode = mode
    case.reopen(request_seconds=30)
    async with asyncio.timeout(5):
        result = await case.engine.generate(request(on_tokens=lambda ids: None))
    assert (result.finish_reason, result.token_ids) == ("stop", [10, 11, 12, STOP_ID])
    assert result.cached_tokens == 1


async def test_a_stream_that_breaks_after_its_finish_reason_is_no_abort(case):
    whole, case.server.mode = case.server.events, "lost"
    case.server.events = lambda answer: [event for event in whole(answer) if event.get("choices") != []]
    assert (await case.engine.generate(request(on_tokens=lambda ids: None))).finish_reason == "stop"


async def test_streams_that_end_leave_their_connection_to_the_next_call(case):
    for _ in range(5):
        await case.engine.generate(request(on_tokens=lambda ids: None))
    assert len(case.server.connections) == 1


async def test_a_fault_after_the_first_token_keeps_that_token(case):
    for ids in ([10, 100, STOP_ID], [10, 100]):  # outside of the vocabulary, in the middle and at the end
        case.server.ids = ids
        result = await case.engine.generate(request(on_tokens=lambda ids: None))
        assert (result.finish_reason, result.token_ids) == ("abort", [10])


async def test_an_error_event_before_any_token_is_the_engines_failure(case):
    case.server.events = lambda answer: [{"error": {"message": "CUDA\nerror", "code": 500}}]
    with pytest.raises(EngineError, match="CUDA error") as caught:
        await case.engine.generate(request(on_tokens=lambda ids: None))
    assert caught.value.kind is FailureKind.ENGINE_UNREACHABLE


async def test_a_prompt_that_does_not_fit_is_a_limit_in_a_stream_too(case):
    """SGLang's ``/generate`` streams its refusals with status 200, as events without a code."""
    words = "The input (70 tokens) is longer than the model's context length (64 tokens)."
    case.server.events = lambda answer: [{"error": {"message": words}}]
    with pytest.raises(ContextExceeded) as caught:
        await case.engine.generate(request(on_tokens=lambda ids: None))
    assert caught.value.max_model_len == 64


async def test_a_server_that_ignores_the_wish_is_read_as_ever(case):
    remember = case.server.remember

    async def unstreamed(call):
        body = await remember(call)
        case.server.bodies[-1] = body | {"stream": False}
        return body

    case.server.remember = unstreamed
    result = await case.engine.generate(request(on_tokens=lambda ids: None))
    assert result.token_ids == [10, 11, 12, STOP_ID]


async def test_an_endless_stream_ends_at_the_requested_tokens():
    async with FakeVllm() as server:
        engine = VllmEngine("e", server.url, VllmOptions(**BASIC))
        whole = server.events

        def events(answer):
            first, *_ = whole(answer)
            more = first | {"choices": [first["choices"][0] | {"finish_reason": None}]}
            return [more] * 100

        server.events = events
        result = await engine.generate(request(max_tokens=3, on_tokens=lambda ids: None))
        assert (result.finish_reason, result.token_ids) == ("abort", [10, 10, 10])
        await engine.close()


async def test_a_pool_hands_the_reports_on(case):
    pool = EnginePool("policy")
    pool.add_engine(case.engine)
    async with pool:
        reported = []
        result = await pool.generate(request(on_tokens=reported.extend))
    assert reported == result.token_ids
