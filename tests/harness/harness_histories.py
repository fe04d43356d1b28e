"""What unmodified programs send: an answer as each wire writes it, and as the program sends it back."""

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

from prorl_gym.gateway.answer import AnswerFormat, CompletedTurn
from prorl_gym.gateway.model_call import ModelCall, SamplingParams
from prorl_gym.harness.body_reader import BodyReader
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.prompt_builder import BuiltPrompt, PromptBuilder
from prorl_gym.inference.tokens.segment_cache import SegmentCache
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.inference.tokens.turn import SampledTurn, parse_sampled

SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=256)
CALL = '<tool_call>\n{"name": "Edit", "arguments": {"file_path": "/a.py",   "new_string": "é"}}\n</tool_call>'
THOUGHTS = "<think>\nRead it first.\n</think>\n\n"
SCHEMA = {
    "type": "object",
    "properties": {"file_path": {"type": "string"}, "new_string": {"type": "string"}},
    "required": ["file_path", "new_string"],
}


@cache
def codec() -> ChatCodec:
    return load_codec("small")


def answer_format() -> AnswerFormat:
    return AnswerFormat("policy", codec(), with_tokens=False, with_reasoning=True)


def sampled(text: str, finish: Any = "stop") -> SampledTurn:
    ids = codec().tokenizer.encode_trusted(text)
    if finish == "stop":
        ids = [*ids, codec().terminator_id]
    return SampledTurn(ids, [-0.5] * len(ids), [3] * len(ids), finish, 2)


class Conversation:
    """Calls of one program: read by a wire, answered with a scripted text, remembered."""

    def __init__(self, wire: Any) -> None:
        self.wire = wire
        self.omitted: Counter[str] = Counter()
        self._bodies = BodyReader()
        self._builder = PromptBuilder(codec(), SegmentCache())

    def read(self, body: Mapping[str, Any], **form: Any) -> ModelCall:
        raw = json.dumps(body, **form).encode()
        return self.wire.read(self._bodies.read("/", self.wire.history_key, raw), SAMPLING, self.omitted)

    async def prompt(self, body: Mapping[str, Any]) -> BuiltPrompt:
        call = self.read(body)
        return await self._builder.build_prompt(call.entries, call.tools, "s")

    async def answer(self, body: Mapping[str, Any], text: str, finish: Any = "stop") -> dict[str, Any]:
        call, prompt, turn = self.read(body), await self.prompt(body), sampled(text, finish)
        parsed = parse_sampled(codec(), prompt.ids, turn.token_ids, call.tools)
        self._builder.remember_turn(prompt, "s", parsed.as_message(), turn.token_ids)
        return self.wire.write_answer(CompletedTurn(call, prompt, turn, parsed), {}, answer_format())
