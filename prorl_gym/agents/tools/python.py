"""The ``python`` tool: cells in a persistent interpreter of the agent's sandbox."""

from collections.abc import Mapping
from typing import Any

from prorl_gym.agents.protocol import Observation, ToolSpec
from prorl_gym.agents.tools.agent_sandbox import SandboxSource, agent_action
from prorl_gym.sandbox.protocol import CellResult

_SPEC = ToolSpec(
    name="python",
    description=(
        "Run Python code in a persistent session: variables, imports and functions are kept between calls. Returns "
        "what was printed and the value of the last expression. There is no network."
    ),
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code to run."}},
        "required": ["code"],
    },
)


class PythonTool:
    """Runs cells.

    Args:
        source: leases the agent's sandbox.
        seconds: longest time of one cell.
    """

    spec = _SPEC

    def __init__(self, source: SandboxSource, seconds: float) -> None:
        self._source = source
        self._seconds = seconds

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        """Run ``arguments['code']``.

        Raises:
            SandboxError: see ``agent_action``.
        """
        async with agent_action(self._source) as sandbox:
            session = await sandbox.python()
            result = await session.run_cell(arguments["code"], timeout=self._seconds)
        return Observation(_describe(result, self._seconds))


def _describe(result: CellResult, seconds: float) -> str:
    lines = [result.output.rstrip()] if result.output.strip() else []
    if result.images:
        lines.append(f"[{len(result.images)} figure(s) were drawn; they cannot be shown here.]")
    if result.timed_out:
        lines.append(f"[The code was stopped after {seconds:g} seconds.]")
    if result.restarted:
        lines.append("[The Python session ended and was started again: its variables are lost.]")
    return "\n".join(lines) or "[No output.]"
