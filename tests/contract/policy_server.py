"""NeMo-RL's vLLM server with a scripted policy behind it: it renders, splices and asserts as the real one does.

What a rollout's policy says, and how the server fails it, is the script of its row; the server finds the row by the
rollout's id, which begins with the row's digest. Each answer begins with thoughts, and its text is sampled one
character at a time: tokens that no tokenizer would choose, so that encoding it again shows.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aiohttp import web
from fake_nemo_rl import FakeNemoRl, chat_completion

from prorl_gym.environments.playback import fill_step
from prorl_gym.environments.protocol import ScriptedStep
from prorl_gym.inference.tokens.chat_codec import ChatCodec

THOUGHTS = "<think>\nI look at it.\n</think>\n\n"
VALIDATION = (0.6, 0.95)
"""Temperature and top_p of a recipe's validation; those of its training are 1."""


class Fault(StrEnum):
    """How the server fails a rollout."""

    NONE = "none"
    CONTEXT_FULL = "context full"
    OUTAGE = "outage"
    """Each call fails, on every server."""
    ONE_SERVER = "one server"
    """One call fails, once."""


@dataclass(frozen=True)
class Script:
    """What the policy says in one rollout."""

    steps: Sequence[ScriptedStep]
    fault: Fault = Fault.NONE
    at: int = 1
    """Turn, from 0, from which on the fault or the gate is met."""
    gate: asyncio.Event | None = None
    """What the server waits for before it answers."""


@dataclass(frozen=True)
class PolicyCall:
    """A call that was answered with tokens."""

    server: str
    headers: dict[str, str]
    body: dict[str, Any]
    rendered: list[int]
    """The messages as the template renders them anew."""
    prompt: list[int]
    """What the model saw."""
    ids: list[int]


@dataclass
class ScriptedPolicy:
    """The policy of all servers: scripts by the digest of a row, or else by the question in the prompt."""

    codec: ChatCodec
    scripts: dict[str, Script] = field(default_factory=dict[str, Script])
    by_question: dict[str, Script] = field(default_factory=dict[str, Script])
    calls: defaultdict[str, list[PolicyCall]] = field(default_factory=lambda: defaultdict(list))
    """By rollout."""
    waiting: set[str] = field(default_factory=set[str])
    """Rollouts whose call waits for its gate."""
    failed_once: set[str] = field(default_factory=set[str])
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def script(self, rollout_id: str, messages: Sequence[dict[str, Any]]) -> Script:
        """Return the script of a rollout; that of an unknown one (a trial of the server) says a word."""
        found = self.scripts.get(rollout_id.partition("-")[0])
        if found is None:
            prompt = messages[-1]["content"] if len(messages) < 2 else messages[1]["content"]
            found = next((script for text, script in self.by_question.items() if text in prompt), None)
        return found or Script([ScriptedStep("A word.")])

    def sample(self, step: ScriptedStep, observation: str) -> list[int]:
        """Return the ids of a turn, the end of the turn included."""
        tokenizer, said = self.codec.tokenizer, fill_step(step, observation)
        ids = [token for character in THOUGHTS + said.text for token in tokenizer.encode_untrusted(character)]
        if said.tool is not None:
            call = json.dumps({"name": said.tool, "arguments": said.arguments or {}}, ensure_ascii=False)
            ids += tokenizer.encode_trusted(f"\n<tool_call>\n{call}\n</tool_call>")
        return [*ids, self.codec.terminator_id]

    async def hold(self, rollout_id: str, gate: asyncio.Event) -> None:
        """Wait for a gate; a closed connection ends the wait."""
        async with self._changed:
            self.waiting.add(rollout_id)
            self._changed.notify_all()
        try:
            await gate.wait()
        finally:
            self.waiting.discard(rollout_id)

    async def waiting_of(self, digests: set[str], count: int = 0) -> list[str]:
        """Wait until calls of so many of these rows wait, of all by default; return the ids of their rollouts."""

        def found() -> list[str]:
            return [rollout_id for rollout_id in self.waiting if rollout_id.partition("-")[0] in digests]

        async with asyncio.timeout(120), self._changed:
            await self._changed.wait_for(lambda: len(found()) == (count or len(digests)))
        return found()


@dataclass
class PolicyServer(FakeNemoRl):
    """One of NeMo-RL's servers, over a policy that it shares with the others."""

    policy: ScriptedPolicy = field(kw_only=True)

    async def complete(self, request: web.Request, body: dict[str, Any], prompt: list[int]) -> web.StreamResponse:
        messages, rollout_id = body["messages"], request.headers["X-Session-ID"]
        script = self.policy.script(rollout_id, messages)
        turn = sum(message["role"] == "assistant" for message in messages)
        if turn >= script.at:
            if script.gate is not None:
                await self.policy.hold(rollout_id, script.gate)
            if (refusal := self._refuse(script.fault, rollout_id, len(prompt))) is not None:
                return refusal
        observation = messages[-1]["content"] if messages[-1]["role"] == "tool" else ""
        ids = self.policy.sample(script.steps[min(turn, len(script.steps) - 1)], observation)
        answer = chat_completion(body, prompt, ids)
        sampled = answer["choices"][0]["message"]["generation_token_ids"]
        rendered = self.render(messages, body.get("tools", []), True)
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.policy.calls[rollout_id].append(PolicyCall(self.url, headers, body, rendered, prompt, sampled))
        return web.json_response(answer)

    def _refuse(self, fault: Fault, rollout_id: str, length: int) -> web.StreamResponse | None:
        if fault is Fault.CONTEXT_FULL:
            self.error = f"This model's maximum context length is {length} tokens."
            return self.refuse(400)
        if fault is Fault.OUTAGE or (fault is Fault.ONE_SERVER and rollout_id not in self.policy.failed_once):
            self.policy.failed_once.add(rollout_id)
            self.error = "EngineDeadError"
            return self.refuse(500)
        return None
