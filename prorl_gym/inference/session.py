"""One rollout's talk with the model: messages in, parsed turns out, every token recorded."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Literal, Protocol, TypeVar
from uuid import uuid4

from prorl_gym.errors import EngineError, FailureKind, Limit, LimitReached, TaskError
from prorl_gym.inference.chat import Codec, Tools
from prorl_gym.inference.faults import ContextExceeded
from prorl_gym.inference.protocol import GenerationRequest, GenerationResult, Said
from prorl_gym.inference.toolcalls.protocol import ParsedCall, ParsedText
from prorl_gym.inference.transcript import Thinking, Transcript
from prorl_gym.records import Message, Segment, ToolCall
from prorl_gym.settings import ResolvedSettings

log = logging.getLogger(__name__)

_SALVAGE_SECONDS = 2.0
"""How long a rollout that is stopped waits for the tokens of the call in flight: those before a deadline are graded."""

_HURRIED_SECONDS = 0.1
"""How long one that nobody wants any more does: an engine that is well has told them by then, at its next step."""

_MAX_ABORTS = 8
"""Aborts by the engine (a pause, a weight update) that one turn survives."""


_LONG_TEXT = 50_000
"""Characters beyond which messages are not encoded on the event loop (tens of milliseconds)."""

Encoded = TypeVar("Encoded")


class Generator(Protocol):
    """What a session needs of an ``EnginePool``."""

    @property
    def max_model_len(self) -> int | None:
        """Context in tokens, when it is known."""
        ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Sample a continuation. See ``EnginePool``."""
        ...

    async def cancel(self, request_id: str) -> bool:
        """Stop a call and salvage its tokens. See ``EnginePool``."""
        ...

    def trouble(self, request_id: str) -> EngineError | None:
        """Why a call is still not answered. See ``EnginePool``."""
        ...

    def forget(self, session_id: str) -> None:
        """The session is over. See ``EnginePool``."""
        ...


