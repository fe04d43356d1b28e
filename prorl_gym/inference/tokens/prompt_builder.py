"""Builds the prompt of a call whose caller sends its whole conversation each time, exact to the id.

Rendering a history again would change ids that were sampled. So the history is compared, every time: with the turns in
``SegmentCache``, or, where the caller sends token ids back, with what these ids decode to, turn by turn. If it ends in
a known turn, the prompt is that turn's ids and a delta for the new messages. Any other history (compacted, cut, edited)
begins a segment: trainers that need one growing sequence cannot join it to the one before, so it is counted and logged
with its reason (``PromptOrigin``). ``PromptBuilder`` renders it again, since its callers' trainers do; for a rollout of
ours ``build_branch`` builds it on the longest beginning of it that is known.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from prorl_gym.errors import EngineError
from prorl_gym.inference.protocol import Conversation
from prorl_gym.inference.tokens.chat_codec import ChatCodec, Tools, encode_off_loop
from prorl_gym.inference.tokens.history_equality import HistoryDigests, ThinkingChain, thinking_chain, thinking_matches
from prorl_gym.inference.tokens.segment_cache import KnownTurn, SegmentCache
from prorl_gym.inference.tokens.transcript import ThinkingMode
from prorl_gym.inference.tokens.turn import parse_sampled
from prorl_gym.records import Message

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenFields:
    prompt: list[int]
    generation: list[int]

    @property
    def ids(self) -> list[int]:
        """Everything that the engine has seen after the call."""
        return self.prompt + self.generation


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One message of a history, with the tokens of the call that made it, where the agent sent them back."""

    message: Message
    tokens: TokenFields | None = None

    @property
    def is_assistant(self) -> bool:
        return self.message.role == "assistant"


class PromptOrigin(StrEnum):
    """How a prompt was made; all but the first two begin a segment."""

    FIRST = "first"  # no turn was sampled yet
    EXTENDED = "extended"  # the ids of the last turn, and a delta
    CHANGED = "changed"  # rendered again: the history is not the one that was sampled on
    UNKNOWN = "unknown"  # rendered again: the last turn came without ids and is not remembered
    AMBIGUOUS = "ambiguous"  # rendered again: several remembered turns have these words, with different ids
    TEMPLATE = "template"  # rendered again: at a new user turn the template drops old thoughts, as configured
    REOPENED = "reopened"  # rendered again: the history ends in a turn of the assistant

    @property
    def starts_segment(self) -> bool:
        """Whether the prompt does not extend what was sampled before."""
        return self not in (PromptOrigin.FIRST, PromptOrigin.EXTENDED)


@dataclass(frozen=True, slots=True)
class BuiltPrompt:
    """The prompt of one call, and what is needed to remember the turn sampled on it."""

    ids: list[int]
    origin: PromptOrigin
    conversation: Conversation
    digests: tuple[bytes, ...]
    """One per message; see ``HistoryDigests.of_history``."""
    thinking: ThinkingChain | None = None
    parent_digest: bytes | None = None
    """Digest of the history up to the turn that it extends."""
    session_id: str | None = None
    """Session of the remembered turn that it extends."""
    base: "Base | None" = None
    """The turn whose ids it begins with, where it is a branch."""
    rewrites: frozenset[str] = frozenset()
    """Names of the rewrites without which the template refuses what was rendered; see ``ChatCodec.rewrite``."""

    @property
    def group_id(self) -> str:
        """The same for all conversations with the same messages before the first turn."""
        messages = self.conversation.messages
        opening = next((n for n, message in enumerate(messages) if message.role == "assistant"), len(messages))
        return self.digests[opening - 1].hex() if opening else ""


@dataclass(frozen=True, slots=True)
class Base:
    """The longest beginning of a history that ends in a known turn."""

    messages: int
    """In that beginning."""
    turn: KnownTurn
    source: object = None
    """Where it was found; handed back with the prompt."""


