"""What programs tell of a call beside its conversation: side calls by their words, sub-agents by their headers.

A program calls the model for its own purposes too: a title, a summary, a classification. These are no turns of the
agent, so by default they are not trained. Each is known by words that its program writes, in a call without tools.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prorl_gym.inference.tokens.harness_call import CallKind, Lineage
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry


@dataclass(frozen=True, slots=True)
class SideCall:
    """A kind of side call."""

    program: str
    purpose: str
    words: str
    """In its system messages, or in its last message, whatever the case."""


@dataclass(frozen=True, slots=True)
class LineageHeaders:
    """Headers in which a program names the agent that makes a call."""

    program: str
    agent: str
    parent: str
    only_with_parent: bool = False
    """The main agent is named too, but has no parent."""


SIDE_CALLS: tuple[SideCall, ...] = (
    SideCall("Claude Code", "title", "analyze if this message indicates a new conversation topic"),
    SideCall("Claude Code", "title", "sentence-case title"),
    SideCall("Claude Code", "title", "summarize this coding conversation in under 50 characters"),
    SideCall("Claude Code", "summary", "create a detailed summary of the conversation so far"),
    SideCall("Claude Code", "classifier", "extract any file paths that this command reads or modifies"),
    SideCall("Claude Code", "classifier", "your task is to process bash commands that an ai coding agent wants to run"),
    SideCall("Codex", "summary", "context checkpoint compaction"),
    SideCall("OpenCode", "title", "you are a title generator"),
    SideCall("OpenCode", "summary", "context summarization agent"),
    SideCall("OpenHands", "summary", "context-aware state summary"),
    SideCall("OpenHands", "title", "generates concise, descriptive titles"),
    SideCall("Qwen Code", "summary", "summarizes internal chat history into a given structure"),
    SideCall("Qwen Code", "classifier", "*only* the content and structure of your immediately preceding response"),
)

LINEAGE_HEADERS: tuple[LineageHeaders, ...] = (
    LineageHeaders("Claude Code", "x-claude-code-agent-id", "x-claude-code-parent-agent-id"),
    LineageHeaders("OpenCode", "x-session-id", "x-parent-session-id", only_with_parent=True),
)

_MAX_SEARCHED = 32 << 10
"""Characters of a message that are searched: the words stand at its beginning or end."""

_MAX_ID = 128


def kind_of(entries: Sequence[HistoryEntry], *, has_tools: bool) -> CallKind:
    """Return whether a call is a side call of a known program."""
    if has_tools:
        return "main"
    system = [entry.message.content for entry in entries if entry.message.role == "system"]
    shown = (*system, entries[-1].message.content)
    texts = [f"{text[:_MAX_SEARCHED]}\n{text[-_MAX_SEARCHED:]}".lower() for text in shown]
    return "side" if any(call.words in text for text in texts for call in SIDE_CALLS) else "main"


def lineage_of(headers: Mapping[str, str]) -> Lineage:
    """Return which agent makes a call, as far as its headers say."""
    for known in LINEAGE_HEADERS:
        agent, parent = headers.get(known.agent, ""), headers.get(known.parent, "")
        if agent and (parent or not known.only_with_parent):
            return Lineage(agent[:_MAX_ID], parent[:_MAX_ID])
    return Lineage()