@dataclass(frozen=True, slots=True)
class AssistantText:
    """One parsed turn of the model: the fields of ``agents.protocol.AssistantTurn``."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    written: str = ""


@dataclass(slots=True)
class _Turn:
    """A turn in the making: an engine may abort it and it then goes on."""

    number: int
    ids: list[int] = field(default_factory=list[int])
    said: list[Said] = field(default_factory=list[Said])
    """Of an engine that answers in text, one per call."""
    aborts: int = 0


class ModelSession:
    """The model, for one rollout. Not to be used by two tasks at once.

    Args:
        pool: where to sample.
        codec: tokenizer and chat template.
        settings: sampling and limits.
        rollout_id: the session id towards engines; calls of one rollout meet the same one.
        replica: position in the group, part of the seed.
        cache_salt: separates prefix caches; ``None`` shares them.
        priority: higher is served first by engines that can.
        group_id: rollouts of one group share their first prompt; empty when it is shared with nobody.
        thinking: what happens to earlier thoughts at a new user turn. See ``transcript``.
    """

    def __init__(
        self,
        pool: Generator,
        codec: Codec,
        settings: ResolvedSettings,
        *,
        rollout_id: str,
        replica: int = 0,
        cache_salt: str | None = None,
        priority: int = 0,
        group_id: str = "",
        thinking: Thinking = "keep",
    ) -> None:
        self._pool = pool
        self._codec = codec
        self._settings = settings
        self._rollout_id = rollout_id
        self._replica = replica
        self._cache_salt = cache_salt
        self._priority = priority
        self._group_id = group_id
        ends = (codec.terminator_id, *sorted(codec.end_ids), *settings.stop_token_ids)
        self._stop_token_ids = tuple(dict.fromkeys(ends))
        self._transcript = Transcript(codec, settings, thinking)
        self._tools: Tools = ()
        self._turns = 0
        self._outage: EngineError | None = None
        self._salvage_seconds = _SALVAGE_SECONDS

    @property
    def turns(self) -> int:
        """Turns begun so far."""
        return self._turns

    @property
    def outage(self) -> EngineError | None:
        """The failure of an engine that kept the call from its answer which a cancel ended, if there was one."""
        return self._outage

    async def start(self, messages: Sequence[Message], tools: Tools) -> AssistantText:
        """Render and send the first prompt.

        Args:
            messages: the conversation so far.
            tools: function schemas (``ToolSpec.as_function``); they hold for the whole rollout.

        Raises:
            TaskError: ``PROMPT_TOO_LONG``.
            LimitReached: turns or tokens.
            EngineError: no engine could answer, or the template refuses the messages.
        """
        if len(self._transcript):
            raise RuntimeError("the session has been started already")
        self._tools = tools
        prompt = await _beside_the_loop(
            sum(len(message.content) for message in messages), partial(self._codec.first_prompt, messages, tools)
        )
        if len(prompt) >= self._context():
            raise self._prompt_too_long(len(prompt))
        self._transcript.begin(prompt, messages, tools)
        return await self._take_turn()

    async def respond(self, messages: Sequence[Message]) -> AssistantText:
        """Append new messages (all tool results of a step at once, a user turn) and sample the next turn.

        Raises:
            LimitReached: turns, or tokens when the messages and one more token do not fit. Nothing is appended then.
            EngineError: no engine could answer.
        """
        if self._turns >= self._settings.max_turns:
            raise LimitReached(Limit.TURNS)
        extension = await _beside_the_loop(
            self._transcript.characters(messages), partial(self._transcript.extension, messages)
        )
        if extension.length >= self._context():
            raise LimitReached(Limit.TOKENS)
        self._transcript.extend(extension)
        return await self._take_turn()

    def segments(self) -> list[Segment]:
        """Return the tokens so far. May be called at any time, after failures and cancels too."""
        return self._transcript.export()

    def hurry(self) -> None:
        """Nobody wants the rollout any more: wait less for the tokens of a call that is stopped."""
        self._salvage_seconds = _HURRIED_SECONDS

    def close(self) -> None:
        """The rollout is over: give up its place on an engine. Idempotent."""
        self._pool.forget(self._rollout_id)

    async def _take_turn(self) -> AssistantText:
        """Sample one whole turn; go on with it from the same ids when an engine aborts it."""
        turn = _Turn(self._turns)
        self._turns += 1
        while True:
            result = await self._sample(turn)
            if result.finish_reason != "abort":
                return self._parsed(turn, result.finish_reason)
            if turn.ids and turn.ids[-1] in self._stop_token_ids:  # it was over when the abort came
                return self._parsed(turn, "stop")
            turn.aborts += not result.paused  # a pause of ours says nothing against the engine
            if turn.aborts > _MAX_ABORTS:
                raise EngineError(
                    FailureKind.ENGINE_OVERLOADED,
                    f"engine {result.engine}: aborted one turn {turn.aborts} times.",
                    "Pause engines for the whole of a weight update, not call by call.",
                )
            if len(turn.ids) >= self._settings.max_turn_tokens or not self._room():
                return self._parsed(turn, "length")

    async def _sample(self, turn: _Turn) -> GenerationResult:
        """Make one model call and append its tokens, those of a cancelled call included."""
        request = self._request(turn)
        call = asyncio.create_task(self._pool.generate(request), name=f"turn {turn.number} of {self._rollout_id}")
        try:
            result = await asyncio.shield(call)
        except asyncio.CancelledError:
            self._outage = self._pool.trouble(request.request_id)
            await self._salvage(call, request, turn)
            raise
        except ContextExceeded:
            if self._room() < 1 or request.max_tokens <= self._room():
                raise self._does_not_fit(turn) from None
            return await self._sample(turn)  # the pool has learnt the engine's context: ask for less
        self._append(turn, request, result)
        return result

    async def _salvage(self, call: asyncio.Task[GenerationResult], request: GenerationRequest, turn: _Turn) -> None:
        """Keep what the engine sampled before the rollout was cancelled; bounded, and never in the way of the end."""
        try:
            async with asyncio.timeout(self._salvage_seconds):
                # A call may have been answered in the very moment of the cancel: no engine knows it any more.
                if call.done() or await self._pool.cancel(request.request_id):
                    self._append(turn, request, await asyncio.shield(call))
        except (TimeoutError, EngineError, LimitReached) as error:
            log.debug("rollout %s: nothing salvaged of turn %d: %r", self._rollout_id, turn.number, error)
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    def _append(self, turn: _Turn, request: GenerationRequest, result: GenerationResult) -> None:
        turn.ids += self._transcript.append(result, turn=turn.number, seed=request.seed)
        if result.said is not None:
            turn.said.append(result.said)

    def _request(self, turn: _Turn) -> GenerationRequest:
        settings, prompt = self._settings, self._transcript.prompt()
        return GenerationRequest(
            request_id=uuid4().hex,
            session_id=self._rollout_id,
            prompt_ids=prompt.ids,
            max_tokens=max(1, min(settings.max_turn_tokens - len(turn.ids), self._room())),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop_token_ids=self._stop_token_ids,
            seed=derive_seed(settings.seed, self._replica, turn.number, len(turn.ids)),
            cache_salt=self._cache_salt,
            priority=self._priority,
            group_id=self._group_id,
            conversation=prompt.conversation,
            prompt_json=prompt.json,
        )

    def _parsed(self, turn: _Turn, finish_reason: Literal["stop", "length"]) -> AssistantText:
        written = self._codec.said(turn.ids)
        said = _of_engine(turn.said) if turn.said else self._codec.parse(written, self._tools)
        calls = tuple(
            ToolCall(id=f"call_{turn.number}_{index}", name=call.name, arguments=call.arguments)
            for index, call in enumerate(said.calls)
        )
        # What could not be read is kept as it was written: the model must see what it is told is wrong.
        self._transcript.note(written if said.complaints else said.text, () if said.complaints else calls)
        return AssistantText(said.text, calls, said.complaints, finish_reason, written if said.complaints else "")

    def _context(self) -> int:
        """Longest trajectory in tokens: the settings' limit, or the engine's context if that is smaller."""
        return min(self._settings.max_tokens, self._pool.max_model_len or self._settings.max_tokens)

    def _room(self) -> int:
        return self._context() - len(self._transcript)

    def _does_not_fit(self, turn: _Turn) -> Exception:
        if turn.number == 0 and not turn.ids:
            return self._prompt_too_long(len(self._transcript))
        return LimitReached(Limit.TOKENS)

    def _prompt_too_long(self, length: int) -> TaskError:
        return TaskError(
            FailureKind.PROMPT_TOO_LONG,
            f"the first prompt has {length} tokens and leaves no room in {self._context()}.",
            "Raise 'max_tokens', serve the model with a longer context, or drop the row.",
        )


async def _beside_the_loop(characters: int, encode: Callable[[], Encoded]) -> Encoded:
    """Encode text, long ones beside the event loop: a megabyte takes a second."""
    return encode() if characters < _LONG_TEXT else await asyncio.to_thread(encode)


def _of_engine(said: Sequence[Said]) -> ParsedText:
    """Return a turn that the engine took apart itself."""
    calls = tuple(ParsedCall(call.name, call.arguments) for each in said for call in each.tool_calls)
    return ParsedText("".join(each.text for each in said), calls)


def derive_seed(seed: int | None, replica: int, turn: int, sampled: int = 0) -> int | None:
    """Return the seed of one model call, or ``None`` when the rollout has none.

    Args:
        seed: of the rollout's settings; replicas of a group share it.
        replica: position in the group.
        turn: number of the turn.
        sampled: tokens of the turn that exist already: a call that goes on with it must not repeat them.
    """
    if seed is None:
        return None
    text = f"{seed}/{replica}/{turn}/{sampled}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1
