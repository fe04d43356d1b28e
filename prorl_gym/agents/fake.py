"""A scripted policy for tests and ``validate``: literal turns, or steps whose text depends on the last tool result."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from prorl_gym.agents.protocol import AssistantTurn, ToolSpec
from prorl_gym.errors import Limit, LimitReached
from prorl_gym.records import Message, ToolCall

OBSERVATION = "{observation}"
"""Stands in a step for the text of the last tool result."""


class Step(Protocol):
    """One scripted turn; ``prorl_gym.environments.protocol.GoldStep`` is one."""

    @property
    def text(self) -> str:
        """What the model says."""
        ...

    @property
    def tool(self) -> str | None:
        """Tool it calls, if any."""
        ...

    @property
    def arguments(self) -> Mapping[str, Any] | None:
        """Arguments of the call."""
        ...


def fill(value: Any, observation: str) -> Any:
    """Replace ``{observation}`` in a string, or in the strings of a mapping, with the last tool result, stripped."""
    if isinstance(value, str):
        return value.replace(OBSERVATION, observation.strip())
    if isinstance(value, Mapping):
        items: Mapping[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return {key: fill(item, observation) for key, item in items.items()}
    return value


def as_turn(step: Step, observation: str, call_id: str) -> AssistantTurn:
    """Return the turn that a step stands for, given the last tool result."""
    text = fill(step.text, observation)
    if step.tool is None:
        return AssistantTurn(text)
    arguments = json.dumps(fill(step.arguments or {}, observation), ensure_ascii=False)
    return AssistantTurn(text, (ToolCall(id=call_id, name=step.tool, arguments=arguments),))


class ScriptedPolicy:
    """Plays a script, then says nothing, which ends the rollout.

    Args:
        script: steps or literal turns, in order.
        max_turns: raises ``LimitReached(TURNS)`` instead of a further turn.
    """

    def __init__(self, script: Sequence[Step | AssistantTurn], max_turns: int | None = None) -> None:
        self._script = list(script)
        self._max_turns = max_turns
        self.received: list[Message] = []
        """Every message that was given to the policy, in order."""
        self.tools: list[ToolSpec] = []
        self.turns = 0

    async def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        """See ``Policy.start``."""
        self.tools = list(tools)
        return self._next(messages)

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        """See ``Policy.respond``."""
        return self._next(messages)

    def _next(self, messages: Sequence[Message]) -> AssistantTurn:
        self.received.extend(messages)
        if self.turns == self._max_turns:
            raise LimitReached(Limit.TURNS)
        step = self._script[self.turns] if self.turns < len(self._script) else AssistantTurn("")
        self.turns += 1
        if isinstance(step, AssistantTurn):
            return step
        seen = [message.content for message in self.received if message.role == "tool"]
        return as_turn(step, seen[-1] if seen else "", f"call_{self.turns}")
