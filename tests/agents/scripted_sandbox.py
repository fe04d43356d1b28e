"""A sandbox of scripted answers for the tools' tests: what is asked is recorded, what comes back is given."""

from collections.abc import Sequence
from typing import Any

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.protocol import CellResult, SandboxSpec, ShellResult


def lost() -> SandboxError:
    return SandboxError(FailureKind.SANDBOX_LOST, "The sandbox does not answer.")


class ScriptedSandbox:
    """Plays ``answers`` in order to the shell and the python session; an exception among them is raised."""

    def __init__(self, answers: Sequence[Any] = (), *, alive: bool = True) -> None:
        self._answers = list(answers)
        self._alive = alive
        self.asked: list[tuple[Any, ...]] = []
        self.leases = 0

    id = "scripted"
    spec = SandboxSpec()

    async def lease(self) -> "ScriptedSandbox":
        self.leases += 1
        return self

    async def is_alive(self) -> bool:
        return self._alive

    async def shell(self) -> "ScriptedSandbox":
        return self

    async def python(self) -> "ScriptedSandbox":
        return self

    async def start_command(self, command: str, *, wait: float) -> ShellResult:
        return self._answer("start", command, wait)

    async def send_input(self, text: str, *, wait: float) -> ShellResult:
        return self._answer("send", text, wait)

    async def restart(self) -> ShellResult:
        return self._answer("restart")

    async def run_cell(self, code: str, *, timeout: float) -> CellResult:
        return self._answer("run", code, timeout)

    def _answer(self, *asked: Any) -> Any:
        self.asked.append(asked)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def done(output: str = "", exit_code: int | None = 0, **more: Any) -> ShellResult:
    return ShellResult(output=output, exit_code=exit_code, cwd="/workspace", **more)
