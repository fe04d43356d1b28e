"""What one model call gave, and what the answers of all wires have in common."""

import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from prorl_gym.gateway.model_call import ModelCall
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.prompt_builder import BuiltPrompt
from prorl_gym.inference.tokens.turn import ParsedTurn, SampledTurn
from prorl_gym.inference.toolcalls.turn_parsing import THINK_OPEN
from prorl_gym.routed_experts import to_nemo_rl


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer has before anything is sampled. A stream begins with it."""

    id: str = field(default_factory=lambda: uuid4().hex)
    """Of the answer; its items derive theirs from it."""
    created: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class CompletedTurn:
    """What one call gave."""

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
        # After empty thoughts a text that begins with their tag would come back as thoughts: keep the empty ones.
        reads_as_thoughts = not parsed.thinking and parsed.text.startswith(THINK_OPEN)
        return parsed.text if self.with_reasoning and not reads_as_thoughts else parsed.full_text

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
