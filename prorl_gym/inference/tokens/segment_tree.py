"""The tokens of one rollout of a harness: a tree of segments, each of which only grows.

A harness sends its whole history with every call. The call is placed at the longest history that it extends: at the end
of a segment, which goes on, or anywhere else, where a branch begins with a cause. Nothing is recorded of a call before
its first tokens, so that a call that failed leaves nothing, and its repetition goes on where it would have.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from prorl_gym.inference.protocol import GenerationResult
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.harness_call import HarnessCall, Placement
from prorl_gym.inference.tokens.history_equality import (
    HistoryDigests,
    ThinkingChain,
    read_arguments,
    thinking_chain,
    thinking_matches,
)
from prorl_gym.inference.tokens.prompt_builder import Base, BuiltPrompt, PromptOrigin
from prorl_gym.inference.tokens.rewrites import ReadHistory, name_differences
from prorl_gym.inference.tokens.segment_cache import KnownTurn
from prorl_gym.inference.tokens.token_stream import TokenStream, common_length
from prorl_gym.inference.tokens.transcript import TurnPrompt, new_stream
from prorl_gym.records import BranchCause, Message, Segment, ToolCall
from prorl_gym.settings import ResolvedSettings
from prorl_gym.thoughts import split_thinking

_MIN_QUOTE = 16
"""Characters of a sampled text from which on finding it in a new conversation shows where that came from."""

_MAX_QUOTED = 64
"""Latest turns whose texts are looked for."""


@dataclass(slots=True, eq=False)
class _Segment:
    stream: TokenStream
    parent: "_Segment | None"
    shared_tokens: int
    cause: BranchCause
    is_side: bool
    agent: str
    rewrites: set[str] = field(default_factory=set[str])
    messages: list[Message] = field(default_factory=list[Message])
    """Its conversation: each message as it was when it was new."""
    own_messages: int = 0
    """Messages before the first turn that was sampled in it."""
    is_busy: bool = False
    """A turn is being sampled at its end."""
    _shown: Sequence[Message] = ()
    """The beginning of its conversation as a harness showed it last."""
    _differences: frozenset[str] = frozenset()
    """Names of its differences from that."""

    def name_differences(self, shown: Sequence[Message]) -> frozenset[str]:
        """Return under which names a beginning of its conversation differs from what a harness shows."""
        known = len(self._shown)
        if shown[:known] != self._shown:
            known, self._differences = 0, frozenset()
        self._differences |= name_differences(self.messages[known : len(shown)], shown[known:])
        self._shown = shown
        return self._differences


@dataclass(frozen=True, slots=True)
class _KnownTurn:
    """A turn's place in its segment."""

    segment: _Segment
    start: int
    end: int
    messages: int
    """Messages of the segment's conversation, this turn included."""
    thinking: ThinkingChain | None

    @property
    def is_free(self) -> bool:
        """Whether its segment ends in it, and nothing is being sampled there."""
        return self.end == len(self.segment.stream) and not self.segment.is_busy


@dataclass(frozen=True, slots=True)
class _Quote:
    """A text that was sampled, which a harness may put into another conversation."""

    text: str
    segment: _Segment
    is_argument: bool
    """From a tool call: a sub-agent's task; otherwise from a turn: a summary."""


