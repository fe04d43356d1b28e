"""The interpreter of the project, in the agent's shell.

Images of the public collections keep it apart: SWE-bench and SWE-Gym in a conda environment, R2E-Gym in a virtual
environment below the repository. Their harnesses activate it, and so the agent's ``python`` must be that one.
"""

from prorl_gym.environments.swe.task import SweTask
from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.protocol import Sandbox

_CONDA = (
    "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate && conda activate testbed; fi "
    ">/dev/null 2>&1; true"
)
_COMMANDS = {
    "swebench": _CONDA,
    "swegym": _CONDA,
    "r2egym": 'if [ -d .venv/bin ]; then export VIRTUAL_ENV="$PWD/.venv" PATH="$PWD/.venv/bin:$PATH"; fi; true',
}
_SECONDS = 60.0


async def activate(task: SweTask, sandbox: Sandbox) -> None:
    """Put the project's interpreter first in the agent's shell; nothing to do for rows of our own.

    Raises:
        SandboxError: the sandbox is lost, or too slow: the agent would work without the project's interpreter.
    """
    command = _COMMANDS.get(task.source)
    if command is not None:
        shell = await sandbox.shell()
        ran = await shell.run(command, timeout=_SECONDS)
        if ran.timed_out or ran.restarted:
            what = f"swe row {task.id}: the project's environment could not be activated within {_SECONDS:g} s."
            raise SandboxError(FailureKind.SANDBOX_UNAVAILABLE, what, "Look at the load of the node.")
