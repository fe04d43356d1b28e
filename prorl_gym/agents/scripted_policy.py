"""A scripted policy for tests and ``validate``: literal turns, or steps whose text depends on the last tool result."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from prorl_gym.agents.protocol import AssistantTurn, ToolSpec
from prorl_gym.errors import Limit, LimitReached
from prorl_gym.records import Message, ToolCall

OBSERVATION_PLACEHOLDER = "{observation}"
"""In a step: replaced by the text of the last tool result."""


class ScriptStep(Protocol):
    """One scripted turn; ``prorl_gym.environments.protocol.ScriptedStep`` is one."""

    @property
    def text(self) -> str:
        """Text of the turn."""
        ...

    @property
    def tool(self) -> str | None:
        """Tool it calls, if any."""
        ...

    @property
    def arguments(self) -> Mapping[str, Any] | None:
        """Arguments of the call."""
        ...


def fill_observation(value: Any, observation: str) -> Any:
    """Replace ``{observation}`` in a string, or in the strings of a mapping, with the last tool result, stripped."""
    if isinstance(value, str):
        return value.replace(OBSERVATION_PLACEHOLDER, observation.strip())
    if isinstance(value, Mapping):
        items: Mapping[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return {key: fill_observation(item, observation) for key, item in items.items()}
    return value


def turn_from_step(step: ScriptStep, observation: str, call_id: str) -> AssistantTurn:
    """Return the turn of a step, given the last tool result."""
    text = fill_observation(step.text, observation)
    if step.tool is None:
        return AssistantTurn(text)
    arguments = json.dumps(fill_observation(step.arguments or {}, observation), ensure_ascii=False)
    return AssistantTurn(text, (ToolCall(id=call_id, name=step.tool, arguments=arguments),))


class ScriptedPolicy:
    """Plays a script, then gives an empty turn, which ends the rollout.

    Args:
        script: steps or literal turns, in order.
        max_turns: raises ``LimitReached(TURNS)`` instead of a further turn.
    """

    def __init__(self, script: Sequence[ScriptStep | AssistantTurn], max_turns: int | None = None) -> None:
        self._script = list(script)
        self._max_turns = max_turns
        self.received: list[Message] = []
        """Every message that was given to the policy, in order."""
        self.tools: list[ToolSpec] = []
        self.turn_count = 0

    async def start_conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        """See ``Policy.start_conversation``."""
        self.tools = list(tools)
        return self._next(messages)

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        """See ``Policy.respond``."""
        return self._next(messages)

    def _next(self, messages: Sequence[Message]) -> AssistantTurn:
        self.received.extend(messages)
        if self.turn_count == self._max_turns:
            raise LimitReached(Limit.TURNS)
        step = self._script[self.turn_count] if self.turn_count < len(self._script) else AssistantTurn("")
        self.turn_count += 1
        if isinstance(step, AssistantTurn):
            return step
        seen = [message.content for message in self.received if message.role == "tool"]
        return turn_from_step(step, seen[-1] if seen else "", f"call_{self.turn_count}")
