"""Random histories for ``bench gateway``: played by appending, as programs rewrite them, and then edited once.

Each is sent as the bodies of a program and read as the gateway reads them. What a program may do to a history without
making it another one (``inference.tokens.rewrites``) is done at random in every turn; an edit is any other change.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from prorl_gym.gateway import chat_completions
from prorl_gym.gateway.body_reader import BodyReader
from prorl_gym.gateway.model_call import SamplingParams
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.protocol import GenerationRequest
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.harness_call import HarnessCall, HarnessTurn
from prorl_gym.inference.tokens.harness_session import HarnessSession
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply

_SETTINGS = resolve_settings(RolloutSettings(max_turns=100, max_tokens=60_000))
_SAMPLING = SamplingParams(1.0, 1.0, 4096)
_TOOL = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "all": {"default": False}}},
    },
}


@dataclass(frozen=True, slots=True)
class EditCounts:
    """What came of random histories."""

    most_segments: int
    """Of one that was only appended to."""
    edits: int
    found: int
    """Edits that began a segment, on the ids of the longest history that was left as it was."""


async def play_histories(codec: ChatCodec, count: int) -> EditCounts:
    """Play so many random histories."""
    segments, found = 1, 0
    for seed in range(count):
        history = _RandomHistory(codec, random.Random(seed))
        for _ in range(history.random.randint(2, 5)):
            await history.append_turn()
        segments = max(segments, len(history.session.segments()))
        found += await history.edit()
        if seed % 100 == 0:
            await asyncio.sleep(0)  # nothing in it waits, and a bench can be stopped
    return EditCounts(segments, count, found)


class _RandomHistory:
    def __init__(self, codec: ChatCodec, chosen: random.Random) -> None:
        self.random = chosen
        self._codec = codec
        pool = EnginePool("policy")
        pool.add_engine(FakeEngine("e", self._sample))
        self.session = HarnessSession(pool, codec, _SETTINGS, rollout_id="r")
        self._bodies = BodyReader()
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": "You edit."}, self._say("Do it")]
        self._ends: list[tuple[int, list[int]]] = []
        """Of each turn: the messages up to it, and all their ids."""

    async def append_turn(self) -> None:
        """Make a call; append its turn as a program may show it, and what follows it."""
        turn = await self._ask()
        self._messages.append(self._show(turn))
        self._ends.append((len(self._messages), [*turn.prompt.ids, *turn.sampled.token_ids]))
        self._messages += self._news()

    async def edit(self) -> bool:
        """Make a call with a history that was edited; return whether the edit was found."""
        end = self._ends[-1][0]  # what follows the last turn is new: it cannot be edited
        place = self.random.randrange(1, end)
        kept = [ids for length, ids in self._ends if length <= place]
        match self.random.choice(["text", "argument", "delete", "insert", "cut"]):
            case "argument" if self._messages[place].get("tool_calls"):
                function = self._messages[place]["tool_calls"][0]["function"]
                function["arguments"] = json.dumps(json.loads(function["arguments"]) | {"all": 0})
            case "delete":
                del self._messages[place]
            case "insert":
                self._messages.insert(place, self._say("inserted"))
            case "cut":
                self._messages = [*self._messages[:place], self._say("again")]
            case _:
                self._messages[place] = self._messages[place] | {"content": self._word("other")}
        turn = await self._ask()
        known = kept[-1] if kept else []
        return turn.placement.cause is not None and turn.prompt.ids[: len(known)] == known

    async def _ask(self) -> HarnessTurn:
        raw = json.dumps({"messages": self._messages, "tools": [_TOOL], "stream": True}).encode()
        call = chat_completions.read_lenient(self._bodies.read("/", "messages", raw), _SAMPLING, Counter())
        return await self.session.answer(HarnessCall(call.entries, call.tools))

    def _sample(self, request: GenerationRequest) -> Reply:
        text = self._word("I look at it.")
        if self.random.random() < 0.3:
            text = f"<think>\n{self._word('Hm')}\n</think>\n\n{text}"
        if self.random.random() < 0.6:
            call = {"name": "edit", "arguments": {"text": self._word("a/\u00e9"), "all": self.random.random() < 0.5}}
            text += f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return Reply((*self._codec.tokenizer.encode_trusted(text), self._codec.terminator_id))

    def _show(self, turn: HarnessTurn) -> dict[str, Any]:
        """Return a turn as a message, rewritten as programs do."""
        message: dict[str, Any] = {"role": "assistant", "content": turn.parsed.text}
        if turn.parsed.thinking and self.random.random() < 0.5:
            message["reasoning_content"] = turn.parsed.thinking
        calls: list[dict[str, Any]] = []
        for call in turn.parsed.calls:
            arguments = json.loads(call.arguments)
            if not arguments["all"] and self.random.random() < 0.5:
                del arguments["all"]
            shown = dict(reversed(arguments.items())) if self.random.random() < 0.5 else arguments
            written = json.dumps(shown, ensure_ascii=self.random.random() < 0.5)
            calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": written}})
        return message | ({"tool_calls": calls} if calls else {})

    def _news(self) -> list[dict[str, Any]]:
        calls = self._messages[-1].get("tool_calls", ())
        results = [{"role": "tool", "tool_call_id": call["id"], "content": self._word("done")} for call in calls]
        return results if results and self.random.random() < 0.8 else [*results, self._say("Go on")]

    def _say(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": self._word(text)}

    def _word(self, text: str) -> str:
        return f"{text} {self.random.getrandbits(40):x}"
