"""Answers that an engine cannot have sampled under the request are the engine's fault, in every dialect of tokens."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from fake_nemo_rl import FakeNemoRl
from fake_server import FakeServer
from fake_sglang import FakeSglang
from fake_vllm import FakeVllm, completion

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engines.chat_prefix import ChatPrefixEngine, ChatPrefixOptions
from prorl_gym.inference.engines.dialect import AnsweredCall
from prorl_gym.inference.engines.http_engine import HttpEngine
from prorl_gym.inference.engines.sglang import SglangEngine, SglangOptions
from prorl_gym.inference.engines.vllm import VllmDialect, VllmEngine, VllmOptions
from prorl_gym.inference.protocol import GenerationResult
from prorl_gym.testing.inference.engine_conformance import STOP_ID, request

CONTROL = 90
"""A control token that no call names as a stop id."""
OPTIONS: dict[str, Any] = {"model": "m", "vocab_size": 100, "control_ids": frozenset({CONTROL})}


@dataclass(frozen=True)
class Wire:
    """A dialect, and where its answers hold what is spoilt here."""

    server: Callable[..., FakeServer]
    engine: Callable[[str], HttpEngine]
    finish: Callable[[dict[str, Any], str], object]
    logprob: Callable[[dict[str, Any], float], object]
    forget_prompt: Callable[[dict[str, Any]], object]


def _vllm_finish(answer: dict[str, Any], reason: str) -> None:
    answer["choices"][0]["finish_reason"] = reason


def _sglang_finish(answer: dict[str, Any], reason: str) -> None:
    answer["meta_info"]["finish_reason"] = {"type": reason}


WIRES = {
    "vllm": Wire(
        FakeVllm,
        lambda url: VllmEngine("e", url, VllmOptions(**OPTIONS)),
        _vllm_finish,
        lambda answer, value: answer["choices"][0]["logprobs"]["token_logprobs"].__setitem__(0, value),
        lambda answer: answer["choices"][0].pop("prompt_token_ids"),
    ),
    "sglang": Wire(
        FakeSglang,
        lambda url: SglangEngine("e", url, SglangOptions(**OPTIONS)),
        _sglang_finish,
        lambda answer, value: answer["meta_info"]["output_token_logprobs"][0].__setitem__(0, value),
        lambda answer: answer.pop("prompt_token_ids"),
    ),
    "chat_prefix": Wire(
        FakeNemoRl,
        lambda url: ChatPrefixEngine("e", url, ChatPrefixOptions(**OPTIONS)),
        _vllm_finish,
        lambda answer, value: answer["choices"][0]["message"]["generation_log_probs"].__setitem__(0, value),
        lambda answer: answer["choices"][0]["message"].pop("prompt_token_ids"),
    ),
}

of_every_dialect = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)


async def answer(wire: Wire, ids: list[int], mutate: Callable[[dict[str, Any]], object] | None = None, **server: Any):
    """Make a call of eight tokens that is answered with these."""

    def changed(body: dict[str, Any]) -> None:
        if mutate is not None:
            mutate(body)

    async with wire.server(ids=ids, mutate=changed, **server) as fake:
        engine = wire.engine(fake.url)
        try:
            return await engine.generate(request())
        finally:
            await engine.close()


async def refused(*args: Any, **kwargs: Any) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await answer(*args, **kwargs)
    assert caught.value.kind is FailureKind.ENGINE_CONTRACT
    return caught.value


@of_every_dialect
async def test_a_length_that_was_not_reached(wire: Wire) -> None:
    error = await refused(wire, [10, 11, 12], lambda body: wire.finish(body, "length"))
    assert "5 tokens before its limit" in error.what
    assert "max_turn_tokens" in error.fix


@of_every_dialect
async def test_a_stop_without_a_stop_token(wire: Wire) -> None:
    error = await refused(wire, [10, 11, 12], lambda body: wire.finish(body, "stop"))
    assert "stopped at token 12, which is no stop token" in error.what


@of_every_dialect
async def test_tokens_after_a_stop_token(wire: Wire) -> None:
    error = await refused(wire, [10, STOP_ID, 12, STOP_ID])
    assert "sampled on after the stop token 2" in error.what


@of_every_dialect
async def test_the_answer_of_another_model(wire: Wire) -> None:
    error = await refused(wire, [10, STOP_ID], lambda body: body.update(model="another\nmodel"))
    assert "answered with the model 'another model', 'm' was requested" in error.what


@of_every_dialect
async def test_an_answer_that_does_not_tell_the_prompt(wire: Wire) -> None:
    error = await refused(wire, [10, STOP_ID], wire.forget_prompt)
    assert "does not return the prompt ids that the model got" in error.what


@of_every_dialect
@pytest.mark.parametrize("value", [-1e308, -3.5e38])
async def test_a_log_prob_that_is_infinite_in_float32(wire: Wire, value: float) -> None:
    error = await refused(wire, [10, STOP_ID], lambda body: wire.logprob(body, value))
    assert "as a log-prob" in error.what


async def accepted(*args: Any, **kwargs: Any) -> GenerationResult:
    result: GenerationResult = await answer(*args, **kwargs)
    return result


@of_every_dialect
async def test_the_lowest_log_prob_of_float32_is_one(wire: Wire) -> None:
    assert (await accepted(wire, [10, STOP_ID], lambda body: wire.logprob(body, -3.4e38))).logprobs[0] == -3.4e38


@of_every_dialect
async def test_a_turn_may_end_with_a_control_token_that_was_not_named(wire: Wire) -> None:
    result = await accepted(wire, [10, CONTROL], lambda body: wire.finish(body, "stop"))
    assert (result.token_ids, result.finish_reason) == ([10, CONTROL], "stop")


@of_every_dialect
async def test_a_stop_token_may_be_the_last_that_fits(wire: Wire) -> None:
    result = await accepted(wire, [*range(10, 17), STOP_ID], lambda body: wire.finish(body, "length"))
    assert len(result.token_ids) == 8


@pytest.mark.parametrize("name", ["vllm", "chat_prefix"])
async def test_vllms_guard_against_repetition_ends_a_turn(name: str) -> None:
    wire = WIRES[name]
    assert (await accepted(wire, [10, 10], lambda body: wire.finish(body, "repetition"))).finish_reason == "stop"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
async def test_a_full_context_ends_a_call_before_its_length(name: str) -> None:
    """Three ids of prompt and three sampled, as the model list says; it is asked when an answer is short."""
    wire, models = WIRES[name], {"data": [{"id": "m", "max_model_len": 6}]}
    result = await accepted(wire, [10, 11, 12], lambda body: wire.finish(body, "length"), models=models)
    assert result.finish_reason == "length"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
async def test_a_context_that_is_not_full_does_not(name: str) -> None:
    wire, models = WIRES[name], {"data": [{"id": "m", "max_model_len": 64}]}
    error = await refused(wire, [10, 11, 12], lambda body: wire.finish(body, "length"), models=models)
    assert "at 6 of 64 tokens of context" in error.what


async def test_a_server_may_answer_with_another_name_of_the_same_model() -> None:
    cards = [
        {"id": "first", "root": "/weights"},
        {"id": "m", "root": "/weights"},
        {"id": "adapter", "root": "/adapter", "parent": "first"},
    ]
    async with FakeVllm(models={"data": cards}) as fake:
        engine = WIRES["vllm"].engine(fake.url)
        assert (await engine.health()).ok
        fake.mutate = lambda body: body.update(model="first")
        await engine.generate(request())
        fake.mutate = lambda body: body.update(model="adapter")
        with pytest.raises(EngineError, match="answered with the model 'adapter'"):
            await engine.generate(request())
        await engine.close()


def test_routed_experts_must_be_finite() -> None:
    """1e999 is JSON; a record would hold null in its place."""
    dialect = VllmDialect("http://h/v1", VllmOptions(**OPTIONS, record_routed_experts=True))
    whole = completion(
        {"model": "m", "prompt": [5, 6, 7], "max_tokens": 8, "stop_token_ids": [2], "logprobs": 0}, [2], "r"
    )
    whole["choices"][0]["routed_experts"] = ["here"]
    payload = json.dumps(whole).replace('"here"', "1e999").encode()
    with pytest.raises(EngineError, match="a number that is not finite"):
        dialect.read_sample(payload, request(), AnsweredCall("e", 0, 0.1))
