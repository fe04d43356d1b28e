"""The tools an agent can be given."""

from prorl_gym.agents.tools.bash import BashTool
from prorl_gym.agents.tools.finish import FinishTool
from prorl_gym.agents.tools.python import PythonTool

__all__ = ["BashTool", "FinishTool", "PythonTool"]
