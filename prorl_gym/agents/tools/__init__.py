"""The tools an agent can be given. Those without a module of their own are here."""

from collections.abc import Mapping
from typing import Any

from prorl_gym.agents.protocol import Observation, ToolSpec, arguments_schema
from prorl_gym.agents.tools.agent_sandbox import SandboxSource, agent_action
from prorl_gym.agents.tools.bash import BashTool
from prorl_gym.agents.tools.editor import EditorTool

__all__ = ["BashTool", "EditorTool", "FinishTool", "PythonTool", "ThinkTool"]


class FinishTool:
    """Ends the rollout with an answer, which the description describes to the model."""

    def __init__(self, description: str = "Hand in your final answer and end.") -> None:
        self.spec = ToolSpec(
            name="finish",
            description=description,
            parameters=arguments_schema({"answer": {"type": "string", "description": "The final answer."}}, "answer"),
        )

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        return Observation("The answer was handed in.", answer=arguments["answer"])


class ThinkTool:
    """Takes note of a thought, which stays in the conversation."""

    spec = ToolSpec(
        name="think",
        description="Write down a thought: a plan, a cause, what to check next. Nothing is run and nothing is changed.",
        parameters=arguments_schema({"thought": {"type": "string", "description": "The thought."}}, "thought"),
    )

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        return Observation("Noted.")


class PythonTool:
    """Runs cells of at most ``seconds`` each in a persistent interpreter of the agent's sandbox."""

    spec = ToolSpec(
        name="python",
        description=(
            "Run Python code in a persistent session: variables, imports and functions are kept between calls. Returns "
            "what was printed and the value of the last expression. There is no network."
        ),
        parameters=arguments_schema({"code": {"type": "string", "description": "The code to run."}}, "code"),
    )

    def __init__(self, source: SandboxSource, seconds: float) -> None:
        self._source = source
        self._seconds = seconds

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        async with agent_action(self._source) as sandbox:
            session = await sandbox.python()
            result = await session.run_cell(arguments["code"], timeout=self._seconds)
        lines = [result.output.rstrip()] if result.output.strip() else []
        if result.images:
            lines.append(f"[{len(result.images)} figure(s) were drawn; they cannot be shown here.]")
        if result.timed_out:
            lines.append(f"[The code was stopped after {self._seconds:g} seconds.]")
        if result.restarted:
            lines.append("[The Python session ended and was started again: its variables are lost.]")
        return Observation("\n".join(lines) or "[No output.]")
