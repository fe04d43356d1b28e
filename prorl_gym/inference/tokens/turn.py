"""One turn of the model: sampled in as many calls as it takes, then read. Agent loop and gateway share both.

An engine that aborts a call (a pause, a weight update) has not ended the turn: it continues from the tokens that exist.
An engine whose context turns out to be smaller gets a call for fewer tokens.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal
from uuid import uuid4

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.protocol import ContextExceeded, GenerationResult, TextTurn
from prorl_gym.inference.tokens.chat_codec import ChatCodec, Tools
from prorl_gym.inference.toolcalls.turn_parsing import parse_turn
from prorl_gym.records import Message, ToolCall
from prorl_gym.routed_experts import Call
from prorl_gym.thoughts import open_thinking, split_thinking

MAX_ABORTS = 8
"""Aborts by the engines that one turn survives."""

MAX_SEGMENTS_TOKENS = 16
"""All segments of a rollout together may have so many times the tokens that one may have."""


async def sample_turn(
    call: Callable[[int], Awaitable[GenerationResult]],
    token_ids: Sequence[int],
    tokens_left: Callable[[], int],
    stop_token_ids: Collection[int],
) -> Literal["stop", "length"]:
    """Sample one turn; return why it ended.

    ``call`` makes one model call for that many tokens at most, and appends what it gives to ``token_ids``, which are
    live. ``tokens_left`` are those that the turn may still get, by its own limit and by the context as far as it is
    known. Raises ``ContextExceeded``: the engine's context has no room for another token; ``EngineError``: no engine
    could answer, or the engines aborted the turn more than ``MAX_ABORTS`` times.
    """
    aborts = 0
    while True:
        max_tokens = max(1, tokens_left())
        try:
            result = await call(max_tokens)
        except ContextExceeded:
            if not 1 <= tokens_left() < max_tokens:  # the pool has learnt no smaller context that leaves room
                raise
            continue
        if result.finish_reason != "abort":
            return result.finish_reason
        if token_ids and token_ids[-1] in stop_token_ids:  # it was complete when the abort came
            return "stop"
        if tokens_left() < 1:
            return "length"
        aborts += not result.aborted_by_pause  # a pause of ours is no fault of the engine
        if aborts > MAX_ABORTS:
            raise EngineError(
                FailureKind.ENGINE_OVERLOADED,
                f"engine {result.engine}: aborted one turn {aborts} times.",
                "Pause engines for the whole of a weight update, not call by call.",
            )


@dataclass(slots=True)
class SampledTurn:
    """The tokens of one turn, over all calls that it took."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    finish_reason: Literal["stop", "length"] = "length"
    cached_tokens: int = 0
    """Prompt tokens found in the cache, where the engine reports it."""
    expert_calls: list[Call] = field(default_factory=list[Call])
    """Experts that each call reported, with the length of the turn after it."""
    prompt_ids: Sequence[int] = ()
    text_turn: TextTurn | None = None
    """Set by an engine that answers in text: the ids are a local encoding of it."""

    def append_result(self, result: GenerationResult) -> None:
        if not self.token_ids:
            self.cached_tokens = result.cached_tokens or 0
        self.token_ids += result.token_ids
        if result.token_ids:
            self.expert_calls.append((len(self.token_ids), result.routed_experts))
        self.logprobs += result.logprobs
        self.versions += result.versions
        self.text_turn = result.text_turn


def derive_seed(seed: int | None, replica: int, turn: int, sampled: int = 0) -> int | None:
    """Return the seed of one model call, or ``None`` when the rollout has none.

    Replicas of a group share the ``seed``. A call that continues a turn must not repeat the tokens ``sampled`` so far.
    """
    if seed is None:
        return None
    text = f"{seed}/{replica}/{turn}/{sampled}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One turn in the parts that a caller is answered with."""

    thinking: str
    """Without their tags; empty where there are none."""
    text: str
    """The rest of the turn. A call that cannot be read stays visible in it."""
    calls: tuple[ToolCall, ...] = ()
    full_text: str = ""
    """Thoughts and text as they were written, with the opening tag where the prompt ended in it."""

    def with_first_call(self) -> "ParsedTurn":
        return replace(self, calls=self.calls[:1])

    def as_message(self) -> Message:
        return Message(role="assistant", content=self.full_text, tool_calls=self.calls)


def parse_sampled(codec: ChatCodec, prompt: Sequence[int], ids: Sequence[int], tools: Tools) -> ParsedTurn:
    """Read ids that were sampled after a prompt, end tokens included. Never raises, whatever the model has written."""
    text = codec.decode_turn(prompt, ids)
    parsed = parse_turn(codec.parser, text, tools)
    shown = text.strip() if parsed.parse_errors else parsed.text
    calls = tuple(ToolCall(id=_call_id(), name=call.name, arguments=call.arguments) for call in parsed.calls)
    return _split_turn(shown, calls)


def read_turn(
    codec: ChatCodec, turn: SampledTurn, tools: Tools, *, may_call_tools: bool, single_tool_call: bool
) -> ParsedTurn:
    """Read a sampled turn as its caller wants it: without calls (everything is text), or with the first one only."""
    if (said := turn.text_turn) is not None:
        calls = tuple(call if call.id else call.model_copy(update={"id": _call_id()}) for call in said.tool_calls)
        parsed = _split_turn(open_thinking(said.text), calls)
    elif may_call_tools:
        parsed = parse_sampled(codec, turn.prompt_ids, turn.token_ids, tools)
    else:
        parsed = _split_turn(codec.decode_turn(turn.prompt_ids, turn.token_ids).strip(), ())
    return parsed.with_first_call() if single_tool_call else parsed


def _split_turn(text: str, calls: tuple[ToolCall, ...]) -> ParsedTurn:
    thinking, rest = split_thinking(text)
    return ParsedTurn(thinking, rest.strip() if len(rest) < len(text) else text, calls, text)


def _call_id() -> str:
    return f"call_{uuid4().hex[:16]}"