class PlacedTurn:
    """A turn that is being sampled at its place in the tree."""

    def __init__(
        self, tree: "SegmentTree", segment: _Segment, prompt: BuiltPrompt, digests: HistoryDigests, placement: Placement
    ) -> None:
        self.placement = placement
        self._tree = tree
        self._digests = digests
        self._segment = segment
        self._prompt = prompt
        self._start: int | None = None
        """Where its sampled ids begin, once there are any."""

    def next_prompt(self) -> TurnPrompt:
        """Return what to send now; the ids as JSON only where that costs no more than what is new."""
        stream, conversation = self._segment.stream, self._prompt.conversation
        if self._start is not None:
            return TurnPrompt(stream.record_sent(), stream.sent_ids_json, conversation)
        ids = self._prompt.ids
        return TurnPrompt(ids, stream.extended_json(ids) if len(stream) else None, conversation)

    def append(self, result: GenerationResult, *, turn: int, seed: int | None) -> list[int]:
        if not result.token_ids:
            return []
        stream = self._segment.stream
        if self._start is None:
            known = len(stream) + stream.is_open  # the prompt holds the terminator that closes an open turn
            stream.append_unsampled(self._prompt.ids[known:])
            stream.record_sent()
            self._start = len(stream)
            self._tree.commit(self._segment, self._prompt, self._digests, self.placement)
        return stream.append_sampled(result, turn=turn, seed=seed)

    def finish(self, message: Message) -> None:
        """Let later histories extend the turn as the harness is answered, where it has tokens."""
        if self._start is not None:
            digest = self._digests.extend(self._prompt.digests[-1], message)
            self._tree.add_turn(self._segment, self._prompt, digest, self._start, message)

    def release(self) -> None:
        self._tree.release(self._segment, self._prompt, was_recorded=self._start is not None)


