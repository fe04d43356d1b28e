"""The prompt of the next model call, built on the ids of the calls before it.

An agent sends the whole conversation each time. Rendering it again would change ids that were sampled, so the prompt
is what the engine has seen and sampled last, and a delta for what is new. That holds only while the history is the one
that those ids stand for. So it is checked, every time: by memory where this server sampled the turn, or else by going
back through the token fields turn by turn and comparing what lies between them with what the messages there give.

A history that was changed (compacted, cut, edited) is rendered anew. That begins a new segment, which trainers that
want one growing sequence cannot join to the one before; so it is counted and said, never done in silence.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from prorl_gym.errors import EngineError
from prorl_gym.gym_root.responses_api_models.prorl_model.conversation import (
    Entry,
)
from prorl_gym.gym_root.responses_api_models.prorl_model.equality import (
    Thoughts,
    digests,
    extended,
    same_turn,
    thoughts_agree,
    thoughts_of,
)
from prorl_gym.gym_root.responses_api_models.prorl_model.memory import Known, TurnMemory
from prorl_gym.gym_root.responses_api_models.prorl_model.reading import read_turn
from prorl_gym.inference.chat import Codec, Tools
from prorl_gym.inference.protocol import Conversation
from prorl_gym.inference.transcript import Thinking
from prorl_gym.records import Message

log = logging.getLogger(__name__)

_LONG_TEXT = 50_000
"""Characters beyond which a conversation is not encoded on the event loop (tens of milliseconds)."""


class Origin(StrEnum):
    """Where a prompt comes from."""

    FIRST = "first"  # nobody has sampled anything yet
    EXTENDED = "extended"  # the ids of the last turn, and a delta
    CHANGED = "changed"  # rendered anew: the history is not the one that was sampled on
    UNKNOWN = "unknown"  # rendered anew: the last turn came without ids, and this server does not know it
    AMBIGUOUS = "ambiguous"  # rendered anew: several turns have these words and other ids, and nothing says whose it is
    TEMPLATE = "template"  # rendered anew: a new user turn, at which the template drops old thoughts, as configured
    REOPENED = "reopened"  # rendered anew: the assistant is to speak twice in a row

    @property
    def new_segment(self) -> bool:
        """Whether the prompt does not extend what was sampled before."""
        return self not in (Origin.FIRST, Origin.EXTENDED)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to send."""

    ids: list[int]
    origin: Origin
    conversation: Conversation
    digests: tuple[bytes, ...]
    """One per message; see ``equality.digests``."""
    thoughts: Thoughts | None = None
    """Of the turns in it."""
    parent: bytes | None = None
    """Digest of the turn that it extends."""
    session_id: str | None = None
    """Whose conversation it is, where memory tells."""

    @property
    def group_id(self) -> str:
        """What is the same for all conversations that begin alike."""
        messages = self.conversation.messages
        opening = next((n for n, message in enumerate(messages) if message.role == "assistant"), len(messages))
        return self.digests[opening - 1].hex() if opening else ""


