"""The next prompt extends what the engine has seen, whatever form the agent sends the conversation in."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from prorl_gym.errors import ConfigError
from prorl_gym.gateway.responses import read_items
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.prompt_builder import BuiltPrompt, PromptBuilder, PromptOrigin, function_schema
from prorl_gym.inference.tokens.segment_cache import SegmentCache
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.inference.tokens.turn import parse_sampled

TOOL = {"type": "function", "name": "python", "description": "Run.", "parameters": {"type": "object"}, "strict": True}
TOOLS = [function_schema(TOOL)]
ASK = [{"role": "system", "content": "Solve."}, {"role": "user", "content": "2+2?"}]
CALL = '<tool_call>\n{"name": "python", "arguments": {"a":   1}}\n</tool_call>'
RESULT = {"type": "function_call_output", "call_id": "c", "output": "4"}
MORE = {"role": "user", "content": "and 3+3?"}


@cache
def codec() -> ChatCodec:
    return load_codec("small")


def sampled(text: str) -> list[int]:
    return [*codec().tokenizer.encode_trusted(text), codec().terminator_id]


@dataclass
class Server:
    """What the model server does with a conversation; ``memory`` can be another server's."""

    memory: SegmentCache = field(default_factory=SegmentCache)

    async def prompt(self, items: list[dict[str, Any]], session: str = "s") -> BuiltPrompt:
        return await PromptBuilder(codec(), self.memory).build_prompt(read_items(items), TOOLS, session)

    async def turn(self, items: list[dict[str, Any]], text: str, session: str = "s") -> list[dict[str, Any]]:
        prompt, ids = await self.prompt(items, session), sampled(text)
        spoken = parse_sampled(codec(), prompt.ids, ids, TOOLS)
        PromptBuilder(codec(), self.memory).remember_turn(
            prompt, prompt.session_id or session, spoken.as_message(), ids
        )
        output = [{"type": "message", "role": "assistant", "content": spoken.full_text}] if spoken.full_text else []
        for call in spoken.calls:
            output.append({"type": "function_call", "call_id": "c", "name": call.name, "arguments": call.arguments})
        tokens = {
            "prompt_token_ids": prompt.ids,
            "generation_token_ids": ids,
            "generation_log_probs": [-1.0] * len(ids),
        }
        return [*output[:-1], output[-1] | tokens]


