"""Text-only servers: what was said is kept, and never mistaken for tokens."""

from contextlib import asynccontextmanager

import pytest
from closing import closing
from fake_openai import FakeOpenAI, read_numbers

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engines.openai import OpenAIEngine, OpenAIOptions
from prorl_gym.inference.protocol import Conversation, TextTurn
from prorl_gym.records import Message, ToolCall
from prorl_gym.testing.inference.engine_conformance import request

TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}


@asynccontextmanager
async def served(encode=read_numbers, **server):
    options = OpenAIOptions(model="m", vocab_size=100, encode=encode)
    async with FakeOpenAI(**server) as openai, closing(OpenAIEngine("e", openai.url, options)) as engine:
        yield openai, engine


async def test_the_request_has_only_fields_of_openai():
    messages = (
        Message(role="user", content="q"),
        Message(role="assistant", content="", tool_calls=(ToolCall(id="c", name="calc", arguments="{}"),)),
        Message(role="tool", content="4", tool_call_id="c", name="calc"),
    )
    async with served() as (server, engine):
        await engine.generate(
            request(conversation=Conversation(messages, [TOOL]), top_k=20, seed=3, cache_salt="v", temperature=0.0)
        )
    call = {"id": "c", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
    assert server.bodies == [
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "4", "tool_call_id": "c", "name": "calc"},
            ],
            "max_tokens": 8,
            "temperature": 0.0,
            "top_p": 1.0,
            "seed": 3,
            "tools": [TOOL],
        }
    ]


async def test_what_was_said_is_kept_and_nothing_has_a_probability():
    async with served() as (_, engine):
        engine.version = 4
        result = await engine.generate(request())
    assert result.text_turn == TextTurn("10 11 2")
    assert (result.token_ids, result.logprobs, result.versions) == ([10, 11, 2], [0.0] * 3, [4] * 3)


def a_call(**function):
    return [{"id": "c1", "type": "function", "function": {"name": "calc", "arguments": "{}", **function}}]


@pytest.mark.parametrize(
    ("calls", "read"),
    [
        (a_call(arguments='{"term": "2"}'), ToolCall(id="c1", name="calc", arguments='{"term": "2"}')),
        (a_call(arguments={"term": "2"}), ToolCall(id="c1", name="calc", arguments='{"term": "2"}')),
        (a_call(arguments="no JSON {"), ToolCall(id="c1", name="calc", arguments="no JSON {")),
        ([{"function": {"name": "f", "arguments": ""}}], ToolCall(id="call_0", name="f", arguments="")),
    ],
    ids=["text", "object", "malformed", "no id"],
)
async def test_tool_calls_are_read(calls, read):
    async with served(tool_calls=calls) as (_, engine):
        result = await engine.generate(request())
    assert result.text_turn == TextTurn("10 11 2", (read,))
    assert result.finish_reason == "stop"


BROKEN = {
    "name": a_call(name=7),
    "empty name": a_call(name=""),
    "long name": a_call(name="x" * 300),
    "arguments": a_call(arguments=[1]),
    "no function": [{"id": "c"}],
    "no object": [7],
    "too many": a_call() * 129,
    "no list": {"a": 1},
}


@pytest.mark.parametrize("case", BROKEN)
async def test_calls_of_no_known_shape_are_refused(case):
    async with served(tool_calls=BROKEN[case]) as (_, engine):
        with pytest.raises(EngineError) as caught:
            await engine.generate(request())
    assert caught.value.kind is FailureKind.ENGINE_CONTRACT


async def test_halves_of_characters_do_not_get_in():
    def half(answer):
        answer["choices"][0]["message"]["content"] = "a\ud800b"

    seen = []
    async with served(mutate=half, encode=lambda text: seen.append(text) or [1]) as (_, engine):
        result = await engine.generate(request())
    assert result.text_turn == TextTurn("a?b")
    assert seen == ["a?b"]


async def test_a_longer_encoding_of_ours_does_not_break_the_promise_of_max_tokens():
    async with served(encode=lambda text: list(range(50))) as (_, engine):
        result = await engine.generate(request(max_tokens=8))
    assert len(result.token_ids) == 8
    assert result.text_turn == TextTurn("10 11 2")


async def test_an_empty_turn_is_a_turn():
    async with served(ids=[]) as (_, engine):
        result = await engine.generate(request())
    assert (result.token_ids, result.text_turn) == ([], TextTurn(""))
