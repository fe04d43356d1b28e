"""Agents of several kinds over real sockets: exact tokens for all of them, and an answer whatever the engines do."""

import asyncio
import json
import time
from typing import Any

import gym_needed  # noqa: F401
import pytest

pytestmark = pytest.mark.gym

import aiohttp  # noqa: E402
from fake_nemo_rl import FakeNemoRl  # noqa: E402
from fake_openai import FakeOpenAI  # noqa: E402
from model_over_http import (  # noqa: E402
    ANSWER,
    OPENING,
    TOOL,
    chat_agent,
    forgetful_agent,
    listening,
    oracles,
    simple_agent,
    trained_on,
)
from served_model import CALL, CODEC, said, without_tokens  # noqa: E402

from prorl_gym.inference.balance.engine_pool import EnginePool  # noqa: E402
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult  # noqa: E402

QUICK = {"inference": {"wait_seconds": 0.3, "connect_seconds": 2.0, "request_seconds": 10.0}}
ASK = {"input": OPENING, "temperature": 1.0, "top_p": 1.0}


async def page(base: str) -> str:
    async with aiohttp.ClientSession() as client, client.get(f"{base}/metrics") as answer:
        return await answer.text()


@pytest.mark.parametrize("agent", [simple_agent, forgetful_agent, chat_agent])
async def test_rollout_is_what_nemo_rl_accepts(agent: Any):
    async with oracles(2) as engines, listening(engines.urls) as base:
        rollout = await agent(base)
        assert rollout.text == ANSWER
        assert trained_on(rollout) > 30
        assert 'prorl_model_prompts_total{origin="extended"} 2.0' in await page(base)


async def test_engine_that_is_killed_in_the_middle_costs_nothing():
    async with oracles(2, tokens_per_second=200.0) as engines, listening(engines.urls, **QUICK) as base:
        rollouts = [asyncio.create_task(agent(base)) for agent in (simple_agent, forgetful_agent) * 8]
        await asyncio.wait(rollouts, timeout=0.1)
        await engines.kill(0)
        finished = await asyncio.gather(*rollouts)
    assert all(one.text == ANSWER and trained_on(one) for one in finished)


async def test_no_engine_left_is_a_status_in_time_not_a_hang():
    async with oracles(2) as engines, listening(engines.urls, **QUICK) as base:
        await engines.kill(0)
        await engines.kill(1)
        started = time.monotonic()
        async with aiohttp.ClientSession() as client, client.post(f"{base}/v1/responses", json=ASK) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert "Start the engines" in (await answer.json())["detail"]
    assert time.monotonic() - started < 10


async def test_engine_that_never_answers_is_a_status_when_the_call_s_time_is_up():
    async with oracles(1, tokens_per_second=0.01) as engines, listening(engines.urls, call_seconds=0.3) as base:
        async with aiohttp.ClientSession() as client, client.post(f"{base}/v1/responses", json=ASK) as answer:
            assert answer.status == 504
            assert "call_seconds" in (await answer.json())["detail"]


async def test_caller_that_goes_away_takes_its_call_with_it(monkeypatch: pytest.MonkeyPatch):
    begun, ended = asyncio.Event(), asyncio.Event()
    generate = EnginePool.generate

    async def watched(self: EnginePool, request: GenerationRequest) -> GenerationResult:
        begun.set()
        try:
            return await generate(self, request)
        finally:
            ended.set()

    monkeypatch.setattr(EnginePool, "generate", watched)
    async with oracles(1, tokens_per_second=0.01) as engines, listening(engines.urls) as base:
        async with aiohttp.ClientSession() as client, asyncio.timeout(10):
            call = asyncio.create_task(client.post(f"{base}/v1/responses", json=ASK))
            await begun.wait()
            call.cancel()
            await ended.wait()


# --- servers that take messages: NeMo-RL's own, and any that speaks OpenAI's API


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


async def test_text_of_an_openai_server_carries_no_tokens():
    function = {"name": "python", "arguments": '{"code": "2+2"}'}
    async with FakeOpenAI(ids=[], tool_calls=[{"id": "c1", "type": "function", "function": function}]) as server:
        async with listening([server.url], model="m", inference={"engine": "openai"}) as base:
            first, second = await two_turns(base, dict)
    assert (first["name"], first["call_id"]) == ("python", "c1")
    assert "generation_token_ids" not in {k for item in (first, second) for k, v in item.items() if v is not None}
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["system", "user", "assistant", "tool"]
