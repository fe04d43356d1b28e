"""An agent's task and artifacts, and the protocols of the loop: a policy that answers messages, and tools."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prorl_gym.inference.protocol import AssistantTurn
from prorl_gym.records import GradedSubmission, Message
from prorl_gym.sandbox.protocol import Sandbox


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the chat template shows it to the model."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments (an object)."""

    def as_function(self) -> dict[str, Any]:
        """Return the form that chat templates and OpenAI-style APIs expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def arguments_schema(properties: Mapping[str, Mapping[str, Any]], *required: str) -> Mapping[str, Any]:
    """Return the ``parameters`` of a ``ToolSpec`` with these properties."""
    return {"type": "object", "properties": properties, "required": list(required)}


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
    def spec(self) -> ToolSpec: ...

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        """Run it; cancelling kills what it started. Raises ``SandboxError``: the sandbox is lost or did not start."""
        ...


class Policy(Protocol):
    """The model behind the agent loop: messages in, parsed turns out; an implementation records every token."""

    async def start_conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        """Render and send the first prompt, or later one that takes the place of the whole conversation.

        Raises ``LimitReached`` (turns or tokens), ``EngineError`` (no engine could answer).
        """
        ...

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        """Append new messages (tool results, a user turn) and sample. Raises as ``start_conversation``."""
        ...


@dataclass(slots=True)
class Artifacts:
    """The agent's results, for grading."""

    answer: str | None = None
    """The argument of ``finish``, or the last assistant text when the agent simply stopped."""
    messages: list[Message] = field(default_factory=list[Message])
    prompt_messages: int | None = None
    """How many of ``messages`` are the first prompt of an agent that brings its own; ``None``: the episode's are."""
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Files taken out of the agent's sandbox (a patch, a solution)."""
    log: str = ""
    """End of what an agent program printed; for people."""
    submission: GradedSubmission | None = None
    """The graded text or files, for the record. Set by ``evaluate`` before it grades; ``None``: the answer."""


@dataclass(frozen=True, slots=True)
class Episode:
    """The task of an agent, which an environment's ``init`` returns: the first prompt and the tools.

    The prompt must be token-identical for every replica of a group: no paths, dates, ports or random ids in it.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    sandbox: Callable[[], Awaitable[Sandbox]] | None = None
    """Leases the sandbox that the tools work in: where an agent program runs."""
    setup: str = ""
    """Bash commands that an agent program's environment comes from, such as the activation of an interpreter."""


class Agent(Protocol):
    """An agent in place of the built-in loop."""

    async def run(self, task: Episode, artifacts: Artifacts) -> None:
        """Work on a task; fill ``artifacts``, also when it ends by an exception or is cancelled.

        Raises ``LimitReached`` (turns, tokens or time), ``RolloutError`` (an engine, the sandbox or the agent failed).
        """
        ...
