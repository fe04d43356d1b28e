"""The bridge from a model session to the loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prorl_gym.agents.model_policy import ModelPolicy
from prorl_gym.agents.protocol import AssistantTurn
from prorl_gym.agents.tools import FinishTool
from prorl_gym.records import Message, ToolCall


@dataclass
class Session:
    """Answers and remembers."""

    answer: AssistantTurn
    asked: list[Any]

    async def start_conversation(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> AssistantTurn:
        self.asked.append((messages, tools))
        return self.answer

    async def respond(self, messages: Sequence[Message]) -> AssistantTurn:
        self.asked.append(messages)
        return self.answer


async def test_tools_travel_as_functions_and_turns_come_back():
    made = (ToolCall(id="1", name="finish", arguments="{}"),)
    session = Session(AssistantTurn("hm", made, ("bad",), "length", "hm <tool_call>"), [])
    policy, prompt = ModelPolicy(session), [Message(role="user", content="hi")]
    assert await policy.start_conversation(prompt, [FinishTool().spec]) == AssistantTurn(
        "hm", made, ("bad",), "length", "hm <tool_call>"
    )
    assert await policy.respond(prompt) == AssistantTurn("hm", made, ("bad",), "length", "hm <tool_call>")
    assert session.asked[0][1][0]["function"]["name"] == "finish"
    assert session.asked[1] == prompt