class SegmentTree:
    def __init__(self, codec: ChatCodec, settings: ResolvedSettings) -> None:
        self._codec = codec
        self._settings = settings
        self._segments: list[_Segment] = []
        """In the order of their first sampled tokens, so that a parent comes before its branches."""
        self._turns: dict[bytes, list[_KnownTurn]] = {}
        self._histories: dict[bytes, _Segment] = {}
        """The segment in which each beginning of each conversation was seen first, by its digest; no side call's where
        there is another."""
        self._asked: dict[bytes, list[_Segment]] = {}
        """By the digest of each prompt that is being sampled on, or was."""
        self._spoken: dict[bytes, list[Message]] = {}
        """Turns by the digest of their prompt."""
        self._tool_sets: dict[bytes, HistoryDigests] = {}
        self._quotes: list[_Quote] = []
        self._first: _Segment | None = None
        self._first_prompt: Sequence[int] = ()

    @property
    def tokens(self) -> int:
        return sum(len(segment.stream) for segment in self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def find_base(self, history: ReadHistory) -> Base | None:
        """Return the longest beginning of a history that ends in a turn of the tree, if there is one."""
        thinking = history.thinking
        for place in reversed(range(len(history.messages))):
            if history.messages[place].role == "assistant":
                assert thinking is not None
                if (turn := self._find_turn(history.digests[place], thinking)) is not None:
                    ids = turn.segment.stream.first_ids(turn.end)
                    return Base(place + 1, KnownTurn(None, ids, turn.start, turn.thinking), source=turn)
                thinking = thinking.previous
        return None

    def place(self, prompt: BuiltPrompt, history: ReadHistory, call: HarnessCall) -> PlacedTurn:
        """Place a call, whose prompt is built on ``find_base``. It needs one ``PlacedTurn.release`` at its end."""
        turn, rewrites = None if prompt.base is None else prompt.base.source, history.rewrites | prompt.rewrites
        assert turn is None or isinstance(turn, _KnownTurn)
        if turn is not None:
            rewrites |= turn.segment.name_differences(history.messages[: turn.messages])
        if turn is not None and turn.is_free and prompt.origin is PromptOrigin.EXTENDED:
            segment = turn.segment
            placement = Placement(None, len(segment.stream), tuple(sorted(rewrites)))
        else:
            cause, parent = self._find_cause(prompt, call, turn)
            if turn is not None and turn.segment is parent and prompt.origin is not PromptOrigin.TEMPLATE:
                shared = turn.end
            else:
                shared = 0 if parent is None else common_length(prompt.ids, parent.stream.first_ids(len(prompt.ids)))
            segment = _Segment(
                new_stream(self._codec, self._settings), parent, shared, cause, cause == "side_call", call.lineage.agent
            )
            placement = Placement(cause, shared, tuple(sorted(rewrites)))
            if cause == "first":
                self._first, self._first_prompt = segment, prompt.ids
        segment.is_busy = True
        self._asked.setdefault(prompt.digests[-1], []).append(segment)
        return PlacedTurn(self, segment, prompt, history.equality, placement)

    def commit(self, segment: _Segment, prompt: BuiltPrompt, digests: HistoryDigests, placement: Placement) -> None:
        segment.rewrites.update(placement.rewrites)
        known = len(segment.messages)
        segment.messages += prompt.conversation.messages[known:]
        if placement.cause is not None:
            self._segments.append(segment)
            segment.own_messages = len(segment.messages)
        self._tool_sets.setdefault(digests.of_tools, digests)
        for digest in prompt.digests[known:]:
            self._add_history(digest, segment)

    def add_turn(self, segment: _Segment, prompt: BuiltPrompt, digest: bytes, start: int, message: Message) -> None:
        """Add a turn that was sampled; ``start``: where its ids begin. See ``PlacedTurn.finish``."""
        segment.messages.append(message)
        thoughts = thinking_chain([message], prompt.thinking)
        known = _KnownTurn(segment, start, len(segment.stream), len(segment.messages), thoughts)
        self._turns.setdefault(digest, []).append(known)
        self._add_history(digest, segment)
        self._spoken.setdefault(prompt.digests[-1], []).append(message)
        self._quotes += [_Quote(text, segment, False) for text in [_text(message)] if len(text) >= _MIN_QUOTE]
        self._quotes += [_Quote(text, segment, True) for call in message.tool_calls for text in _long_arguments(call)]
        del self._quotes[:-_MAX_QUOTED]

    def release(self, segment: _Segment, prompt: BuiltPrompt, *, was_recorded: bool) -> None:
        segment.is_busy = False
        if not was_recorded:
            asked = self._asked[prompt.digests[-1]]
            asked.remove(segment)
            if not asked:
                del self._asked[prompt.digests[-1]]
            if self._first is segment and segment not in self._segments:
                self._first = None

    def export_segments(self) -> list[Segment]:
        """Return the segments so far; before anything was sampled, the first prompt. May be called at any time."""
        if not self._segments:
            unanswered = new_stream(self._codec, self._settings)
            unanswered.append_unsampled(self._first_prompt)
            return unanswered.export_segments()
        places = {id(segment): place for place, segment in enumerate(self._segments)}
        return [
            exported.model_copy(
                update={
                    "parent": None if segment.parent is None else places[id(segment.parent)],
                    "shared_tokens": segment.shared_tokens,
                    "cause": segment.cause,
                    "rewrites": tuple(sorted(segment.rewrites)),
                    "trained": not segment.is_side,
                }
            )
            for segment in self._segments
            for exported in segment.stream.export_segments()
        ]

    def conversation(self, index: int) -> tuple[list[Message], int]:
        """Return the messages of a segment, and how many of them came before the first turn sampled in it."""
        segment = self._segments[index]
        return [*segment.messages], segment.own_messages

    def _add_history(self, digest: bytes, segment: _Segment) -> None:
        known = self._histories.setdefault(digest, segment)
        if known.is_side and not segment.is_side:
            self._histories[digest] = segment

    def _find_turn(self, digest: bytes, thinking: ThinkingChain | None) -> _KnownTurn | None:
        """Return the turn that a history ends in: best one that can be extended, then the newest."""
        found = [turn for turn in self._turns.get(digest, ()) if thinking_matches(turn.thinking, thinking)]
        return max(reversed(found), key=lambda turn: turn.is_free, default=None)

    def _find_cause(
        self, prompt: BuiltPrompt, call: HarnessCall, turn: _KnownTurn | None
    ) -> tuple[BranchCause, _Segment | None]:
        """Return why a call begins a segment, and the segment that it branches from; docs/tokens.md has the rules."""
        base = None if turn is None else turn.segment
        messages, digests = prompt.conversation.messages, prompt.digests
        if call.kind == "side" and (base is None or base.is_side):  # what extends an agent's conversation is its own
            return "side_call", base or self._latest(call.lineage.agent)
        if self._first is None and base is None:
            return "first", None
        twins = (one for one in self._asked.get(digests[-1], ()) if one.agent == call.lineage.agent)
        if (twin := next(twins, None)) is not None:
            return "retry", base or twin.parent
        main_agent = "" if self._first is None else self._first.agent
        is_new = not any(segment.agent == call.lineage.agent for segment in self._segments)
        if is_new and (call.lineage.agent != main_agent or call.lineage.parent_agent):
            named = self._latest(call.lineage.parent_agent) if call.lineage.parent_agent else None
            task = self._find_quote(messages, is_argument=True, is_whole=True)
            source = self._latest(main_agent) if task is None else task.segment
            return "sub_agent", base or named or source
        if prompt.origin is PromptOrigin.TEMPLATE:
            return "template", base
        shared = next((place for place in reversed(range(len(digests))) if digests[place] in self._histories), -1)
        nearest = base or (None if shared < 0 else self._histories[digests[shared]])
        new = messages[shared + 1 :]
        # A beginning of a turn that was sampled on the history before it.
        spoken = self._spoken.get(digests[shared], ()) if shared >= 0 and new and new[0].role == "assistant" else ()
        if any(_begins_with(new[0], turn) for turn in spoken):
            return "cut_turn", nearest
        if (quote := self._find_quote(new, is_argument=False, is_whole=base is None)) is not None:
            source = self._latest(call.lineage.agent) if quote.segment.is_side else quote.segment
            return "summary", base or source
        if base is None and not any(message.role == "assistant" for message in messages):
            quote = self._find_quote(new, is_argument=True, is_whole=True)
            return ("conversation", None) if quote is None else ("sub_agent", quote.segment)
        if base is None and (other := self._find_with_other_tools(messages)) is not None:
            return "tools", other
        return "edit", nearest

    def _latest(self, agent: str) -> _Segment | None:
        """Return the segment of an agent's own conversation that began last."""
        own = (one for one in reversed(self._segments) if one.agent == agent and not one.is_side)
        return next(own, None)

    def _find_quote(self, messages: Sequence[Message], *, is_argument: bool, is_whole: bool) -> _Quote | None:
        """Return the latest sampled text that new messages hold.

        A turn of a side call counts wherever it is. Any other counts only in what a user says in messages that are the
        whole conversation: an edited history still has its own turns.
        """
        for quote in reversed(self._quotes):
            if quote.is_argument == is_argument and (quote.segment.is_side or is_whole):
                roles = ("user", "assistant") if quote.segment.is_side and not is_argument else ("user",)
                if any(message.role in roles and quote.text in message.content for message in messages):
                    return quote
        return None

    def _find_with_other_tools(self, messages: Sequence[Message]) -> _Segment | None:
        last = next(place for place in reversed(range(len(messages))) if messages[place].role == "assistant")
        for tool_set in self._tool_sets.values():
            digest = tool_set.of_history(messages[: last + 1])[-1]
            if (turn := self._find_turn(digest, thinking_chain(messages[: last + 1]))) is not None:
                return turn.segment
        return None


def _text(message: Message) -> str:
    return split_thinking(message.content)[1].strip()


def _long_arguments(call: ToolCall) -> Iterator[str]:
    value = read_arguments(call.arguments)[1]
    members = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    yield from (each.strip() for each in members.values() if isinstance(each, str) and len(each.strip()) >= _MIN_QUOTE)


def _begins_with(shown: Message, turn: Message) -> bool:
    """Whether a message is a beginning of a turn, in whole calls and in any part of its text."""
    calls = turn.tool_calls[: len(shown.tool_calls)], shown.tool_calls
    sampled, kept = (Message(role="assistant", content="", tool_calls=each) for each in calls)
    return _text(turn).startswith(_text(shown)) and HistoryDigests(()).is_same_turn(sampled, kept)