def bare(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items as agents keep them that know nothing of tokens."""
    return [{key: value for key, value in item.items() if "token" not in key and "log" not in key} for item in items]


def seen(items: list[dict[str, Any]]) -> list[int]:
    return items[-1]["prompt_token_ids"] + items[-1]["generation_token_ids"]


async def test_call_that_was_cut_is_closed_first():
    prompt = await Server().prompt(ASK)
    ids = sampled("cut off in the mid")[:-1]
    tokens = {"prompt_token_ids": prompt.ids, "generation_token_ids": ids}
    cut = {"role": "assistant", "content": "cut off in the mid", **tokens}
    again = await Server().prompt([*ASK, cut, MORE])
    assert again.origin is PromptOrigin.EXTENDED
    assert again.ids[len(prompt.ids) + len(ids)] == codec().terminator_id


async def test_segment_that_was_begun_anew_goes_on_exactly():
    server = Server()
    first = await server.turn(ASK, CALL)
    changed = [{"role": "user", "content": "a summary"}, *first, RESULT]
    second = await server.turn(changed, CALL)
    for other in (server, Server()):
        prompt = await other.prompt([*changed, *second, RESULT])
        assert prompt.origin is PromptOrigin.EXTENDED
        assert prompt.ids[: len(seen(second))] == seen(second)


async def test_conversation_without_a_session_finds_its_own():
    server = Server()
    turn = await server.turn(ASK, CALL, session="first call")
    assert (await server.prompt([*ASK, *bare(turn), RESULT], session="second call")).session_id == "first call"


async def test_same_words_of_other_ids_are_distinguished_by_session():
    server = Server()
    await server.turn(ASK, CALL, session="a")
    odd = await server.turn(ASK, CALL.replace("   ", "  "), session="b")
    prompt = await server.prompt([*ASK, *bare(odd), RESULT], session="b")
    assert prompt.ids[: len(seen(odd))] == seen(odd)
    assert (await server.prompt([*ASK, *bare(odd), RESULT], session="c")).origin is PromptOrigin.AMBIGUOUS


async def test_same_words_of_the_same_ids_are_no_question():
    server = Server()
    for session in ("a", "b"):
        turn = await server.turn(ASK, CALL, session=session)
    assert (await server.prompt([*ASK, *bare(turn), RESULT], session="c")).origin is PromptOrigin.EXTENDED


async def test_text_turn_of_another_server_is_unknown():
    turn = await Server().turn(ASK, CALL)
    assert (await Server().prompt([*ASK, *bare(turn), RESULT])).origin is PromptOrigin.UNKNOWN


async def test_assistant_that_is_to_speak_again_is_rendered_anew():
    turn = await Server().turn(ASK, "Four.")
    assert (await Server().prompt([*ASK, *turn])).origin is PromptOrigin.REOPENED


async def test_ids_beyond_the_vocabulary_do_no_harm():
    turn = await Server().turn(ASK, CALL)
    turn[-1]["generation_token_ids"] = [10**12]
    assert (await Server().prompt([*ASK, *turn, RESULT])).origin is PromptOrigin.CHANGED


async def test_template_may_drop_old_thoughts_at_a_user_turn_in_a_new_segment():
    strips = ChatCodec(codec().tokenizer)
    strips.encode_prompt = lambda messages, tools: codec().encode_prompt(messages[-1:], tools)  # type: ignore[method-assign]
    server = Server()
    turn = await server.turn(ASK, CALL)
    continuity = PromptBuilder(strips, server.memory, "template")
    user = await continuity.build_prompt(read_items([*ASK, *turn, RESULT, MORE]), TOOLS, "s")
    tool = await continuity.build_prompt(read_items([*ASK, *turn, RESULT]), TOOLS, "s")
    assert (user.origin, tool.origin) == (PromptOrigin.TEMPLATE, PromptOrigin.EXTENDED)


async def test_template_that_drops_nothing_extends():
    server = Server()
    turn = await server.turn(ASK, CALL.replace("   ", " "))
    continuity = PromptBuilder(codec(), server.memory, "template")
    prompt = await continuity.build_prompt(read_items([*ASK, *turn, MORE]), TOOLS, "s")
    assert prompt.origin is PromptOrigin.EXTENDED


async def test_span_of_the_last_generation_is_returned():
    turn = await Server().turn(ASK, CALL)
    prompt = await Server().prompt([*ASK, *turn, RESULT])
    start, end = prompt.conversation.last_turn_span or (0, 0)
    assert prompt.ids[start:end] == turn[-1]["generation_token_ids"]


async def test_conversations_that_begin_alike_are_a_group():
    server = Server()
    turn = await server.turn(ASK, CALL)
    first, later, other = [await server.prompt(items) for items in (ASK, [*ASK, *turn, RESULT], [*ASK, MORE])]
    assert first.group_id == later.group_id != other.group_id


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "w"},
        {"role": "wizard", "content": "x"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
        {"type": "function_call", "call_id": "c", "arguments": "{}"},
        {"role": "assistant", "content": "x", "prompt_token_ids": [1], "generation_token_ids": [-1]},
        {"role": "assistant", "content": "x", "prompt_token_ids": [], "generation_token_ids": [1]},
    ],
    ids=["kind", "role", "image", "no name", "negative id", "no prompt"],
)
def test_item_that_is_not_understood_is_named(item: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"input\[2\]"):
        read_items([*ASK, item])


def test_both_spellings_of_a_tool_are_the_same_schema():
    nested = {"type": "function", "function": {k: TOOL[k] for k in ("name", "description", "parameters")}}
    assert function_schema(TOOL) == function_schema(nested)
