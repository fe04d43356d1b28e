"""The ``bash`` tool: one persistent shell in the agent's sandbox, with the usual interface of SWE agents.

A command that does not end in time keeps running: the model may look again (empty command), type into it
(``is_input``), interrupt it (``C-c``), as it would at a terminal, or ``restart`` the shell when the program takes none
of it.
"""

from collections.abc import Mapping
from typing import Any

from prorl_gym.agents.protocol import Observation, ToolSpec, arguments_schema
from prorl_gym.agents.tools.agent_sandbox import SandboxSource, agent_action
from prorl_gym.sandbox.protocol import Shell, ShellResult
from prorl_gym.sandbox.service.operations.shell import control_key

INPUT_SECONDS = 1.0
"""How long to wait for output after typing into a running program."""

_SPEC = ToolSpec(
    name="bash",
    description=(
        "Run a command in a persistent bash shell: directory, variables and background jobs are kept between calls. "
        "A command that is still running when the time is up keeps running: call again with an empty command to see "
        "more of its output, with is_input=true to type a line into it, or with is_input=true and C-c, C-d or C-z to "
        "press that key. If nothing ends it, restart=true ends everything that the shell started and gives a new "
        "shell. There is no network."
    ),
    parameters=arguments_schema(
        {
            "command": {
                "type": "string",
                "description": "The command; empty to look at the running one; or the text to type with is_input.",
            },
            "is_input": {
                "type": "boolean",
                "description": "Type the text into the running program instead of starting a command.",
            },
            "restart": {
                "type": "boolean",
                "description": "Start a new shell in the same directory with the same exported variables. Needs no "
                "command, and runs none.",
            },
        }
    ),
)

_NEXT_STEPS = (
    "Send an empty command to see more of its output, text with is_input=true to type into it, C-c to interrupt it, or "
    "restart=true to end it with the shell."
)


class BashTool:
    """Runs commands; one call waits at most ``seconds`` for its command."""

    spec = _SPEC

    def __init__(self, source: SandboxSource, seconds: float) -> None:
        self._source = source
        self._seconds = seconds
        self._running = False

    async def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        command: str = arguments.get("command", "")
        restart = bool(arguments.get("restart", False))
        is_key = control_key(command) is not None
        typed = bool(arguments.get("is_input", False)) or is_key
        refusal = "" if restart else self._refusal(command, typed=typed, is_key=is_key)
        if refusal:
            return Observation(refusal)
        async with agent_action(self._source) as sandbox:
            shell = await sandbox.shell()
            result = await (shell.restart() if restart else self._run(shell, command, typed))
        self._running = result.exit_code is None
        return Observation(_describe_restart(result, command) if restart else _describe(result, self._seconds))

    async def _run(self, shell: Shell, command: str, typed: bool) -> ShellResult:
        if not typed and command.strip():
            return await shell.start_command(command, wait=self._seconds)
        if not typed:
            return await shell.send_input("", wait=self._seconds)
        text = command if control_key(command) or command.endswith("\n") else command + "\n"
        return await shell.send_input(text, wait=min(INPUT_SECONDS, self._seconds))

    def _refusal(self, command: str, *, typed: bool, is_key: bool) -> str:
        if "\0" in command:
            return "The command was not run: it holds a NUL character."
        if is_key and not self._running:
            return "Nothing is running, so the key was not sent. Send a command."
        if typed and not self._running:
            return "Nothing is running that could take input. Send the command without is_input."
        if not typed and not command.strip() and not self._running:
            return "Nothing is running. Send a command."
        if not typed and command.strip() and self._running:
            return f"The previous command is still running, so this one was not started. {_NEXT_STEPS}"
        return ""


def _describe(result: ShellResult, seconds: float) -> str:
    lines = [result.output.rstrip("\n")] if result.output.strip() else []
    if result.restarted:
        since = "that it had at its end" if result.state_kept else "from before this command"
        lines.append(
            f"[The shell ended and was started again with the directory and exported variables {since}: the rest is "
            "lost.]"
        )
    if result.timed_out:
        lines.append(f"[The command was stopped after {seconds:g} seconds.]")
    lines.append(f"[Current working directory: {result.cwd}]")
    if result.exit_code is None:
        nothing = "" if result.output.strip() else "It has printed nothing since the last look. "
        lines.append(f"[The command is still running. {nothing}{_NEXT_STEPS}]")
    else:
        lines.append(f"[Command finished with exit code {result.exit_code}]")
    return "\n".join(lines)


def _describe_restart(result: ShellResult, command: str) -> str:
    lines = [result.output.rstrip("\n")] if result.output.strip() else []
    lines.append(
        "[The shell was restarted: what it had started was ended. The directory and the exported variables are those "
        "after the last command that ended; the rest is lost.]"
    )
    if command.strip():
        lines.append("[The command was not run. Send it without restart.]")
    lines.append(f"[Current working directory: {result.cwd}]")
    return "\n".join(lines)
