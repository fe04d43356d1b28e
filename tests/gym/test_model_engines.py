"""The model server over servers that take messages: NeMo-RL's own, and any that speaks OpenAI's API."""

import json
from typing import Any

import aiohttp
import gym_needed  # noqa: F401
import pytest
from fake_nemo_rl import FakeNemoRl
from fake_openai import FakeOpenAI
from fake_sglang import FakeSglang
from fake_vllm import FakeVllm
from model_over_http import OPENING, TOOL, listening, without_tokens
from served_model import CALL, CODEC, said

pytestmark = pytest.mark.gym


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
    """Render as NeMo-RL's server does, arguments of calls as JSON objects."""
    shown = []
    for message in messages:
        kept = {key: value for key, value in message.items() if key in ("role", "content")}
        if calls := [call["function"] for call in message.get("tool_calls", ())]:
            read = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls]
            kept["tool_calls"] = [{"type": "function", "function": call} for call in read]
        shown.append(kept)
    text = CODEC.tokenizer.render(shown, tools, {}, add_generation_prompt=add_generation_prompt)
    return CODEC.tokenizer.encode_trusted(text)


async def two_turns(base: str, keep: Any) -> list[dict[str, Any]]:
    """Make two calls; return what each said."""
    turns: list[dict[str, Any]] = []
    items = list(OPENING)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
        for _ in range(2):
            body = {"input": items, "tools": [TOOL], "temperature": 1.0, "top_p": 1.0}
            async with client.post(f"{base}/v1/responses", json=body) as answer:
                assert answer.status == 200, await answer.text()
                (item,) = (await answer.json())["output"]
            turns.append(item)
            items += [keep(item), {"type": "function_call_output", "call_id": item["call_id"], "output": "25"}]
        async with client.get(f"{base}/metrics") as answer:
            assert 'prorl_model_prompts_total{origin="extended"} 1.0' in await answer.text()
    return turns


@pytest.mark.parametrize("keep", [dict, without_tokens], ids=["as they came", "as text"])
async def test_nemo_rl_s_server_is_sent_the_exact_ids_of_the_last_turn(keep: Any):
    async with FakeNemoRl(render=render, eos=CODEC.terminator_id, ids=list(said(CALL).token_ids)) as nemo:
        async with listening([nemo.url], model="m", inference={"engine": "chat_prefix"}) as base:
            first, second = await two_turns(base, keep)
    seen = first["prompt_token_ids"] + first["generation_token_ids"]
    assert seen == second["prompt_token_ids"][: len(seen)]
    message = next(message for message in nemo.bodies[1]["messages"] if message["role"] == "assistant")
    assert message["prompt_token_ids"] + message["generation_token_ids"] == seen


@pytest.mark.parametrize(("kind", "fake"), [("vllm", FakeVllm), ("sglang", FakeSglang)])
async def test_servers_that_take_ids_get_one_growing_prompt(kind: str, fake: Any):
    async with fake(ids=list(said(CALL).token_ids)) as server:
        async with listening([server.url], model="m", inference={"engine": kind}) as base:
            first, second = await two_turns(base, dict)
    seen = first["prompt_token_ids"] + first["generation_token_ids"]
    assert seen == second["prompt_token_ids"][: len(seen)]


async def test_text_of_an_openai_server_carries_no_tokens():
    function = {"name": "python", "arguments": '{"code": "2+2"}'}
    async with FakeOpenAI(ids=[], tool_calls=[{"id": "c1", "type": "function", "function": function}]) as server:
        async with listening([server.url], model="m", inference={"engine": "openai"}) as base:
            first, second = await two_turns(base, dict)
    assert (first["name"], first["call_id"]) == ("python", "c1")
    assert "generation_token_ids" not in {k for item in (first, second) for k, v in item.items() if v is not None}
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["system", "user", "assistant", "tool"]
