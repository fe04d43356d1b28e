"""Answers that an engine cannot have sampled under the request are the engine's fault, in every dialect of tokens."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from engine_cases import CASES, MESSAGE, OPENAI_CHOICE, within
from fake_vllm import FakeVllm, completion

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engines.response_validator import AnsweredCall
from prorl_gym.inference.engines.vllm import VllmDialect, VllmEngine, VllmOptions
from prorl_gym.inference.protocol import GenerationResult
from prorl_gym.left_out import left_out_counts
from prorl_gym.testing.inference.engine_conformance import STOP_ID, request

CONTROL = 90
"""A control token that no call names as a stop id."""
BASIC: dict[str, Any] = {"model": "m", "vocab_size": 100}
Mutate = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Wire:
    """A dialect, and how to change what its answers hold."""

    case: str
    finish: Callable[[str], Mutate]
    first_logprob: Callable[[float], Mutate]
    logprobs: Callable[[list[int], float], Mutate]
    """The same log-prob for each of these ids."""
    prompt: Callable[[object], Mutate]

    async def answer(
        self, ids: list[int], mutate: Mutate | None = None, models: object = None, **settings: Any
    ) -> GenerationResult:
        async with CASES[self.case]() as case:
            case.reopen(control_ids=frozenset({CONTROL}))
            case.server.ids, case.server.mutate, case.server.models = ids, mutate, models
            return await case.engine.generate(request(**settings))

    async def refusal(
        self, ids: list[int], mutate: Mutate | None = None, models: object = None, **settings: Any
    ) -> EngineError:
        with pytest.raises(EngineError) as caught:
            await self.answer(ids, mutate, models, **settings)
        assert caught.value.kind is FailureKind.ENGINE_CONTRACT
        return caught.value


WIRES = {
    "vllm": Wire(
        "vllm-0.32",
        within(*OPENAI_CHOICE, "finish_reason"),
        within(*OPENAI_CHOICE, "logprobs", "token_logprobs", 0),
        lambda ids, value: within(*OPENAI_CHOICE, "logprobs", "token_logprobs")([value] * len(ids)),
        within(*OPENAI_CHOICE, "prompt_token_ids"),
    ),
    "sglang": Wire(
        "sglang",
        lambda reason: within("meta_info", "finish_reason")({"type": reason}),
        within("meta_info", "output_token_logprobs", 0, 0),
        lambda ids, value: within("meta_info", "output_token_logprobs")([[value, one, None] for one in ids]),
        within("prompt_token_ids"),
    ),
    "chat_prefix": Wire(
        "chat_prefix",
        within(*OPENAI_CHOICE, "finish_reason"),
        within(*MESSAGE, "generation_log_probs", 0),
        lambda ids, value: within(*MESSAGE, "generation_log_probs")([value] * len(ids)),
        within(*MESSAGE, "prompt_token_ids"),
    ),
}

of_every_dialect = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)


@of_every_dialect
async def test_a_length_that_was_not_reached(wire: Wire) -> None:
    error = await wire.refusal([10, 11, 12], wire.finish("length"))
    assert "5 tokens before its limit" in error.what
    assert "max_turn_tokens" in error.fix


@of_every_dialect
async def test_a_stop_without_a_stop_token(wire: Wire) -> None:
    error = await wire.refusal([10, 11, 12], wire.finish("stop"))
    assert "stopped at token 12, which is no stop token" in error.what


IMPOSSIBLE: dict[str, tuple[list[int], Callable[[Wire], Mutate | None], str]] = {
    "tokens after a stop token": ([10, STOP_ID, 12, STOP_ID], lambda _: None, "sampled on after the stop token 2"),
    "the answer of another model": (
        [10, STOP_ID],
        lambda _: lambda body: body.update(model="another\nmodel"),
        "answered with the model 'another model', 'm' was requested",
    ),
    "no prompt": ([10, STOP_ID], lambda wire: wire.prompt(None), "does not return the prompt ids that the model got"),
    "lowest float32": ([10, STOP_ID], lambda wire: wire.first_logprob(-3.4e38), "as a log-prob"),
    "a mask": ([10, STOP_ID], lambda wire: wire.first_logprob(-1e9), "as a log-prob"),
    "vLLM's -inf": ([10, STOP_ID], lambda wire: wire.first_logprob(-9999.0), "returned -9999.0 as a log-prob"),
    "positive": ([10, STOP_ID], lambda wire: wire.first_logprob(0.5), "a positive log-prob"),
}


@of_every_dialect
@pytest.mark.parametrize("case", IMPOSSIBLE)
async def test_what_no_engine_can_have_sampled(wire: Wire, case: str) -> None:
    ids, spoil, what = IMPOSSIBLE[case]
    assert what in (await wire.refusal(ids, spoil(wire))).what


@of_every_dialect
async def test_an_unlikely_token_is_possible(wire: Wire) -> None:
    """float32 has probabilities down to e**-104; raw log-probs are lower by the temperature."""
    assert (await wire.answer([10, STOP_ID], wire.first_logprob(-999.0))).logprobs[0] == -999.0


@pytest.mark.parametrize("wire", [WIRES["vllm"], WIRES["sglang"]], ids=["vllm", "sglang"])
async def test_log_probs_of_0_are_refused_once_answers_to_one_prompt_differ(wire: Wire) -> None:
    """A model that is certain of each token has them too, and gives one answer to one prompt."""
    async with CASES[wire.case]() as case:

        async def ask(ids: list[int], value: float = 0.0, prompt: int = 7, **settings: Any) -> list[float]:
            case.server.ids, case.server.mutate = ids, wire.logprobs(ids, value)
            return (await case.engine.generate(request(prompt_ids=[5, 6, prompt], **settings))).logprobs

        for _ in range(2):
            assert await ask([10, STOP_ID]) == [0.0, 0.0]
        await ask([11, STOP_ID], prompt=8)
        await ask([11, STOP_ID], temperature=0.5)
        for prompt in (7, 7, 9):
            with pytest.raises(EngineError, match="sampled different tokens after one prompt") as caught:
                await ask([11, STOP_ID], prompt=prompt)
            assert caught.value.kind is FailureKind.ENGINE_CONTRACT
        assert await ask([12, STOP_ID], -0.5) == [-0.5, -0.5]


@of_every_dialect
@pytest.mark.parametrize(("ids", "finish"), [([10, CONTROL], "stop"), ([*range(10, 17), STOP_ID], "length")])
async def test_a_turn_may_end_with_a_control_token_or_with_the_last_that_fits(
    wire: Wire, ids: list[int], finish: str
) -> None:
    result = await wire.answer(ids, wire.finish(finish))
    assert (result.token_ids, result.finish_reason) == (ids, finish)


@pytest.mark.parametrize("name", ["vllm", "chat_prefix"])
async def test_vllms_guard_against_repetition_ends_a_turn(name: str) -> None:
    wire = WIRES[name]
    assert (await wire.answer([10, 10], wire.finish("repetition"))).finish_reason == "stop"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
async def test_a_full_context_ends_a_call_before_its_length(name: str) -> None:
    """Three ids of prompt and three sampled, as the model list says; it is asked when an answer is short."""
    wire, ids = WIRES[name], [10, 11, 12]
    full, roomy = [{"data": [{"id": "m", "max_model_len": length}]} for length in (6, 64)]
    assert (await wire.answer(ids, wire.finish("length"), full)).finish_reason == "length"
    assert "at 6 of 64 tokens of context" in (await wire.refusal(ids, wire.finish("length"), roomy)).what


async def test_a_server_may_answer_with_another_name_of_the_same_model() -> None:
    cards = [
        {"id": "first", "root": "/weights"},
        {"id": "m", "root": "/weights"},
        {"id": "adapter", "root": "/adapter", "parent": "first"},
    ]
    async with FakeVllm(models={"data": cards}) as fake:
        engine = VllmEngine("e", fake.url, VllmOptions(**BASIC))
        assert (await engine.health()).ok
        fake.mutate = lambda body: body.update(model="first")
        await engine.generate(request())
        fake.mutate = lambda body: body.update(model="adapter")
        with pytest.raises(EngineError, match="answered with the model 'adapter'"):
            await engine.generate(request())
        await engine.close()


def test_routed_experts_must_be_finite() -> None:
    """1e999 is JSON; a record would hold null in its place."""
    dialect = VllmDialect("http://h/v1", VllmOptions(**BASIC, record_routed_experts=True))
    whole = completion(
        {"model": "m", "prompt": [5, 6, 7], "max_tokens": 8, "stop_token_ids": [2], "logprobs": 0}, [2], "r"
    )
    whole["choices"][0]["routed_experts"] = ["here"]
    payload = json.dumps(whole).replace('"here"', "1e999").encode()
    with pytest.raises(EngineError, match="a number that is not finite"):
        dialect.read_sample(payload, request(), AnsweredCall("e", 0, 0.1))


@pytest.mark.parametrize("name", ["vllm-0.33", "vllm-0.32", "sglang", "chat_prefix", "openai"])
async def test_a_field_of_a_newer_release_is_counted_and_ends_no_call(name: str):
    place = ("meta_info",) if name == "sglang" else OPENAI_CHOICE
    async with CASES[name]() as case:
        case.server.ids = [5, STOP_ID]
        counted = left_out_counts()["engine"]
        await case.engine.generate(request())
        assert left_out_counts()["engine"] == counted, "each field of its own release is known"
        case.server.mutate = within(*place, "draft_of_a_field")([1])
        await case.engine.generate(request())
        assert left_out_counts()["engine"] == counted + 1
