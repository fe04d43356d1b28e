"""What an agent loop needs: a policy that answers messages, and tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prorl_gym.inference.protocol import AssistantTurn
from prorl_gym.records import GradedSubmission, Message


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
    """The result of a tool."""

    text: str
    """Shown to the model."""
    answer: str | None = None
    """Set by ``finish``: ends the rollout with this answer."""


class Tool(Protocol):
    """A tool. Bad arguments and failing commands are observations; only a lost sandbox raises."""

    @property
    def spec(self) -> ToolSpec:
        """Name, description and arguments, as in the prompt."""
        ...

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        """Run it. Cancelling the await kills what it started.

        Raises:
            SandboxError: the sandbox is lost or could not be started.
        """
        ...


class Policy(Protocol):
    """The model behind the agent loop: messages in, parsed turns out; an implementation records every token."""

    async def start_conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        """Render and send the first prompt.

        Raises:
            LimitReached: turns or tokens.
            EngineError: no engine could answer.
        """
        ...

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        """Append new messages (tool results, a user turn) and sample. Raises as ``start_conversation``."""
        ...


@dataclass(slots=True)
class Artifacts:
    """What the agent leaves for grading."""

    answer: str | None = None
    """The argument of ``finish``, or the last assistant text when the agent simply stopped."""
    messages: list[Message] = field(default_factory=list[Message])
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Files taken out of the agent's sandbox (a patch, a solution)."""
    submission: GradedSubmission | None = None
    """What is graded, for the record. Set by ``evaluate`` before it grades; ``None``: the answer."""
