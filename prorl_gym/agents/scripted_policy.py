"""A scripted policy for tests and ``validate``: literal turns, or steps whose text depends on the last tool result."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prorl_gym.agents.protocol import AssistantTurn, ToolSpec
from prorl_gym.errors import Limit, LimitReached
from prorl_gym.records import Message, ToolCall


@dataclass(frozen=True, slots=True)
class ScriptedStep:
    """One turn of a gold trajectory.

    ``{observation}`` in ``text`` and ``arguments`` is replaced with the text of the last tool result, so that the gold
    answer really depends on it.
    """

    text: str = ""
    tool: str | None = None
    arguments: Mapping[str, Any] | None = None


def fill_observation(value: Any, observation: str) -> Any:
    """Replace ``{observation}`` in a string, or in the strings of a mapping, with the last tool result, stripped."""
    if isinstance(value, str):
        return value.replace("{observation}", observation.strip())
    if isinstance(value, Mapping):
        items: Mapping[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return {key: fill_observation(item, observation) for key, item in items.items()}
    return value


class ScriptedPolicy:
    """Plays a script, then gives an empty turn, which ends the rollout; ``LimitReached`` after ``max_turns``."""

    def __init__(self, script: Sequence[ScriptedStep | AssistantTurn], max_turns: int | None = None) -> None:
        self._script = list(script)
        self._max_turns = max_turns
        self.received: list[Message] = []
        """Every message that was given to the policy, in order."""
        self.tools: list[ToolSpec] = []
        self.turn_count = 0

    async def start_conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> AssistantTurn:
        self.tools = list(tools)
        return await self.respond(messages)

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        self.received.extend(messages)
        if self.turn_count == self._max_turns:
            raise LimitReached(Limit.TURNS)
        step = self._script[self.turn_count] if self.turn_count < len(self._script) else AssistantTurn("")
        self.turn_count += 1
        if isinstance(step, AssistantTurn):
            return step
        observed = next((message.content for message in reversed(self.received) if message.role == "tool"), "")
        text = fill_observation(step.text, observed)
        if step.tool is None:
            return AssistantTurn(text)
        arguments = json.dumps(fill_observation(step.arguments or {}, observed), ensure_ascii=False)
        return AssistantTurn(text, (ToolCall(id=f"call_{self.turn_count}", name=step.tool, arguments=arguments),))
