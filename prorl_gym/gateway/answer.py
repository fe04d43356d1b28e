"""The result of one model call, and what the answers and the event streams of all wires have in common."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from prorl_gym.gateway.model_call import ModelCall
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.prompt_builder import BuiltPrompt
from prorl_gym.inference.tokens.turn import ParsedTurn, SampledTurn
from prorl_gym.routed_experts import to_nemo_rl


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The part of an answer that is known before it is sampled. Its events begin with it."""

    id: str = field(default_factory=lambda: uuid4().hex)
    """Id of the answer; its items derive theirs from it."""
    created: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class CompletedTurn:
    call: ModelCall
    prompt: BuiltPrompt
    sampled: SampledTurn
    parsed: ParsedTurn
    head: AnswerHead = field(default_factory=AnswerHead)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How this server answers every call."""

    model: str
    codec: ChatCodec
    with_tokens: bool
    """Put token fields on answers."""
    with_reasoning: bool
    """Thoughts are an item of their own."""

    def text_of(self, parsed: ParsedTurn) -> str:
        """Return the text of an answer, with the thoughts where they are no item of their own."""
        return parsed.text if self.with_reasoning else parsed.full_text

    def usage(self, turn: CompletedTurn, prompt_name: str, answer_name: str) -> dict[str, Any]:
        """Return the token counts under the names that a wire has for them."""
        prompt, answer = len(turn.prompt.ids), len(turn.sampled.token_ids)
        thinking = turn.parsed.thinking
        reasoning = len(self.codec.tokenizer.encode_untrusted(thinking)) if thinking else 0
        return {
            f"{prompt_name}_tokens": prompt,
            f"{answer_name}_tokens": answer,
            "total_tokens": prompt + answer,
            f"{prompt_name}_tokens_details": {"cached_tokens": min(turn.sampled.cached_tokens, prompt)},
            f"{answer_name}_tokens_details": {"reasoning_tokens": reasoning},
        }


def token_fields(turn: CompletedTurn) -> dict[str, Any]:
    """Return the token fields; empty where nothing was sampled (trainers refuse empty ones) or only text was."""
    sampled = turn.sampled
    if not sampled.token_ids or sampled.text_turn is not None:
        return {}
    fields = {
        "prompt_token_ids": turn.prompt.ids,
        "generation_token_ids": sampled.token_ids,
        "generation_log_probs": sampled.logprobs,
    }
    prompt = len(turn.prompt.ids)
    calls = [(prompt + length, experts) for length, experts in sampled.expert_calls]
    experts = to_nemo_rl(calls, prompt + len(sampled.token_ids))
    return fields if experts is None else fields | {"routed_experts": experts}


class EventWriter(Protocol):
    """Writes one answer as events. Joined by the rules of its wire, they are the answer that is not streamed."""

    def begin(self) -> bytes:
        """Return the events before the answer is there."""
        ...

    def keep_alive(self) -> bytes:
        """Return an event that changes nothing: some programs take a stream without events for a broken one."""
        ...

    def end(self, answer: Mapping[str, Any]) -> bytes:
        """Return the events of the answer; ``answer``: as the wire's ``write_answer`` gives it."""
        ...

    def fail(self, message: str) -> bytes:
        """Return the events that end a stream whose answer will not come."""
        ...


def encode_event(data: Mapping[str, Any], name: str = "") -> bytes:
    """Return one event; ``name``: its type, where a wire names it."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def error_body(message: str) -> dict[str, Any]:
    """Return an error as the clients of all wires read it, in an event or as an answer."""
    return {"type": "error", "error": {"type": "api_error", "code": "server_error", "message": message}}
