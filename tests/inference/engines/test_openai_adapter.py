"""Text-only servers: what was said is kept, and never mistaken for tokens."""

from contextlib import asynccontextmanager

import pytest
from closing import closing
from fake_openai import FakeOpenAI, read_numbers

from prorl_gym.errors import EngineError
from prorl_gym.inference.engines.openai import OpenAIEngine, OpenAIOptions
from prorl_gym.inference.protocol import TextTurn
from prorl_gym.records import ToolCall
from prorl_gym.testing.inference.engine_conformance import request


@asynccontextmanager
async def served(encode=read_numbers, **server):
    options = OpenAIOptions(model="m", vocab_size=100, encode=encode)
    async with FakeOpenAI(**server) as openai, closing(OpenAIEngine("e", openai.url, options)) as engine:
        yield openai, engine


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


async def test_more_calls_than_a_turn_can_have_are_refused():
    async with served(tool_calls=a_call() * 129) as (_, engine):
        with pytest.raises(EngineError, match="called 129 tools at once"):
            await engine.generate(request())


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
