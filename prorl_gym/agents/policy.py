"""The policy of a real rollout: a model session behind the interface that the loop speaks."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from prorl_gym.agents.protocol import AssistantTurn, ToolSpec
from prorl_gym.records import Message, ToolCall


class SessionTurn(Protocol):
    """One parsed answer of a model session."""

    @property
    def text(self) -> str:
        """Decoded text without the tool-call blocks."""
        ...

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls that could be parsed."""
        ...

    @property
    def malformed(self) -> tuple[str, ...]:
        """Complaints about those that could not."""
        ...

    @property
    def written(self) -> str:
        """The text as sampled, where a call could not be parsed."""
        ...

    @property
    def finish_reason(self) -> Literal["stop", "length", "abort"]:
        """Why the engine stopped."""
        ...


class TurnSession(Protocol):
    """What this policy needs of ``prorl_gym.inference.session.ModelSession``."""

    async def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> SessionTurn:
        """Send the first prompt."""
        ...

    async def respond(self, messages: Sequence[Message]) -> SessionTurn:
        """Append messages and sample the next turn."""
        ...


class ModelPolicy:
    """Implements ``prorl_gym.agents.protocol.Policy`` on a model session, which keeps every token.

    Args:
        session: the model session of this rollout.
    """

    def __init__(self, session: TurnSession) -> None:
        self._session = session

    async def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        """See ``Policy.start``."""
        return _as_turn(await self._session.start(messages, [tool.as_function() for tool in tools]))

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        """See ``Policy.respond``."""
        return _as_turn(await self._session.respond(messages))


def _as_turn(answer: SessionTurn) -> AssistantTurn:
    return AssistantTurn(answer.text, answer.tool_calls, answer.malformed, answer.finish_reason, answer.written)
