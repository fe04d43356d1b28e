"""The model, for one rollout whose agent is a harness: whole histories in, parsed turns out, every token recorded."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from uuid import uuid4

from prorl_gym.errors import EngineError, FailureKind, Limit, LimitReached, TaskError
from prorl_gym.inference.engine_errors import ContextExceeded
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.harness_call import HarnessCall, HarnessTurn
from prorl_gym.inference.tokens.history_equality import HistoryDigests
from prorl_gym.inference.tokens.prompt_builder import BuiltPrompt, build_branch
from prorl_gym.inference.tokens.rewrites import CallRestorer, stable_text
from prorl_gym.inference.tokens.rollout_calls import RolloutCalls, SamplingPool
from prorl_gym.inference.tokens.segment_tree import PlacedTurn, SegmentTree
from prorl_gym.inference.tokens.transcript import ThinkingMode
from prorl_gym.inference.tokens.turn import (
    MAX_SEGMENTS_TOKENS,
    ParsedTurn,
    SampledTurn,
    derive_seed,
    from_text_turn,
    parse_sampled,
    parse_without_calls,
    sample_turn,
)
from prorl_gym.records import Message, Segment, main_segment
from prorl_gym.settings import ResolvedSettings

OnTokens = Callable[[Sequence[int]], None]


class HarnessSession:
    """The model, for one rollout of a harness. Calls may run concurrently.

    The rollout's own sampling and limits hold, whatever a harness asks for.

    Args:
        pool: where to sample.
        codec: tokenizer and chat template.
        settings: sampling and limits.
        rollout_id: the session id towards engines; calls of one rollout meet the same one.
        replica: position in the group, part of the seed.
        cache_salt: separates prefix caches; ``None`` shares them.
        priority: higher is served first by engines that can.
        group_id: rollouts of one group share their first prompt; empty if it is not shared.
        thinking: what happens to earlier thoughts at a new user turn. See ``transcript``.
    """

    def __init__(
        self,
        pool: SamplingPool,
        codec: ChatCodec,
        settings: ResolvedSettings,
        *,
        rollout_id: str,
        replica: int = 0,
        cache_salt: str | None = None,
        priority: int = 0,
        group_id: str = "",
        thinking: ThinkingMode = "keep",
    ) -> None:
        self._pool = pool
        self._codec = codec
        self._settings = settings
        self._rollout_id = rollout_id
        self._replica = replica
        self._cache_salt = cache_salt
        self._priority = priority
        self._group_id = group_id
        self._thinking: ThinkingMode = thinking
        ends = (codec.terminator_id, *sorted(codec.end_ids), *settings.stop_token_ids)
        self._stop_token_ids = tuple(dict.fromkeys(ends))
        self._calls = RolloutCalls(pool, rollout_id)
        self._tree = SegmentTree(codec, settings)
        self._restorer = CallRestorer()
        self._next_number = 0
        self._turn_count = 0
        self._limit: Limit | None = None

    @property
    def turns(self) -> int:
        """Turns so far: those with tokens, and those under way."""
        return self._turn_count

    @property
    def limit(self) -> Limit | None:
        """The limit that the latest call met; ``None``: it was answered. A harness may have gone on with less."""
        return self._limit

    async def answer(self, call: HarnessCall, on_tokens: OnTokens | None = None) -> HarnessTurn:
        """Place a call in the tree of segments and sample its turn.

        Cancelling it stops the engine's call and keeps its tokens.

        Args:
            call: the call.
            on_tokens: called with the ids of the turn as they come, all of them once.

        Raises:
            LimitReached: turns or tokens.
            TaskError: ``PROMPT_TOO_LONG``, the first prompt of the rollout does not fit.
            EngineError: no engine could answer, or the template refuses the messages.
        """
        try:
            turn = await self._answer(call, on_tokens)
        except LimitReached as reached:
            self._limit = reached.limit
            raise
        self._limit = None
        return turn

    def segments(self) -> list[Segment]:
        """Return the tokens so far, at least the first prompt. May be called at any time, also after failures."""
        return self._tree.export_segments()

    def main_conversation(self) -> tuple[list[Message], int]:
        """Return the messages of the main segment, and how many of them came before the first turn sampled in it."""
        main = main_segment(self.segments(), self._settings.trained_segments)
        return ([], 0) if main is None else self._tree.conversation(main)

    async def failure_at_deadline(self) -> EngineError | None:
        """Return the engine's failure that kept the policy from answering before a deadline. See ``RolloutCalls``."""
        return await self._calls.failure_at_deadline()

    def mark_cancelled(self) -> None:
        """Wait less for the tokens of calls in flight: the rollout was cancelled."""
        self._calls.mark_cancelled()

    def close(self) -> None:
        """Free the rollout's place on an engine. Idempotent."""
        self._pool.forget_session(self._rollout_id)

    async def _answer(self, call: HarnessCall, on_tokens: OnTokens | None) -> HarnessTurn:
        messages, rewrites = self._restorer.restore([entry.message for entry in call.entries])
        digests = HistoryDigests(call.tools, stable_text)
        history = self._tree.digest_history(digests, messages)
        base = self._tree.find_base(history, messages)
        prompt = await build_branch(self._codec, messages, call.tools, history, base, self._thinking)
        if len(prompt.ids) >= self._context_limit():
            raise self._too_long_error(len(prompt.ids))
        if self._turn_count >= self._settings.max_turns:
            raise LimitReached(Limit.TURNS)
        if self._tree.tokens + len(prompt.ids) > MAX_SEGMENTS_TOKENS * self._settings.max_tokens:
            raise LimitReached(Limit.TOKENS)
        placed = self._tree.place(prompt, digests, call, rewrites)
        number, self._next_number = self._next_number, self._next_number + 1
        self._turn_count += 1
        turn = _Turn(number, call, prompt, placed, on_tokens)
        try:
            turn.sampled.finish_reason = await sample_turn(
                partial(self._make_call, turn),
                turn.sampled.token_ids,
                partial(self._tokens_left, turn),
                self._stop_token_ids,
            )
        except ContextExceeded:
            if not turn.sampled.token_ids:
                raise self._too_long_error(len(prompt.ids)) from None
        finally:
            parsed = self._end_turn(turn)  # what was sampled stays, whatever ended it
        return HarnessTurn(prompt, turn.sampled, parsed, placed.placement)

    async def _make_call(self, turn: "_Turn", max_tokens: int) -> GenerationResult:
        ids, ids_json = turn.placed.next_prompt()
        request = GenerationRequest(
            request_id=uuid4().hex,
            session_id=self._rollout_id,
            prompt_ids=ids,
            max_tokens=max_tokens,
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            top_k=self._settings.top_k,
            stop_token_ids=self._stop_token_ids,
            seed=derive_seed(self._settings.seed, self._replica, turn.number, len(turn.sampled.token_ids)),
            cache_salt=self._cache_salt,
            priority=self._priority,
            group_id=self._group_id,
            conversation=turn.prompt.conversation,
            prompt_ids_json=ids_json,
            on_tokens=turn.stream if turn.is_streamed else None,
        )
        return await self._calls.make(turn.number, request, partial(turn.append, request.seed))

    def _end_turn(self, turn: "_Turn") -> ParsedTurn:
        """Parse a turn, let later calls extend it, and give back its place."""
        parsed = self._parse(turn)
        if turn.sampled.token_ids:
            turn.placed.finish(parsed.as_message())
            self._restorer.add_calls(parsed.calls)
        else:
            self._turn_count -= 1
        turn.placed.release()
        return parsed

    def _parse(self, turn: "_Turn") -> ParsedTurn:
        call, sampled = turn.call, turn.sampled
        if sampled.text_turn is not None:
            parsed = from_text_turn(sampled.text_turn)
        elif call.may_call_tools:
            parsed = parse_sampled(self._codec, sampled.token_ids, call.tools)
        else:
            parsed = parse_without_calls(self._codec, sampled.token_ids)
        parsed = parsed.with_first_call() if call.single_tool_call else parsed
        # Ids of our own: a harness keeps them, so that they name a call that it has changed.
        calls = (one.model_copy(update={"id": f"call_{turn.number}_{at}"}) for at, one in enumerate(parsed.calls))
        return replace(parsed, calls=tuple(calls))

    def _tokens_left(self, turn: "_Turn") -> int:
        asked, sampled = turn.call.max_tokens, len(turn.sampled.token_ids)
        limit = self._settings.max_turn_tokens if asked is None else min(asked, self._settings.max_turn_tokens)
        return min(limit - sampled, self._context_limit() - len(turn.prompt.ids) - sampled)

    def _context_limit(self) -> int:
        """Longest segment in tokens: the settings' limit, or the engine's context if that is smaller."""
        return min(self._settings.max_tokens, self._pool.max_model_len or self._settings.max_tokens)

    def _too_long_error(self, length: int) -> Exception:
        if len(self._tree):
            return LimitReached(Limit.TOKENS)
        return TaskError(
            FailureKind.PROMPT_TOO_LONG,
            f"the first prompt has {length} tokens and leaves no room in {self._context_limit()}.",
            "Raise 'max_tokens', serve the model with a longer context, or drop the row.",
        )


class _Turn:
    """A turn that is being sampled."""

    def __init__(
        self, number: int, call: HarnessCall, prompt: BuiltPrompt, placed: PlacedTurn, on_tokens: OnTokens | None
    ) -> None:
        self.number = number
        self.call = call
        self.prompt = prompt
        self.placed = placed
        self.sampled = SampledTurn()
        self.is_streamed = on_tokens is not None
        self._on_tokens = on_tokens
        self._streamed_count = 0
        """Ids of the call under way that were reported already."""

    def stream(self, ids: Sequence[int]) -> None:
        """Report ids of the call under way."""
        assert self._on_tokens is not None
        self._streamed_count += len(ids)
        self._on_tokens(ids)

    def append(self, seed: int | None, result: GenerationResult) -> list[int]:
        """Append what one call sampled; return the ids that were kept."""
        kept = self.placed.append(result, turn=self.number, seed=seed)
        count = len(kept)
        cut = replace(result, token_ids=kept, logprobs=result.logprobs[:count], versions=result.versions[:count])
        self.sampled.append_result(cut)
        rest, self._streamed_count = kept[self._streamed_count :], 0
        if rest and self._on_tokens is not None:
            self._on_tokens(rest)
        return kept