class Continuity:
    """Makes prompts.

    Args:
        codec: tokenizer and template.
        memory: turns that were sampled here.
        thinking: what happens to earlier thoughts at a new user turn; see ``inference.transcript``.
    """

    def __init__(self, codec: Codec, memory: TurnMemory, thinking: Thinking = "keep") -> None:
        self._codec = codec
        self._thinking = thinking
        self._memory = memory

    async def prompt(
        self, entries: Sequence[Entry], tools: Tools, session_id: str, *, one_call: bool = False
    ) -> Prompt:
        """Return the prompt of the next call.

        Args:
            entries: the whole conversation, not empty.
            tools: function schemas.
            session_id: whose it is, as far as the caller says.
            one_call: the caller is answered with the first call of a turn only.

        Raises:
            EngineError: ``TEMPLATE_UNSAFE``, when the template cannot render this conversation.
        """
        chain = digests(_messages(entries), tools)
        last = next((n for n in reversed(range(len(entries))) if entries[n].sampled), None)
        known = None if last is None else self._recall(entries[: last + 1], chain[last], session_id)
        work = partial(self._build, entries, tools, chain, last, known, one_call)
        if sum(len(entry.message.content) for entry in entries) < _LONG_TEXT:
            return work()
        return await asyncio.to_thread(work)

    def remember(self, prompt: Prompt, session_id: str, turn: Message, generation: Sequence[int]) -> None:
        """Keep a turn, in case the agent sends it back as mere text.

        Args:
            prompt: what it was sampled on.
            session_id: whose it is.
            turn: what was said, as it is answered.
            generation: the ids that were sampled.
        """
        if generation:
            digest = extended(prompt.digests[-1], turn)
            thoughts = thoughts_of([turn], prompt.thoughts)
            self._memory.remember(digest, session_id, prompt.ids, generation, prompt.parent, thoughts)

    def _recall(self, history: Sequence[Entry], digest: bytes, session_id: str) -> Known | Origin | None:
        """Look up the turn that a history ends in. ``None``: it is not known here, but came with token fields."""
        candidates = self._memory.recall(digest, session_id)
        tokens, messages = history[-1].tokens, _messages(history)
        if tokens is not None:
            return self._recall_ids(tokens.ids, candidates, messages, session_id)
        first, origin = None, Origin.UNKNOWN
        for known in candidates:
            if not thoughts_agree(known.thoughts, messages):
                origin = Origin.CHANGED
            elif known.session_id == session_id:
                return known
            elif first is not None and known.ids != first.ids:
                return Origin.AMBIGUOUS
            else:
                first = known
        return first or origin

    def _recall_ids(
        self, ids: list[int], candidates: Iterable[Known], messages: Sequence[Message], session_id: str
    ) -> Known | Origin | None:
        others = False
        for known in candidates:
            if known.ids == ids and thoughts_agree(known.thoughts, messages):
                return known
            others = others or known.session_id == session_id
        return Origin.CHANGED if others else None  # the session's own turn with these words has other ids

    def _build(
        self,
        entries: Sequence[Entry],
        tools: Tools,
        chain: tuple[bytes, ...],
        last: int | None,
        known: Known | Origin | None,
        one_call: bool,
    ) -> Prompt:
        if last is None:
            return self._rendered(entries, tools, chain, Origin.FIRST)
        if last == len(entries) - 1:
            return self._rendered(entries, tools, chain, Origin.REOPENED)
        found = self._checked(entries[: last + 1], tools, one_call) if known is None else known
        if isinstance(found, Origin):
            return self._rendered(entries, tools, chain, found)
        news = _messages(entries[last + 1 :])
        ids = [*self._closed(found.ids), *self._codec.delta(news, tools)]
        if self._thinking == "template" and any(message.role == "user" for message in news):
            anew = self._rendered(entries, tools, chain, Origin.TEMPLATE)
            if anew.ids != ids:
                return anew
        conversation = Conversation(_messages(entries), tools, (found.start, len(found.ids)))
        return Prompt(ids, Origin.EXTENDED, conversation, chain, found.thoughts, chain[last], found.session_id)

    def _checked(self, history: Sequence[Entry], tools: Tools, one_call: bool) -> Known | Origin:
        """Return the ids in the token fields of the last turn, if they stand for this history."""
        tokens = history[-1].tokens
        assert tokens is not None
        ids = tokens.ids
        try:
            # Ids that are remembered were sampled on another history: ``_recall`` would have found them on this one.
            if max(ids) < self._codec.vocab_size and not self._memory.holds(ids):
                sampled = self._as_sampled(history, tools, one_call)
                if sampled is not None:
                    return Known(None, ids, len(tokens.prompt), thoughts_of(sampled))
        except EngineError as error:  # the template refuses a part of the history: nobody has sampled on it
            log.debug("token fields not confirmed: %s", error)
        return Origin.CHANGED

    def _as_sampled(self, history: Sequence[Entry], tools: Tools, one_call: bool) -> list[Message] | None:
        """Return the assistant's turns as their token fields read, or ``None`` if these stand for another history.

        Checks the fields against the messages, from the last turn back to a prompt that was rendered whole.
        """
        read: list[Message] = []
        end = len(history) - 1
        while True:
            tokens = history[end].tokens
            if tokens is None:
                return None
            spoken = read_turn(self._codec, tokens.generation, tools)
            read.append((spoken.with_one_call() if one_call else spoken).as_message())
            if not same_turn(read[-1], history[end].message):
                return None
            before = next((n for n in reversed(range(end)) if history[n].sampled), None)
            earlier = None if before is None else history[before].tokens
            if before is not None and earlier is not None and before < end - 1:
                between = _messages(history[before + 1 : end])
                if [*self._closed(earlier.ids), *self._codec.delta(between, tools)] == tokens.prompt:
                    end = before
                    continue
            opening = _messages(history[:end])
            if self._codec.first_prompt(opening, tools) != tokens.prompt:
                return None
            return [*(message for message in opening if message.role == "assistant"), *reversed(read)]

    def _closed(self, ids: Sequence[int]) -> list[int]:
        """End the last turn, if its length limit or another end token cut it: the policy did not choose this one."""
        return [*ids] if ids[-1] in self._codec.closing_ids else [*ids, self._codec.terminator_id]

    def _rendered(self, entries: Sequence[Entry], tools: Tools, chain: tuple[bytes, ...], origin: Origin) -> Prompt:
        messages = _messages(entries)
        ids = self._codec.first_prompt(messages, tools)
        return Prompt(ids, origin, Conversation(messages, tools), chain, thoughts_of(messages))


def _messages(entries: Sequence[Entry]) -> list[Message]:
    return [entry.message for entry in entries]
