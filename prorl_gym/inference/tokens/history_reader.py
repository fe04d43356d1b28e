"""Histories as the tree of segments compares them.

A harness sends its whole history with every call: each message is restored and digested once, in the first call that
has it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from prorl_gym.inference.tokens.chat_codec import Tools
from prorl_gym.inference.tokens.history_equality import HistoryDigests, ThinkingChain, thinking_chain
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry
from prorl_gym.inference.tokens.rewrites import CallRestorer, stable_text
from prorl_gym.records import Message, ToolCall

_MAX_RECENT = 8
"""Histories kept: those of agents that call in turns."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadHistory:
    """A history."""

    equality: HistoryDigests
    """Of conversations with its tools."""
    entries: Sequence[HistoryEntry] = ()
    """As they were sent."""
    messages: Sequence[Message] = ()
    """As the policy is to see them."""
    digests: tuple[bytes, ...] = ()
    """One per message."""
    thinking: ThinkingChain | None = None
    rewrites: frozenset[str] = frozenset()
    """Names of what was restored."""


class HistoryReader:
    """Reads the histories of one rollout."""

    def __init__(self) -> None:
        self._restorer = CallRestorer()
        self._recent: deque[ReadHistory] = deque(maxlen=_MAX_RECENT)

    def add_calls(self, calls: Sequence[ToolCall]) -> None:
        """Remember the calls of a turn as they were answered."""
        self._restorer.add_calls(calls)

    def read(self, entries: Sequence[HistoryEntry], tools: Tools) -> ReadHistory:
        """Return a history; of one that continues a recent one, only what is new is read."""
        entries, equality = list(entries), HistoryDigests(tools, stable_text)
        recent = (one for one in self._recent if one.equality.of_tools == equality.of_tools)
        continued = (one for one in recent if entries[: len(one.entries)] == one.entries)
        known = max(continued, key=lambda one: len(one.entries), default=None)
        if known is None:
            known = ReadHistory(equality)
        else:
            self._recent.remove(known)
        new, names = self._restorer.restore([entry.message for entry in entries[len(known.entries) :]])
        messages = [*known.messages, *new]
        digests = equality.of_history(messages, known.digests)
        thinking = thinking_chain(new, known.thinking)
        read = ReadHistory(equality, entries, messages, digests, thinking, known.rewrites | names)
        self._recent.append(read)
        return read