async def build_branch(
    codec: ChatCodec,
    whole: Conversation,
    digests: tuple[bytes, ...],
    base: Base | None,
    thinking: ThinkingMode = "keep",
) -> BuiltPrompt:
    """Return a prompt on the ids of the turn that a beginning of its history ends in.

    ``base`` is that beginning; ``None``: no turn of it is known, so it is rendered whole. Raises ``EngineError``
    (``TEMPLATE_UNSAFE``) when the template cannot render this conversation.
    """
    new = whole.messages if base is None else whole.messages[base.messages :]
    if thinking == "template" and any(message.role == "user" for message in new):
        new = whole.messages

    def assemble() -> BuiltPrompt:
        if base is not None:
            try:
                return replace(_continue_turn(codec, whole, digests, base.messages, base.turn, thinking), base=base)
            except EngineError as error:  # the template takes no such messages after a turn
                log.debug("a history is rendered whole: %s", error)
        has_turn = any(message.role == "assistant" for message in whole.messages)
        return _render_prompt(codec, whole, digests, PromptOrigin.UNKNOWN if has_turn else PromptOrigin.FIRST)

    return await encode_off_loop(new, assemble)


def _continue_turn(
    codec: ChatCodec,
    whole: Conversation,
    digests: tuple[bytes, ...],
    count: int,
    known: KnownTurn,
    thinking: ThinkingMode,
) -> BuiltPrompt:
    """Return the prompt of a history whose first ``count`` messages end in a known turn."""
    new = whole.messages[count:]
    ids = _extend(codec, known.ids, new, whole.tools)
    if thinking == "template" and any(message.role == "user" for message in new):
        rendered = _render_prompt(codec, whole, digests, PromptOrigin.TEMPLATE)
        if rendered.ids != ids:
            return rendered
    is_extended = not any(message.role == "assistant" for message in new)
    origin = PromptOrigin.EXTENDED if is_extended else PromptOrigin.CHANGED
    conversation = replace(whole, last_turn_span=(known.start, len(known.ids)) if is_extended else None)
    thoughts = thinking_chain(new, known.thinking)
    parent, (_, rewrites) = digests[count - 1], codec.rewrite(new, is_whole=False)
    return BuiltPrompt(ids, origin, conversation, digests, thoughts, parent, known.session_id, rewrites=rewrites)


