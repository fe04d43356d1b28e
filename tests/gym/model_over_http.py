"""The model server on a real port over oracle engines on real ports, and agents that talk to it."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import quick_server
from served_model import CODEC, model_server, without_tokens

from prorl_gym.environments.protocol import ScriptedStep
from prorl_gym.oracle.oracle_policy import KnownRow, OraclePolicy, RowIndex
from prorl_gym.oracle.oracle_server import OracleOptions, OracleServer, serve_oracle

TOOL = {"type": "function", "name": "python", "description": "Run.", "parameters": {"type": "object"}, "strict": False}
QUESTION = "How many primes are there below 100?"
OPENING = [{"role": "system", "content": "Solve."}, {"role": "user", "content": QUESTION}]
ANSWER = "There are 25."
TURNS = 3


class Primes:
    """An environment as far as the oracle looks at one."""

    name = "primes"

    def gold_steps(self, row):
        steps = [ScriptedStep(text, "python", {"code": "count()"}) for text in ("I count.", "I count again.")]
        return [*steps, ScriptedStep("There are {observation}.")]

    def wrong_steps(self, row, seed):
        return [ScriptedStep(f"Surely {seed % 7}.")]


ROWS = RowIndex([KnownRow("primes-1", QUESTION, Primes(), {"question": QUESTION})])


@dataclass
class Engines:
    """Oracles that can be killed one by one."""

    urls: list[str] = field(default_factory=list)
    lives: list[AsyncExitStack] = field(default_factory=list)

    async def kill(self, index: int) -> None:
        await self.lives[index].aclose()


@asynccontextmanager
async def oracles(count: int, tokens_per_second: float = 0.0) -> AsyncGenerator[Engines]:
    engines = Engines()
    async with AsyncExitStack() as stack:
        for _ in range(count):
            life = await stack.enter_async_context(AsyncExitStack())
            server = OracleServer(CODEC, OraclePolicy(CODEC, ROWS), OracleOptions(tokens_per_second=tokens_per_second))
            engines.urls.append(await life.enter_async_context(serve_oracle(server, "127.0.0.1", 0)))
            engines.lives.append(life)
        yield engines


@asynccontextmanager
async def listening(urls: Sequence[str], **options: Any) -> AsyncGenerator[str]:
    """Serve with all that Gym puts around a server; yields its address."""
    server = model_server(base_url=list(urls), **{"model": "oracle", **options})
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    server.setup_cancellation_middleware(app)
    async with quick_server.listening(app, lifespan="on") as url:
        yield url


@dataclass
class AgentRollout:
    """What an agent was answered in one rollout."""

    items: list[dict[str, Any]] = field(default_factory=list)
    """What the model said, token fields on it."""
    text: str = ""


async def simple_agent(base: str) -> AgentRollout:
    """Keep the cookie and send items back as they came, as Gym's own simple agent does."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client:
        return await _responses_agent(client, base, keep=lambda item: item)


async def forgetful_agent(base: str) -> AgentRollout:
    """Keep neither the cookie nor the token fields."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as client:
        return await _responses_agent(client, base, keep=without_tokens)


async def chat_agent(base: str) -> AgentRollout:
    """Speak through OpenAI's client and keep only texts and calls, as mini-swe-agent does."""
    from openai import AsyncOpenAI

    rollout, messages = AgentRollout(), list(OPENING)
    function = {key: TOOL[key] for key in ("name", "description", "parameters")}
    # By default it allows five seconds to connect, which two hundred agents in one process may take.
    async with AsyncOpenAI(base_url=f"{base}/v1", api_key="unused", max_retries=0, timeout=60.0) as client:
        for _ in range(TURNS):
            completion = await client.chat.completions.create(
                model="oracle", messages=messages, tools=[{"type": "function", "function": function}], temperature=1.0
            )
            message = completion.choices[0].message
            rollout.items.append(message.model_dump())
            kept = message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
            calls = message.tool_calls or []
            messages += [kept, *({"role": "tool", "tool_call_id": call.id, "content": "25"} for call in calls)]
            rollout.text = message.content or ""
    return rollout


async def _responses_agent(client: aiohttp.ClientSession, base: str, keep: Any) -> AgentRollout:
    rollout, items = AgentRollout(), list(OPENING)
    for _ in range(TURNS):
        body = {"input": items, "tools": [TOOL], "temperature": 1.0, "top_p": 1.0}
        async with client.post(f"{base}/v1/responses", json=body) as answer:
            answer.raise_for_status()
            output = (await answer.json())["output"]
        rollout.items += output
        items += [keep(item) for item in output]
        for item in output:
            if item["type"] == "function_call":
                items.append({"type": "function_call_output", "call_id": item["call_id"], "output": "25"})
            elif item["type"] == "message":
                rollout.text = item["content"][0]["text"]
    return rollout


def trained_on(rollout: AgentRollout) -> int:
    """Assert what NeMo-RL asserts of a row; return how many tokens it would train on."""
    seen: list[int] = []
    sampled = 0
    for item in rollout.items:
        if not item.get("generation_token_ids"):
            continue
        assert seen == item["prompt_token_ids"][: len(seen)], "Non-contiguous messages found!"
        assert len(item["generation_token_ids"]) == len(item["generation_log_probs"])
        seen = item["prompt_token_ids"] + item["generation_token_ids"]
        sampled += len(item["generation_token_ids"])
    return sampled
