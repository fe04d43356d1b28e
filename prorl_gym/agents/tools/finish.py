"""The ``finish`` tool: hand in an answer and end."""

from collections.abc import Mapping
from typing import Any

from prorl_gym.agents.protocol import Observation, ToolSpec


class FinishTool:
    """Ends the rollout with an answer.

    Args:
        description: what the answer of this task is, for the model.
    """

    def __init__(self, description: str = "Hand in your final answer and end.") -> None:
        self._spec = ToolSpec(
            name="finish",
            description=description,
            parameters={
                "type": "object",
                "properties": {"answer": {"type": "string", "description": "The final answer."}},
                "required": ["answer"],
            },
        )

    @property
    def spec(self) -> ToolSpec:
        """See ``Tool``."""
        return self._spec

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        """End with ``arguments['answer']``."""
        return Observation("The answer was handed in.", answer=arguments["answer"])