class PromptBuilder:
    """Builds prompts on the ids of the calls before them, which ``cache`` keeps. ``thinking``: see ``transcript``."""

    def __init__(self, codec: ChatCodec, cache: SegmentCache, thinking: ThinkingMode = "keep") -> None:
        self._codec = codec
        self._thinking_mode: ThinkingMode = thinking
        self._cache = cache

    async def build_prompt(
        self, entries: Sequence[HistoryEntry], tools: Tools, session_id: str, *, single_tool_call: bool = False
    ) -> BuiltPrompt:
        """Return the prompt of the next call, for the whole conversation.

        ``single_tool_call``: answers to this caller show only the first tool call of a turn. Raises ``EngineError``
        (``TEMPLATE_UNSAFE``) when the template cannot render this conversation.
        """
        digests = HistoryDigests(tools).of_history(_messages(entries))
        last = _last_turn_index(entries)
        known = None if last is None else self._find_last_turn(entries[: last + 1], digests[last], session_id)
        whole = Conversation(_messages(entries), tools)

        def assemble() -> BuiltPrompt:
            if last is None:
                return _render_prompt(self._codec, whole, digests, PromptOrigin.FIRST)
            if last == len(entries) - 1:
                return _render_prompt(self._codec, whole, digests, PromptOrigin.REOPENED)
            found = self._verify_token_fields(entries[: last + 1], tools, single_tool_call) if known is None else known
            if isinstance(found, PromptOrigin):
                return _render_prompt(self._codec, whole, digests, found)
            return _continue_turn(self._codec, whole, digests, last + 1, found, self._thinking_mode)

        return await encode_off_loop(whole.messages, assemble)

    def remember_turn(self, prompt: BuiltPrompt, session_id: str, turn: Message, generation: Sequence[int]) -> None:
        """Remember a turn as the caller is answered, so that a later history can end in it without token ids."""
        if generation:
            digest = HistoryDigests(prompt.conversation.tools).extend(prompt.digests[-1], turn)
            thoughts = thinking_chain([turn], prompt.thinking)
            self._cache.add_turn(digest, session_id, prompt.ids, generation, prompt.parent_digest, thoughts)

    def _find_last_turn(
        self, history: Sequence[HistoryEntry], digest: bytes, session_id: str
    ) -> KnownTurn | PromptOrigin | None:
        """Find the turn that a history ends in among the remembered ones, or why the history is to be rendered again.

        ``None`` where the turn came with token ids that are not remembered, so that they have to be verified.
        """
        candidates = self._cache.find_turns(digest, session_id)
        tokens, shown = history[-1].tokens, thinking_chain(_messages(history))
        if tokens is not None:
            has_other_ids = False
            for known in candidates:
                if known.ids == tokens.ids and thinking_matches(known.thinking, shown):
                    return known
                has_other_ids = has_other_ids or known.session_id == session_id
            return PromptOrigin.CHANGED if has_other_ids else None  # this session's turn with these words has other ids
        of_other_session, reason = None, PromptOrigin.UNKNOWN
        for known in candidates:  # those of this session come first
            if not thinking_matches(known.thinking, shown):
                reason = PromptOrigin.CHANGED
            elif known.session_id == session_id:
                return known
            elif of_other_session is not None and known.ids != of_other_session.ids:
                return PromptOrigin.AMBIGUOUS
            else:
                of_other_session = known
        return of_other_session or reason

    def _verify_token_fields(
        self, history: Sequence[HistoryEntry], tools: Tools, single_tool_call: bool
    ) -> KnownTurn | PromptOrigin:
        """Return the ids that came with the last turn, if they are the ids of this history."""
        tokens = history[-1].tokens
        assert tokens is not None
        ids = tokens.ids
        try:
            # Remembered ids belong to another history: ``_find_last_turn`` would have found them on this one.
            if max(ids) < self._codec.vocab_size and not self._cache.has_ids(ids):
                sampled = self._replay_history(history, tools, single_tool_call)
                if sampled is not None:
                    return KnownTurn(None, ids, len(tokens.prompt), thinking_chain(sampled))
        except EngineError as error:  # the template refuses a part of the history, so no turn was sampled on it
            log.debug("token fields not confirmed: %s", error)
        return PromptOrigin.CHANGED

    def _replay_history(
        self, history: Sequence[HistoryEntry], tools: Tools, single_tool_call: bool
    ) -> list[Message] | None:
        """Return the assistant's turns as their ids read, or ``None`` if the ids are those of another history.

        Compares ids and messages turn by turn, from the last one back to a prompt that was rendered whole.
        """
        read: list[Message] = []
        equality = HistoryDigests(tools)
        end = len(history) - 1
        while True:
            tokens = history[end].tokens
            if tokens is None:
                return None
            spoken = parse_sampled(self._codec, tokens.prompt, tokens.generation, tools)
            read.append((spoken.with_first_call() if single_tool_call else spoken).as_message())
            if not equality.is_same_turn(read[-1], history[end].message):
                return None
            before = _last_turn_index(history[:end])
            earlier = None if before is None else history[before].tokens
            if before is not None and earlier is not None and before < end - 1:
                between = _messages(history[before + 1 : end])
                if _extend(self._codec, earlier.ids, between, tools) == tokens.prompt:
                    end = before
                    continue
            opening = _messages(history[:end])
            if self._codec.encode_prompt(opening, tools) != tokens.prompt:
                return None
            return [*(message for message in opening if message.role == "assistant"), *reversed(read)]


def _extend(codec: ChatCodec, ids: Sequence[int], new: Sequence[Message], tools: Tools) -> list[int]:
    """Return the ids of a turn and a delta; the turn's terminator is added unless the policy sampled one."""
    closing = () if ids[-1] in codec.closing_ids else (codec.terminator_id,)
    return [*ids, *closing, *codec.encode_delta(new, tools)]


def _render_prompt(
    codec: ChatCodec, whole: Conversation, digests: tuple[bytes, ...], origin: PromptOrigin
) -> BuiltPrompt:
    ids = codec.encode_prompt(whole.messages, whole.tools)
    _, rewrites = codec.rewrite(whole.messages, is_whole=True)
    return BuiltPrompt(ids, origin, whole, digests, thinking_chain(whole.messages), rewrites=rewrites)


def _messages(entries: Sequence[HistoryEntry]) -> list[Message]:
    return [entry.message for entry in entries]


def _last_turn_index(entries: Sequence[HistoryEntry]) -> int | None:
    return next((n for n in reversed(range(len(entries))) if entries[n].is_assistant), None)


def function_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool of the Responses API (flat) or of chat completions (nested) as templates expect it."""
    if "function" in tool:
        return {"type": "function", "function": dict(tool["function"])}
    fields = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": fields}
