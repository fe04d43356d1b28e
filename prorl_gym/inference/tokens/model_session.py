"""The model, for one rollout of ours: messages in, parsed turns out, every token recorded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Unpack

from prorl_gym.errors import Limit, LimitReached
from prorl_gym.inference.protocol import AssistantTurn, ContextExceeded, GenerationRequest, GenerationResult, TextTurn
from prorl_gym.inference.tokens.chat_codec import ChatCodec, Tools, encode_off_loop
from prorl_gym.inference.tokens.rollout_session import RolloutIdentity, RolloutSession, SamplingPool
from prorl_gym.inference.tokens.transcript import Transcript
from prorl_gym.inference.tokens.turn import MAX_SEGMENTS_TOKENS, sample_turn
from prorl_gym.inference.tokens.turn_log import TurnLog
from prorl_gym.inference.toolcalls.turn_parsing import ParsedCall, ParsedText, parse_turn
from prorl_gym.records import Message, Segment, ToolCall
from prorl_gym.settings import ResolvedSettings
from prorl_gym.thoughts import open_thinking


@dataclass(slots=True)
class _PartialTurn:
    number: int
    prompt: list[int] = field(default_factory=list[int])
    ids: list[int] = field(default_factory=list[int])
    text_turns: list[TextTurn] = field(default_factory=list[TextTurn])
    """Turns of an engine that answers in text, one for each call."""


class ModelSession(RolloutSession):
    """The model, for one rollout. Not to be used by two tasks at once.

    ``turn_log`` has turns to replay, and takes the others.
    """

    def __init__(
        self,
        pool: SamplingPool,
        codec: ChatCodec,
        settings: ResolvedSettings,
        *,
        turn_log: TurnLog | None = None,
        **identity: Unpack[RolloutIdentity],
    ) -> None:
        super().__init__(pool, codec, settings, **identity)
        self._transcript = Transcript(codec, settings, self._thinking)
        self._turn_log = turn_log
        self._tools: Tools = ()

    async def start_conversation(self, messages: Sequence[Message], tools: Tools) -> AssistantTurn:
        """Render and send the first prompt, or later that of a new segment, which holds a summary of the last one.

        ``tools`` hold for the whole rollout. Raises ``TaskError`` (``PROMPT_TOO_LONG``, the first one),
        ``LimitReached``: turns or tokens; ``EngineError``: no engine could answer, or the template refuses the
        messages; ``ReplayDivergedError``: the turn that is replayed had answers.
        """
        self._require_turn()
        is_first = not len(self._transcript)
        if not is_first and not self._settings.compact_tokens:
            raise RuntimeError("the session has been started already")
        if not is_first and self._turn_log is not None:
            self._turn_log.settle_answers(())
        self._tools = tools
        prompt = await encode_off_loop(messages, partial(self._codec.encode_prompt, messages, tools))
        if len(prompt) >= self.context_limit:
            raise self._prompt_too_long_error(len(prompt)) if is_first else LimitReached(Limit.TOKENS)
        if self._transcript.total_tokens + len(prompt) > MAX_SEGMENTS_TOKENS * self._settings.max_tokens:
            raise LimitReached(Limit.TOKENS)
        self._transcript.begin_conversation(prompt, messages, tools)
        return await self._sample_turn()

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        """Append new messages (all tool results of a step at once, a user turn) and sample the next turn.

        Raises ``LimitReached``: turns, or tokens when the messages and one more token do not fit (nothing is appended
        then); ``EngineError``: no engine could answer; ``ReplayDivergedError``: they are not those of the turn that is
        replayed.
        """
        self._require_turn()
        if self._turn_log is not None:
            messages = self._turn_log.settle_answers(messages)
        extension = await encode_off_loop(
            self._transcript.rendered_for(messages), partial(self._transcript.encode_extension, messages)
        )
        if extension.prompt_length >= self.context_limit:
            raise LimitReached(Limit.TOKENS)
        self._transcript.append_extension(extension)
        return await self._sample_turn()

    def segments(self) -> list[Segment]:
        """Return the tokens so far. May be called at any time, after failures and cancels too."""
        return self._transcript.export_segments()

    async def _sample_turn(self) -> AssistantTurn:
        turn = _PartialTurn(self._turn_count)
        self._turn_count += 1
        if self._turn_log is not None:
            # Whatever decides the distribution of the turn, but for the weights.
            of = self._settings
            sampling = (of.temperature, of.top_p, of.top_k, of.seed, of.stop_token_ids, of.max_turn_tokens)
            self._turn_log.begin_turn("/".join(map(str, (self._transcript.digest(), *sampling))))

        def tokens_left() -> int:
            context = self.context_limit - len(self._transcript)
            return min(self._settings.max_turn_tokens - len(turn.ids), context)

        try:
            finish_reason = await sample_turn(
                partial(self._make_call, turn), turn.ids, tokens_left, self._stop_token_ids
            )
        except ContextExceeded:
            if turn.number == 0 and not turn.ids:
                raise self._prompt_too_long_error(len(self._transcript)) from None
            raise LimitReached(Limit.TOKENS) from None
        return self._parse_turn(turn, finish_reason)

    async def _make_call(self, turn: _PartialTurn, max_tokens: int) -> GenerationResult:
        """Make one model call and append its tokens, those of a cancelled call included."""
        request = self._request(self._transcript.next_prompt(), turn.number, len(turn.ids), max_tokens)
        turn.prompt = turn.prompt or list(request.prompt_ids)
        if self._turn_log is not None and (logged := self._turn_log.replay_call()) is not None:
            self._report(logged, partial(self._append, turn, request))
            return logged
        result = await self._sample(turn.number, request, partial(self._append, turn, request))
        if self._turn_log is not None:
            self._turn_log.add_call(result)
        return result

    def _append(self, turn: _PartialTurn, request: GenerationRequest, result: GenerationResult) -> list[int]:
        kept = self._transcript.append_sampled(result, turn=turn.number, seed=request.seed)
        turn.ids += kept
        if result.text_turn is not None:
            turn.text_turns.append(result.text_turn)
        return kept

    def _parse_turn(self, turn: _PartialTurn, finish_reason: Literal["stop", "length"]) -> AssistantTurn:
        written = self._codec.decode_turn(turn.prompt, turn.ids)
        if turn.text_turns:  # the engine parsed it itself
            found = tuple(ParsedCall(call.name, call.arguments) for each in turn.text_turns for call in each.tool_calls)
            said = ParsedText(open_thinking("".join(each.text for each in turn.text_turns)), found)
        else:
            said = parse_turn(self._codec.parser, written, self._tools)
        calls = tuple(
            ToolCall(id=f"call_{turn.number}_{index}", name=call.name, arguments=call.arguments)
            for index, call in enumerate(said.calls)
        )
        # A call that could not be read stays as it was written: the model must see what the complaint is about.
        self._transcript.append_assistant(
            written if said.parse_errors else said.text, () if said.parse_errors else calls
        )
        raw_text = written if said.parse_errors else ""
        return AssistantTurn(said.text, calls, said.parse_errors, finish_reason, raw_text, len(self._transcript))

    def _require_turn(self) -> None:
        if self._turn_count >= self._settings.max_turns:
            raise LimitReached(Limit.TURNS)
