"""The ``think`` tool: a place to reason in that changes nothing."""

from collections.abc import Mapping
from typing import Any

from prorl_gym.agents.protocol import Observation, ToolSpec

_SPEC = ToolSpec(
    name="think",
    description="Write down a thought: a plan, a cause, what to check next. Nothing is run and nothing is changed.",
    parameters={
        "type": "object",
        "properties": {"thought": {"type": "string", "description": "The thought."}},
        "required": ["thought"],
    },
)


class ThinkTool:
    """Takes note of a thought, which stays in the conversation."""

    spec = _SPEC

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        """Answer shortly."""
        return Observation("Noted.")
