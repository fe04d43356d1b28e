"""Changes that harnesses make to their own history, and what of it still counts as the same: declared as tables.

A harness sends back what it was answered, but not always in the same words. A change that a table here names does not
make another conversation: the ids that were sampled stay, and the segment records the name. Any other change begins a
segment. docs/tokens.md shows the tables.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prorl_gym.inference.strict_json import as_mapping
from prorl_gym.inference.tokens.chat_codec import Tools
from prorl_gym.inference.tokens.history_equality import HistoryDigests, ThinkingChain, read_arguments, thinking_chain
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry
from prorl_gym.records import Message, ToolCall
from prorl_gym.thoughts import split_thinking

_MAX_RECENT = 8
"""Histories kept: those of agents that call in turns."""

_DATE = (
    r"(?:\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)?(?:Z|[+-]\d\d:?\d\d)?"
    r"|(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day,? )?[A-Z][a-z]{2,8}\.? \d{1,2},? \d{4}"
    r"|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? [A-Z][a-z]{2} \d{1,2}(?: \d\d:\d\d:\d\d)?(?: [A-Z]{3,4})? \d{4})"
)


@dataclass(frozen=True, slots=True)
class VolatileText:
    """Text of a harness that changes although the conversation does not."""

    name: str
    what: str
    roles: frozenset[str]
    where: Literal["prompt", "comparison"]
    """``prompt``: the policy never sees it; ``comparison``: it sees it as it was when it was new."""
    pattern: re.Pattern[str] | None = None
    """Matching text is left out, but for its first group."""
    block: tuple[str, str] | None = None
    """Text between these two marks is left out, with the marks and the blanks around it."""

    def strip(self, text: str) -> str:
        """Return a text without it. Linear in the text."""
        if self.pattern is not None:
            return self.pattern.sub(lambda found: found[1] if found.re.groups else "", text)
        assert self.block is not None
        opening, closing = self.block
        parts: list[str] = []
        position = 0
        while (start := text.find(opening, position)) >= 0 and (end := text.find(closing, start)) >= 0:
            parts.append(text[position:start].rstrip())
            position = end + len(closing)
        return "".join([*parts, text[position:]]).rstrip() if parts else text


@dataclass(frozen=True, slots=True)
class CallRewrite:
    """A call that comes back changed, known by the id that we gave it."""

    name: str
    what: str
    shown_name: str | None = None
    """Name that the harness gives it."""
    kept_name_key: str | None = None
    """Argument that holds the sampled name then."""
    raw_key: tuple[str, ...] = ()
    """Argument, and key in it, that hold the sampled arguments as text."""
    needs_broken_json: bool = False
    """Only for sampled arguments that are not JSON."""

    def applies(self, sampled: ToolCall, shown: ToolCall) -> bool:
        """Whether a call is shown as it was sampled, but for this rewrite."""
        if shown.name != (self.shown_name or sampled.name):
            return False
        if self.needs_broken_json and read_arguments(sampled.arguments)[0] == "value":
            return False
        members = as_mapping(read_arguments(shown.arguments)[1])
        if self.kept_name_key is not None and members.get(self.kept_name_key) != sampled.name:
            return False
        held: object = members
        for key in self.raw_key:
            held = as_mapping(held).get(key)
        return not self.raw_key or held == sampled.arguments


VOLATILE_TEXT = (
    VolatileText(
        "billing_header",
        "Claude Code's first system text: a version with a suffix of its own for each agent",
        frozenset({"system"}),
        "prompt",
        pattern=re.compile(r"^x-anthropic-billing-header:[^\n]*\n?", re.MULTILINE),
    ),
    VolatileText(
        "date",
        "a date or a time after words that announce one (all but mini-swe-agent)",
        frozenset({"system", "user"}),
        "comparison",
        pattern=re.compile(
            r"((?:\b[Tt]oday(?:'s date)?|\b[Cc]urrent[ _](?:date|time|datetime)(?: and time)?)"
            r"(?: is)?[:>]? {0,4})" + _DATE
        ),
    ),
    VolatileText(
        "system_reminder",
        "Claude Code's and Qwen Code's notes inside of messages, which come and go",
        frozenset({"system", "user", "tool"}),
        "comparison",
        block=("<system-reminder>", "</system-reminder>"),
    ),
)

CALL_REWRITES = (
    CallRewrite(
        "invalid_call",
        "OpenCode: a call that it cannot make becomes a call of its tool 'invalid'",
        shown_name="invalid",
        kept_name_key="tool",
    ),
    CallRewrite(
        "unparsed_input", "Claude Code: arguments that are not JSON are wrapped", raw_key=("__unparsedToolInput", "raw")
    ),
    CallRewrite("custom_input", "arguments of a custom tool that are not its one text", raw_key=("input",)),
    CallRewrite(
        "repaired_arguments", "Qwen Code: arguments that are not JSON are replaced by a repair", needs_broken_json=True
    ),
)

EQUAL_FORMS = {
    "default_arguments": "arguments that have their schema's default, added or left out",
    "reserialized_arguments": "order of keys, blanks and escapes in arguments",
    "trimmed_text": "blanks around the text of a turn",
    "dropped_thinking": "thoughts left out",
    "call_ids": "other ids of calls",
}
"""Differences that ``history_equality`` ignores; recorded where it was needed."""


def stable_text(role: str, text: str) -> str:
    """Return what of a text is compared: it without what is volatile."""
    for rule in VOLATILE_TEXT:
        if role in rule.roles:
            text = rule.strip(text)
    return text


@dataclass(frozen=True, slots=True, eq=False)
class ReadHistory:
    """A history as the tree of segments compares it."""

    equality: HistoryDigests
    entries: Sequence[HistoryEntry] = ()
    """As they were sent."""
    messages: Sequence[Message] = ()
    """As the policy is to see them."""
    digests: tuple[bytes, ...] = ()
    thinking: ThinkingChain | None = None
    rewrites: frozenset[str] = frozenset()
    """Names of what was restored."""


class HistoryReader:
    """Reads the histories of one rollout, and undoes what its harness does to them, as far as the tables say.

    A harness sends its whole history with every call: each message is restored and digested once, in the first call
    that has it.
    """

    def __init__(self) -> None:
        self._sampled_calls: dict[str, ToolCall] = {}
        self._recent: deque[ReadHistory] = deque(maxlen=_MAX_RECENT)

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
        new, names = self.restore([entry.message for entry in entries[len(known.entries) :]])
        messages = [*known.messages, *new]
        digests = equality.of_history(messages, known.digests)
        thinking = thinking_chain(new, known.thinking)
        read = ReadHistory(equality, entries, messages, digests, thinking, known.rewrites | names)
        self._recent.append(read)
        return read

    def add_calls(self, calls: Sequence[ToolCall]) -> None:
        self._sampled_calls.update((call.id, call) for call in calls)

    def restore(self, messages: Sequence[Message]) -> tuple[list[Message], frozenset[str]]:
        """Return the messages as the policy is to see them, and the names of what was applied."""
        restored: list[Message] = []
        names: set[str] = set()
        for message in messages:
            for rule in VOLATILE_TEXT:
                if rule.where == "prompt" and message.role in rule.roles:
                    text = rule.strip(message.content)
                    if text != message.content:
                        message = message.model_copy(update={"content": text})
                        names.add(rule.name)
            if message.tool_calls and self._sampled_calls:
                calls = tuple(self._restore_call(call, names) for call in message.tool_calls)
                if calls != message.tool_calls:
                    message = message.model_copy(update={"tool_calls": calls})
            restored.append(message)
        return restored, frozenset(names)

    def _restore_call(self, shown: ToolCall, names: set[str]) -> ToolCall:
        sampled = self._sampled_calls.get(shown.id)
        if sampled is None or (sampled.name == shown.name and sampled.arguments == shown.arguments):
            return shown
        rule = next((rule for rule in CALL_REWRITES if rule.applies(sampled, shown)), None)
        if rule is None:
            return shown
        names.add(rule.name)
        return sampled


def name_differences(known: Sequence[Message], shown: Sequence[Message]) -> frozenset[str]:
    """Return under which names two histories that count as the same differ."""
    return frozenset(
        name
        for one, other in zip(known, shown, strict=True)
        if one is not other and (one.content != other.content or one.tool_calls != other.tool_calls)
        for name in (_turn_differences if one.role == "assistant" else _text_differences)(one, other)
    )


def _turn_differences(sampled: Message, shown: Message) -> Iterator[str]:
    (thoughts, text), (shown_thoughts, shown_text) = split_thinking(sampled.content), split_thinking(shown.content)
    if thoughts and not shown_thoughts:
        yield "dropped_thinking"
    if shown_text not in (text, text.strip() if thoughts else text):
        yield "trimmed_text"
    for call, shown_call in zip(sampled.tool_calls, shown.tool_calls, strict=True):
        if call.id != shown_call.id:
            yield "call_ids"
        if call.arguments != shown_call.arguments:
            same = read_arguments(call.arguments) == read_arguments(shown_call.arguments)
            yield "reserialized_arguments" if same else "default_arguments"


def _text_differences(known: Message, shown: Message) -> Iterator[str]:
    text, shown_text = known.content, shown.content
    for rule in VOLATILE_TEXT:
        if known.role in rule.roles and text != shown_text:
            stripped, shown_stripped = rule.strip(text), rule.strip(shown_text)
            if (stripped, shown_stripped) != (text, shown_text):
                yield rule.name
            text, shown_text = stripped, shown_stripped
