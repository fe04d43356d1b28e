"""Whatever a model samples and an agent keeps: unchanged histories go on exactly, changed ones never break anything."""

import json
from typing import Any

import gym_needed  # noqa: F401
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from nemo_gym.openai_utils import NeMoGymResponse
from token_codecs import ALL, BOUNDED, TOOLS, codec

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.gateway.answer import AnswerFormat, CompletedTurn
from prorl_gym.gateway.model_call import ModelCall, SamplingParams
from prorl_gym.gateway.responses import read_items, write_answer
from prorl_gym.inference.tokens.prompt_builder import PromptBuilder, PromptOrigin
from prorl_gym.inference.tokens.segment_cache import SegmentCache
from prorl_gym.inference.tokens.turn import SampledTurn, parse_sampled

pytestmark = pytest.mark.gym

FEW = settings(BOUNDED, max_examples=15, suppress_health_check=[HealthCheck.too_slow])

OPENING = [{"role": "system", "content": "Solve."}, {"role": "user", "content": "2+2?"}]
NASTY = st.sampled_from(
    ["4", "", " x ", "<|im_end|>", "<tool_call>", "</think>", "<think>", "a\n\n", "é\u200b", "\ufffd"]
)
SPOKEN = st.sampled_from(
    [
        '<tool_call>\n{"name": "calc", "arguments": {"term":   "1"}}\n</tool_call>',
        "<tool_call>\n<function=calc>\n<parameter=term>\n1\n</parameter>\n</function>\n</tool_call>",
        '{"name": "calc", "parameters": {"term": "1"}}',
        '<tool_call>{"name": "calc", oops}</tool_call>',
        "<think>\nHm.\n</think>\n\nFour.",
        "Hm.\n</think>\n\nFour.",
        "<think>\nand on and on",
    ]
)
WORDS = st.lists(st.one_of(SPOKEN, NASTY), max_size=3).map("\n".join)
IDS = st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=8)
TURNS = st.lists(st.tuples(st.one_of(WORDS, IDS), st.booleans(), st.booleans(), NASTY), min_size=1, max_size=4)
TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs", "routed_experts")


def sampled_by(chat: Any, drawn: str | list[float], closed: bool) -> list[int]:
    """Turn what was drawn into ids: of a text, or any of the vocabulary."""
    if isinstance(drawn, str):
        ids = chat.tokenizer.encode_untrusted(drawn)
    else:
        ids = [int(share * chat.vocab_size) for share in drawn]
        ids = [token for token in ids if token not in chat.end_ids]
    return [*ids, chat.terminator_id] if closed or not ids else ids


def news(output: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    if not calls:
        return [{"role": "user", "content": text}]
    return [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id in calls]


async def answered(chat: Any, memory: SegmentCache, shape: AnswerFormat, items: list[Any], ids: list[int]) -> Any:
    """Make a call as the server does; return the prompt, and the items as Gym's own models pass them on."""
    entries = read_items(items)
    continuity = PromptBuilder(chat, memory)
    prompt = await continuity.build_prompt(entries, TOOLS, "s")
    spoken = parse_sampled(chat, ids, TOOLS)
    continuity.remember_turn(prompt, "s", spoken.as_message(), ids)
    turn = CompletedTurn(
        ModelCall(entries, TOOLS, SamplingParams(1.0, 1.0, 9)), prompt, SampledTurn(ids, [-1.0] * len(ids)), spoken
    )
    response = NeMoGymResponse.model_validate(write_answer(turn, {}, shape))
    return prompt, json.loads(response.model_dump_json())["output"]


@pytest.mark.parametrize("name", ALL)
@FEW
@example(turns=[("</think>\n<think>\nHm.\n</think>\n\nFour.", False, False, "4")] * 2, with_thoughts=True)
@given(turns=TURNS, with_thoughts=st.booleans())
async def test_history_that_comes_back_unchanged_goes_on_exactly(name: str, turns: Any, with_thoughts: bool):
    chat = codec(name)
    shape, memory, items, seen = AnswerFormat("m", chat, True, with_thoughts), SegmentCache(), list(OPENING), []
    for drawn, closed, as_text, text in turns:
        prompt, output = await answered(chat, memory, shape, items, sampled_by(chat, drawn, closed))
        assert prompt.origin is (PromptOrigin.EXTENDED if seen else PromptOrigin.FIRST)
        assert prompt.ids[: len(seen)] == seen
        seen = output[-1]["prompt_token_ids"] + output[-1]["generation_token_ids"]
        if as_text:
            output = [{key: value for key, value in item.items() if key not in TOKENS} for item in output]
        items += [*output, *news(output, text)]


@pytest.mark.parametrize("name", ALL)
@FEW
@given(turns=TURNS, with_thoughts=st.booleans())
async def test_another_server_finds_the_same_prompt_in_the_token_fields(name: str, turns: Any, with_thoughts: bool):
    chat = codec(name)
    shape, memory, items = AnswerFormat("m", chat, True, with_thoughts), SegmentCache(), list(OPENING)
    for drawn, closed, _, text in turns:
        _, output = await answered(chat, memory, shape, items, sampled_by(chat, drawn, closed))
        items += [*output, *news(output, text)]
        here = await PromptBuilder(chat, memory).build_prompt(read_items(items), TOOLS, "s")
        elsewhere = await PromptBuilder(chat, SegmentCache()).build_prompt(read_items(items), TOOLS, "t")
        assert (elsewhere.origin, elsewhere.ids) == (PromptOrigin.EXTENDED, here.ids)


@pytest.mark.parametrize("name", ALL)
@FEW
@given(turns=TURNS, data=st.data())
async def test_history_that_was_changed_is_a_prompt_all_the_same(name: str, turns: Any, data: Any):
    chat = codec(name)
    shape, memory, items = AnswerFormat("m", chat, True, False), SegmentCache(), list(OPENING)
    for drawn, closed, _, text in turns:
        try:
            prompt, output = await answered(chat, memory, shape, items, sampled_by(chat, drawn, closed))
        except EngineError as error:  # some templates want a question of the user's, and say so
            assert error.kind is FailureKind.TEMPLATE_UNSAFE
            return
        assert prompt.ids
        items += [*output, *news(output, text)]
        dropped = data.draw(st.integers(1, len(items)))
        items = items[:dropped] + items[dropped + 1 :]
