"""The model, for one rollout whose agent is a harness: whole histories in, parsed turns out, every token recorded."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

from prorl_gym.concurrency import Slot
from prorl_gym.errors import Limit, LimitReached
from prorl_gym.inference.protocol import ContextExceeded, Conversation, GenerationResult
from prorl_gym.inference.tokens.chat_codec import ChatCodec, Tools, encode_off_loop
from prorl_gym.inference.tokens.harness_call import HarnessCall, HarnessTurn
from prorl_gym.inference.tokens.prompt_builder import BuiltPrompt, HistoryEntry, build_branch
from prorl_gym.inference.tokens.rewrites import HistoryReader
from prorl_gym.inference.tokens.rollout_session import RolloutIdentity, RolloutSession, SamplingPool
from prorl_gym.inference.tokens.segment_tree import PlacedTurn, SegmentTree
from prorl_gym.inference.tokens.turn import MAX_SEGMENTS_TOKENS, ParsedTurn, SampledTurn, read_turn, sample_turn
from prorl_gym.records import Message, Segment, main_segment
from prorl_gym.settings import ResolvedSettings

TOKENS_PER_MESSAGE = 4
"""Tokens that every template spends on a message, at least."""
_CHARACTERS_PER_TOKEN = 16
"""Characters that a token of a conversation has on average, at most."""


class HarnessSession(RolloutSession):
    """The model, for one rollout of a harness, whose own sampling and limits hold. Calls may run concurrently.

    A harness is hostile: what cannot fit into the context is not rendered, and one history is rendered at a time.
    """

    def __init__(
        self, pool: SamplingPool, codec: ChatCodec, settings: ResolvedSettings, **identity: Unpack[RolloutIdentity]
    ) -> None:
        super().__init__(pool, codec, settings, **identity)
        self._tree = SegmentTree(codec, settings)
        self._histories = HistoryReader()
        self._rendering = Slot()
        self._next_number = 0
        self._given_up = 0
        """Calls that were given up before their first token."""
        self.limit: Limit | None = None
        """The limit that the latest call met; ``None``: it was answered. A harness may have gone on with less."""

    async def answer(self, call: HarnessCall) -> HarnessTurn:
        """Place a call in the tree of segments and sample its turn.

        Cancelling it stops the engine's call and keeps its tokens. Raises ``LimitReached``: turns or tokens;
        ``TaskError`` (``PROMPT_TOO_LONG``): the first prompt of the rollout does not fit; ``EngineError``: no engine
        could answer, or the template refuses the messages.
        """
        try:
            turn = await self._answer(call)
        except LimitReached as reached:
            self.limit = reached.limit
            raise
        self.limit = None
        return turn

    async def count_tokens(self, call: HarnessCall) -> int:
        """Return the length of a call's prompt, were it the first. Raises as ``answer`` where that does not fit."""
        self._require_room(call.entries, call.tools)
        messages = [entry.message for entry in call.entries]
        encode = partial(self._codec.encode_prompt, messages, call.tools)
        return len(await self._rendering.run(partial(encode_off_loop, messages, encode)))

    def segments(self) -> list[Segment]:
        """Return the tokens so far, at least the first prompt. May be called at any time, also after failures."""
        return self._tree.export_segments()

    def main_conversation(self) -> tuple[list[Message], int]:
        """Return the messages of the main segment, and how many of them came before the first turn sampled in it."""
        main = main_segment(self.segments(), self._settings.trained_segments)
        return ([], 0) if main is None else self._tree.conversation(main)

    async def _answer(self, call: HarnessCall) -> HarnessTurn:
        self._require_room(call.entries, call.tools)
        history = self._histories.read(call.entries, call.tools)
        base = self._tree.find_base(history)
        whole = Conversation(history.messages, call.tools)
        build = partial(build_branch, self._codec, whole, history.digests, base, self._thinking)
        prompt = await self._rendering.run(build)
        if len(prompt.ids) >= self.context_limit:
            raise self._too_long_error(len(prompt.ids))
        if max(self._turn_count, self._given_up) >= self._settings.max_turns:
            raise LimitReached(Limit.TURNS)
        if self._tree.tokens + len(prompt.ids) > MAX_SEGMENTS_TOKENS * self._settings.max_tokens:
            raise LimitReached(Limit.TOKENS)
        placed = self._tree.place(prompt, history, call)
        number, self._next_number = self._next_number, self._next_number + 1
        self._turn_count += 1
        turn = _Turn(number, call, prompt, placed, SampledTurn(prompt_ids=prompt.ids))
        try:
            turn.sampled.finish_reason = await sample_turn(
                partial(self._make_call, turn),
                turn.sampled.token_ids,
                partial(self._tokens_left, turn),
                self._stop_token_ids,
            )
        except asyncio.CancelledError:
            self._given_up += not turn.sampled.token_ids
            raise
        except ContextExceeded:
            if not turn.sampled.token_ids:
                raise self._too_long_error(len(prompt.ids)) from None
        finally:
            parsed = self._end_turn(turn)  # what was sampled stays, whatever ended it
        return HarnessTurn(prompt, turn.sampled, parsed, placed.placement)

    async def _make_call(self, turn: "_Turn", max_tokens: int) -> GenerationResult:
        request = self._request(turn.placed.next_prompt(), turn.number, len(turn.sampled.token_ids), max_tokens)
        return await self._sample(turn.number, request, partial(turn.append, request.seed))

    def _end_turn(self, turn: "_Turn") -> ParsedTurn:
        """Parse a turn, let later calls extend it, and give back its place."""
        call = turn.call
        parsed = read_turn(
            *(self._codec, turn.sampled, call.tools),
            may_call_tools=call.may_call_tools,
            single_tool_call=call.single_tool_call,
        )
        # Ids of our own: a harness keeps them, so that they name a call that it has changed.
        calls = (one.model_copy(update={"id": f"call_{turn.number}_{at}"}) for at, one in enumerate(parsed.calls))
        parsed = replace(parsed, calls=tuple(calls))
        if turn.sampled.token_ids:
            turn.placed.finish(parsed.as_message())
            self._histories.add_calls(parsed.calls)
        else:
            self._turn_count -= 1
        turn.placed.release()
        return parsed

    def _require_room(self, entries: Sequence[HistoryEntry], tools: Tools) -> None:
        """Raise where a conversation cannot fit, before its rendering costs anything."""
        characters = sum(len(entry.message.content) for entry in entries)
        least = max(characters // _CHARACTERS_PER_TOKEN, TOKENS_PER_MESSAGE * (len(entries) + len(tools)))
        if least >= self.context_limit:
            raise self._too_long_error(f"at least {least}")

    def _tokens_left(self, turn: "_Turn") -> int:
        asked, sampled = turn.call.max_tokens, len(turn.sampled.token_ids)
        limit = self._settings.max_turn_tokens if asked is None else min(asked, self._settings.max_turn_tokens)
        return min(limit - sampled, self.context_limit - len(turn.prompt.ids) - sampled)

    def _too_long_error(self, length: int | str) -> Exception:
        return LimitReached(Limit.TOKENS) if len(self._tree) else self._prompt_too_long_error(length)


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    number: int
    call: HarnessCall
    prompt: BuiltPrompt
    placed: PlacedTurn
    sampled: SampledTurn

    def append(self, seed: int | None, result: GenerationResult) -> list[int]:
        kept = self.placed.append(result, turn=self.number, seed=seed)
        count = len(kept)
        cut = replace(result, token_ids=kept, logprobs=result.logprobs[:count], versions=result.versions[:count])
        self.sampled.append_result(cut)
        return kept
