"""What an agent loop needs: a policy that answers messages, and tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from prorl_gym.records import Message, ToolCall


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the chat template shows it to the model."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments (an object)."""

    def as_function(self) -> dict[str, Any]:
        """Return the form that chat templates and OpenAI-style APIs expect."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


@dataclass(frozen=True, slots=True)
class Observation:
    """What a tool answered."""

    text: str
    """Shown to the model."""
    answer: str | None = None
    """Set by ``finish``: ends the rollout with this answer."""


class Tool(Protocol):
    """A tool. Bad arguments and failing commands are observations; only a lost sandbox raises."""

    @property
    def spec(self) -> ToolSpec:
        """How the model sees it."""
        ...

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        """Run it. Cancelling the await kills what it started.

        Raises:
            SandboxError: the sandbox is lost or could not be started.
        """
        ...


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """One answer of the policy, parsed. The tokens are kept by the policy; this is what the loop acts upon."""

    text: str
    """Decoded text without the tool-call blocks and without the terminator."""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    """One complaint per call block that could not be parsed, worded for the model."""
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    written: str = ""
    """The text as sampled, where a call in it could not be parsed: ``text`` is without it."""


class Policy(Protocol):
    """The model, as the loop sees it: messages in, parsed turns out; every token is recorded behind it."""

    async def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        """Render and send the first prompt.

        Raises:
            LimitReached: turns or tokens.
            EngineError: no engine could answer.
        """
        ...

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        """Append new messages (tool results, a user turn) and sample the next turn. Raises as ``start``."""
        ...


@dataclass(slots=True)
class Artifacts:
    """What the agent left behind for grading."""

    answer: str | None = None
    """The argument of ``finish``, or the last assistant text when the agent simply stopped."""
    messages: list[Message] = field(default_factory=list[Message])
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Files taken out of the agent's sandbox (a patch, a solution)."""
