"""What unmodified programs send: an answer as each wire writes it, and as the program sends it back."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from token_codecs import codec

from prorl_gym.gateway.answer import AnswerFormat, CompletedTurn
from prorl_gym.gateway.model_call import ModelCall, SamplingParams
from prorl_gym.harness.body_reader import BodyReader
from prorl_gym.harness.messages import MESSAGES
from prorl_gym.harness.wires import CHAT, RESPONSES
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.prompt_builder import BuiltPrompt, PromptBuilder
from prorl_gym.inference.tokens.segment_cache import SegmentCache
from prorl_gym.inference.tokens.turn import SampledTurn, parse_sampled

SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=256)
CALL = '<tool_call>\n{"name": "Edit", "arguments": {"file_path": "/a.py",   "new_string": "é"}}\n</tool_call>'
THOUGHTS = "<think>\nRead it first.\n</think>\n\n"
SCHEMA = {
    "type": "object",
    "properties": {"file_path": {"type": "string"}, "new_string": {"type": "string"}},
    "required": ["file_path", "new_string"],
}

WIRES = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
_FUNCTION = {"name": "edit", "parameters": {"type": "object", "properties": {"old": {"type": "string"}}}}
_CALL = {"name": "edit", "arguments": '{"old": "a"}'}
_USE = {"type": "tool_use", "id": "c", "name": "edit", "input": {"old": "a"}}
BODIES: dict[str, Any] = {
    "chat": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "You edit."}]},
            {"role": "user", "content": "Rename it."},
            {"role": "assistant", "content": "So.", "tool_calls": [{"id": "c", "type": "function", "function": _CALL}]},
            {"role": "tool", "tool_call_id": "c", "content": "ok"},
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": "On."},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}, {"type": "custom", "custom": {"name": "patch"}}],
    },
    "responses": {
        "instructions": "You edit.",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
            {"role": "user", "content": "Rename it."},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c", **_CALL, "namespace": "db"},
            {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
            {"type": "function_call_output", "call_id": "c", "output": "ok"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "ok"},
        ],
        "tools": [
            {"type": "namespace", "name": "db", "description": "d", "tools": [{"type": "function", **_FUNCTION}]},
            {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "g"}},
        ],
    },
    "messages": {
        "system": "You edit.",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Rename it."}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, _USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "ok"}]},
            {"role": "system", "content": "Be short."},
        ],
        "tools": [{"name": "edit", "input_schema": _FUNCTION["parameters"]}],
    },
}
"""A right body of each wire."""


def answer_format(chat: ChatCodec) -> AnswerFormat:
    return AnswerFormat("policy", chat, with_tokens=False, with_reasoning=True)


def sampled(chat: ChatCodec, text: str, finish: Any) -> SampledTurn:
    ids = chat.tokenizer.encode_trusted(text)
    if finish == "stop":
        ids = [*ids, chat.terminator_id]
    return SampledTurn(ids, [-0.5] * len(ids), [3] * len(ids), finish, 2)


class Conversation:
    """Calls of one program: read by a wire, answered with a scripted text, remembered."""

    def __init__(self, wire: Any, name: str = "small") -> None:
        self.wire = wire
        self.codec = codec(name)
        self.omitted: Counter[str] = Counter()
        self._bodies = BodyReader(10_000)
        self._builder = PromptBuilder(self.codec, SegmentCache())

    def read(self, body: Mapping[str, Any], **form: Any) -> ModelCall:
        raw = json.dumps(body, **form).encode()
        return self.wire.read(self._bodies.read("/", self.wire.history_key, raw), SAMPLING, self.omitted)

    async def prompt(self, body: Mapping[str, Any]) -> BuiltPrompt:
        call = self.read(body)
        return await self._builder.build_prompt(call.entries, call.tools, "s")

    async def answer(self, body: Mapping[str, Any], text: str, finish: Any = "stop") -> dict[str, Any]:
        call, prompt, turn = self.read(body), await self.prompt(body), sampled(self.codec, text, finish)
        parsed = parse_sampled(self.codec, prompt.ids, turn.token_ids, call.tools)
        self._builder.remember_turn(prompt, "s", parsed.as_message(), turn.token_ids)
        return self.wire.write_answer(CompletedTurn(call, prompt, turn, parsed), {}, answer_format(self.codec))
