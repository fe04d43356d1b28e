"""The policy of a real rollout: a model session that takes the loop's tools."""

from collections.abc import Sequence

from prorl_gym.agents.protocol import ToolSpec
from prorl_gym.inference.protocol import AssistantTurn
from prorl_gym.inference.tokens.model_session import ModelSession
from prorl_gym.records import Message


class ModelPolicy:
    """Implements ``Policy`` on a model session, which records every token.

    Args:
        session: the model session of this rollout.
    """

    def __init__(self, session: ModelSession) -> None:
        self._session = session

    async def start_conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        """See ``Policy.start_conversation``."""
        return await self._session.start_conversation(messages, [tool.as_function() for tool in tools])

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        """See ``Policy.respond``."""
        return await self._session.respond(messages)
