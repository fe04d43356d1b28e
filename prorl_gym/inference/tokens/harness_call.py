"""One model call of a harness, and the answer to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prorl_gym.inference.tokens.chat_codec import Tools
from prorl_gym.inference.tokens.prompt_builder import BuiltPrompt, HistoryEntry
from prorl_gym.inference.tokens.turn import ParsedTurn, SampledTurn
from prorl_gym.records import BranchCause

CallKind = Literal["main", "side"]
"""``side``: titles, summaries, classifiers."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which agent of a harness makes a call, as its headers say. Hints: no history is found by them."""

    agent: str = ""
    """Id of the agent; empty: the main one, or not said."""
    parent_agent: str = ""
    """Id of the agent that started it."""


@dataclass(frozen=True, slots=True)
class HarnessCall:
    entries: Sequence[HistoryEntry]
    """The whole history, never empty, as the wire read it."""
    tools: Tools
    max_tokens: int | None = None
    """Requested by the harness; the rollout's own limits hold too."""
    may_call_tools: bool = True
    """Whether tool calls are parsed at all."""
    single_tool_call: bool = False
    """Only the first tool call of a turn is returned."""
    lineage: Lineage = Lineage()
    kind: CallKind = "main"
    """Side calls are not trained by default."""


@dataclass(frozen=True, slots=True)
class Placement:
    cause: BranchCause | None
    """Why it begins a segment; ``None``: it continues one."""
    shared_tokens: int
    """Leading tokens of the prompt that were in the tree before."""
    rewrites: tuple[str, ...] = ()
    """Declared rewrites and normalisations that the history needed to be the same as what was sampled."""


@dataclass(frozen=True, slots=True)
class HarnessTurn:
    prompt: BuiltPrompt
    sampled: SampledTurn
    parsed: ParsedTurn
    placement: Placement
