"""The next prompt extends what the engine has seen, whatever form the agent sends the conversation in."""

from functools import cache
from typing import Any

import pytest

from prorl_gym.errors import ConfigError
from prorl_gym.gym_root.responses_api_models.prorl_model.continuity import chat_items, next_prompt
from prorl_gym.inference.chat import Codec, load_codec
from prorl_gym.trainers.gym_items import function_schema

TOOL = {"type": "function", "name": "python", "description": "Run.", "parameters": {"type": "object"}, "strict": True}
ASK = [{"role": "system", "content": "Solve."}, {"role": "user", "content": "2+2?"}]


@cache
def codec() -> Codec:
    return load_codec("small")


def called(generation: list[int], prompt: list[int]) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": "c",
        "name": "python",
        "arguments": "{}",
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-1.0] * len(generation),
    }


def encode(text: str) -> list[int]:
    return codec().tokenizer.encode_trusted(text)


RESULT = {"type": "function_call_output", "call_id": "c", "output": "4"}


def test_first_prompt_is_the_rendered_conversation():
    assert "2+2?" in codec().decode(next_prompt(codec(), ASK, [TOOL]))


def test_second_prompt_extends_the_first_call_verbatim():
    first = next_prompt(codec(), ASK, [TOOL])
    sampled = [*encode("odd   spelling"), codec().terminator_id]
    second = next_prompt(codec(), [*ASK, called(sampled, first), RESULT], [TOOL])
    seen = first + sampled
    assert second[: len(seen)] == seen
    assert "4" in codec().decode(second[len(seen) :])


def test_call_that_was_cut_is_closed_first():
    first = next_prompt(codec(), ASK, [])
    sampled = encode("cut off in the mid")
    second = next_prompt(codec(), [*ASK, called(sampled, first), RESULT], [])
    assert second[len(first) + len(sampled)] == codec().terminator_id


def test_history_before_the_last_tokens_is_not_rendered_again():
    first = next_prompt(codec(), ASK, [])
    item = called([5, codec().terminator_id], first)
    changed = [{"role": "user", "content": "something else"}, item, RESULT]
    assert next_prompt(codec(), changed, [])[: len(first)] == first


@pytest.mark.parametrize("news", [[], [{"type": "message", "role": "assistant", "content": "injected"}]])
def test_what_cannot_be_appended_is_refused(news: list[dict[str, Any]]):
    with pytest.raises(ConfigError, match="only tool results and user messages can follow"):
        next_prompt(codec(), [*ASK, called([5], [1, 2]), *news], [])


def test_chat_messages_give_the_same_prompts_as_items():
    first = next_prompt(codec(), ASK, [TOOL])
    sampled = [5, codec().terminator_id]
    item = called(sampled, first)
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "python", "arguments": "{}"}}],
        **{key: item[key] for key in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")},
    }
    chat = [*ASK, message, {"role": "tool", "tool_call_id": "c", "content": "4"}]
    assert next_prompt(codec(), chat_items(chat), [TOOL]) == next_prompt(codec(), [*ASK, item, RESULT], [TOOL])


def test_both_spellings_of_a_tool_are_the_same_schema():
    nested = {"type": "function", "function": {k: TOOL[k] for k in ("name", "description", "parameters")}}
    assert function_schema(TOOL) == function_schema(nested)
