"""Agents of several kinds over real sockets: exact tokens for all of them, and an answer whatever the engines do."""

import asyncio
import time
from typing import Any

import gym_needed  # noqa: F401
import pytest

pytestmark = pytest.mark.gym

import aiohttp  # noqa: E402
from model_over_http import (  # noqa: E402
    ANSWER,
    OPENING,
    chat_agent,
    forgetful_agent,
    listening,
    oracles,
    simple_agent,
    trained_on,
)

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


@pytest.mark.slow
async def test_two_hundred_agents_at_once():
    agents = [simple_agent, forgetful_agent, chat_agent, simple_agent] * 50
    async with oracles(2) as engines, listening(engines.urls) as base:
        rollouts = await asyncio.gather(*(agent(base) for agent in agents))
        shown = await page(base)
    assert all(rollout.text == ANSWER and trained_on(rollout) for rollout in rollouts)
    assert 'prorl_model_prompts_total{origin="extended"} 400.0' in shown
    assert 'prorl_model_calls_total{route="responses",status="200"} 450.0' in shown


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
